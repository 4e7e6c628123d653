"""Products as a kernel's author wrote them, beside the `vmatmul`s that the compiler made of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verify.compiled.generations import Generation
    from verify.compiled.work import Work

VMATMUL_ROWS_FP32 = 8


@dataclasses.dataclass(frozen=True)
class WrittenProduct:
    """Products as the kernel's author wrote them, from the trace.

    Attributes:
        lhs: type of the left operand.
        rhs: type of the right operand.
        precision: JAX's name; None is the default.
        count: how many such products the kernel holds, loops not multiplied out.
        sources: the lines that write them.
    """

    lhs: str
    rhs: str
    precision: str
    count: int
    sources: tuple[str, ...]


def written_products(products: list[dict[str, Any]]) -> tuple[WrittenProduct, ...]:
    """The traced products of a kernel, alike ones together."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for product in products:
        kinds = (product["lhs"].split("[")[0], product["rhs"].split("[")[0], product["precision"])
        groups.setdefault(kinds, []).append(product["source"])
    return tuple(
        WrittenProduct(lhs, rhs, precision, len(sources), tuple(dict.fromkeys(sources)))
        for (lhs, rhs, precision), sources in groups.items()
    )


def fp32_passes(static: Work, written: list[dict[str, Any]], generation: Generation) -> float | str:
    """FP32 `vmatmul`s for each that a single pass takes; a string is the reason why that cannot be said."""
    fp32 = [product for product in written if product["lhs"].startswith("float32")]
    if not fp32:
        return "no FP32 product was written"
    single = 0
    for product in fp32:
        (m, k), (_, n) = (
            _matrix(product["lhs"], product["contracting"][0]),
            _matrix(product["rhs"], product["contracting"][1], last=True),
        )
        if not m or not n or max(k, n) <= generation.mxu_size // 2:
            return "products that fill half of the matrix unit or less are packed, and cannot be counted"
        single += -(-m // VMATMUL_ROWS_FP32) * -(-k // generation.mxu_size) * -(-n // generation.mxu_size)
    return static.products.get("f32", 0) / single


def _matrix(text: str, contracting: list[int], *, last: bool = False) -> tuple[int, int]:
    """(free, contracted) extents of an operand, or the other way round for the right one; 0 for more dimensions."""
    shape = [int(word) for word in text.partition("[")[2].rstrip("]").split(",") if word]
    if len(shape) != 2 or len(contracting) != 1:
        return (0, 0)
    contracted, free = shape[contracting[0]], shape[1 - contracting[0]]
    return (contracted, free) if last else (free, contracted)
