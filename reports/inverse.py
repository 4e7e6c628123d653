"""Error of the triangular inverse per merge level and family of keys: emulated products against their contract."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.resume import write_whole
from verify.devices import CPU_INTERPRET
from verify.gdn.cases import KEYS
from verify.gdn.inverse_contract import inverse_bound
from verify.gdn.inverse_steps import LEVELS, InverseSteps, invert
from verify.gdn.tables import MATRIX_DECAYS, matrix
from verify.records import encode_number

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMAT = "flywheel-inverse-levels/1"
SUBJECT = "the eight products, emulated in numpy"
BETAS = ("up to 1", "1 to 2")
SEEDS = 2


def blocks(lower: np.ndarray, level: int) -> np.ndarray:
    """The diagonal blocks of one size, `[n / level, level, level]`."""
    count = len(lower) // level
    return np.stack([lower[n * level : (n + 1) * level, n * level : (n + 1) * level] for n in range(count)])


def level_errors(lower: np.ndarray, steps: InverseSteps) -> list[dict[str, Any]]:
    """Per level: the largest error, bound and share of the inverses of its diagonal blocks, and the costliest site."""
    found = []
    for level in LEVELS:
        each = blocks(lower, level)
        got = invert(each, steps)
        bounds = [inverse_bound(block, steps, CPU_INTERPRET) for block in each]
        errors = [np.abs(x.astype(np.float64) - b.exact) for x, b in zip(got, bounds, strict=True)]
        shares = [
            float(np.divide(e, b.bound, out=np.zeros_like(e), where=b.bound > 0).max())
            for e, b in zip(errors, bounds, strict=True)
        ]
        widest = max(bounds, key=lambda b: float(b.bound.max()))
        site = max(widest.sites, key=lambda name: float(widest.sites[name].max()), default="")
        found.append(
            {
                "level": level,
                "error": max(float(e.max()) for e in errors),
                "bound": max(float(b.bound.max()) for b in bounds),
                "share": max(shares),
                "site": site,
            }
        )
    return found


def table(progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The worst of every family of keys, range of write strengths, precision and level."""
    rows: list[dict[str, Any]] = []
    for keys in KEYS:
        progress(keys)
        for beta in BETAS:
            for precision in ("bf16", "bf16x3"):
                cases = [matrix(keys, beta, decay, seed) for decay in MATRIX_DECAYS for seed in range(SEEDS)]
                per_matrix = [level_errors(lower, InverseSteps(precision)) for lower in cases]
                for same_level in zip(*per_matrix, strict=True):
                    worst = max(same_level, key=lambda one: one["error"])
                    numbers = {k: encode_number(max(one[k] for one in same_level)) for k in ("error", "bound", "share")}
                    rows.append(
                        {
                            "keys": keys,
                            "beta": beta,
                            "precision": precision,
                            "level": worst["level"],
                            "matrices": len(cases),
                            "site": worst["site"],
                            **numbers,
                        }
                    )
    return {"format": FORMAT, "subject": SUBJECT, "rows": rows}


def write(path: Path, progress: Callable[[str], None] = lambda _: None) -> None:
    """Compute the table and write it."""
    write_whole(path, json.dumps(table(progress), allow_nan=False) + "\n")
