"""Error of the triangular inverse per merge level and family of keys: our kernel against its contract.

A level is what the kernel makes of L cut down to the diagonal blocks of that size: the merges above it then add exact
zeros, and what it returns is what it has after that level.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.resume import write_whole
from verify.devices import CPU_INTERPRET
from verify.gdn.cases import KEYS
from verify.gdn.inverse_contract import inverse_bound
from verify.gdn.inverse_steps import LEVELS, InverseSteps
from verify.gdn.tables import MATRIX_DECAYS, matrix
from verify.records import encode_number

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMAT = "flywheel-inverse-levels/1"
SUBJECT = "flywheel.gdn.triangular_inverse"
BETAS = ("up to 1", "1 to 2")
SEEDS = 2
PRECISIONS = {"up to 1": ("bf16", "bf16x3"), "1 to 2": ("bf16x3",)}
"""`bf16` promises nothing for strengths above 1, and is not asked."""


def blocks(matrix: np.ndarray, level: int) -> np.ndarray:
    """The diagonal blocks of one size, `[n / level, level, level]`."""
    count = len(matrix) // level
    return np.stack([matrix[n * level : (n + 1) * level, n * level : (n + 1) * level] for n in range(count)])


def cut(lower: np.ndarray, level: int) -> np.ndarray:
    """The matrices `[.., n, n]` with nothing but their diagonal blocks of one size."""
    block = np.arange(lower.shape[-1]) // level
    return np.where(block[:, None] == block[None, :], lower, np.float32(0.0))


def inverses(lower: np.ndarray, precision: str) -> np.ndarray:
    """What the kernel returns for matrices `[n, 64, 64]`, in interpret mode."""
    import jax.numpy as jnp  # noqa: PLC0415  the process that plans and draws needs no JAX

    from flywheel.gdn import triangular_inverse  # noqa: PLC0415

    return np.asarray(triangular_inverse(jnp.asarray(lower), precision=precision, interpret=True))  # type: ignore[arg-type]


def level_errors(
    lower: np.ndarray, precision: str, invert: Callable[[np.ndarray, str], np.ndarray] = inverses
) -> list[dict[str, Any]]:
    """Per level: the largest error, bound and share over matrices `[n, 64, 64]`, and the costliest site."""
    steps, found = InverseSteps(precision, "add"), []
    got = invert(np.concatenate([cut(lower, level) for level in LEVELS]), precision)
    for level, parts in zip(LEVELS, np.split(got, len(LEVELS)), strict=True):
        wanted = [inverse_bound(block, steps, CPU_INTERPRET) for each in lower for block in blocks(each, level)]
        here = [block.astype(np.float64) for each in parts for block in blocks(each, level)]
        errors = [np.abs(x - b.exact) for x, b in zip(here, wanted, strict=True)]
        shares = [
            float(np.divide(e, b.bound, out=np.zeros_like(e), where=b.bound > 0).max())
            for e, b in zip(errors, wanted, strict=True)
        ]
        widest = max(wanted, key=lambda b: float(b.bound.max()))
        found.append(
            {
                "level": level,
                "error": max(float(e.max()) for e in errors),
                "bound": float(widest.bound.max()),
                "share": max(shares),
                "site": max(widest.sites, key=lambda name: float(widest.sites[name].max()), default=""),
            }
        )
    return found


def table(progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The worst of every family of keys, range of write strengths, precision and level."""
    rows: list[dict[str, Any]] = []
    for keys in KEYS:
        progress(keys)
        for beta in BETAS:
            cases = [matrix(keys, beta, decay, seed) for decay in MATRIX_DECAYS for seed in range(SEEDS)]
            for precision in PRECISIONS[beta]:
                for one in level_errors(np.stack(cases), precision):
                    numbers = {key: encode_number(one[key]) for key in ("error", "bound", "share")}
                    of = {"keys": keys, "beta": beta, "precision": precision, "matrices": len(cases)}
                    rows.append(of | {"level": one["level"], "site": one["site"]} | numbers)
    return {"format": FORMAT, "subject": SUBJECT, "rows": rows}


def write(path: Path, progress: Callable[[str], None] = lambda _: None) -> None:
    """Compute the table and write it."""
    write_whole(path, json.dumps(table(progress), allow_nan=False) + "\n")
