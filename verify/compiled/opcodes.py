"""What an opcode is: product, push, transcendental and so on, with its data type."""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_UNIT = re.compile(r"\.(?:mxu|xlu)\d$")
_DTYPE = re.compile(r"\.(f32|bf16|s8|u8|s4|u4|f8\w*|b16|b32|e4m3\w*|e5m2\w*)\b")
_PUSH = re.compile(r"vmatpush|vmatprep\.subr")
_TRANSCENDENTAL = re.compile(r"v(exp2|pow2|exp|rcp|rsqrt|sqrt|log2|log|tanh|erf|sigshft|sin|cos)\b")
_FP32_PUSH = "f32"

MATMUL = "vmatmul"
TRANSPOSE = "vxpose"


def stem(opcode: str) -> str:
    """The opcode without the number of the unit that executes it."""
    return _UNIT.sub("", opcode)


def product_dtype(opcode: str) -> str | None:
    """Data type of the streamed operand of a product; None if the opcode is no product."""
    if not opcode.startswith(MATMUL):
        return None
    found = _DTYPE.search(opcode)
    return found.group(1) if found else _FP32_PUSH


def push_dtype(opcode: str) -> str | None:
    """Data type of a push of the stationary operand; None if the opcode is no push."""
    if not _PUSH.match(opcode):
        return None
    found = _DTYPE.search(opcode)
    return found.group(1) if found else _FP32_PUSH


def is_transposed_push(opcode: str) -> bool:
    """Whether a push transposes on its way into the matrix unit."""
    return bool(_PUSH.match(opcode)) and ".xpose" in opcode


def transcendental(opcode: str) -> str | None:
    """Name of the function that the opcode computes on the extended unary pipe; None if it computes none."""
    found = _TRANSCENDENTAL.match(opcode)
    return stem(opcode) if found else None


def products(counts: Mapping[str, int]) -> dict[str, int]:
    """`vmatmul` instructions by data type of the streamed operand."""
    return _group(counts, product_dtype)


def pushes(counts: Mapping[str, int]) -> dict[str, int]:
    """Pushes by data type."""
    return _group(counts, push_dtype)


def transposed_pushes(counts: Mapping[str, int]) -> int:
    """Pushes that transpose."""
    return sum(count for opcode, count in counts.items() if is_transposed_push(opcode))


def transcendentals(counts: Mapping[str, int]) -> dict[str, int]:
    """Instructions of the extended unary pipe by function."""
    return _group(counts, transcendental)


def transposes(counts: Mapping[str, int]) -> int:
    """Vector transposes on the cross-lane unit."""
    return sum(count for opcode, count in counts.items() if opcode.startswith(TRANSPOSE))


def _group(counts: Mapping[str, int], key: Callable[[str], str | None]) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for opcode, count in counts.items():
        name = key(opcode)
        if name is not None and count:
            found[name] += count
    return dict(sorted(found.items()))
