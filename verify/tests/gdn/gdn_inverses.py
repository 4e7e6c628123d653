"""Matrices of key families, for tests of the inverse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verify.gdn.cases import BETAS, KEYS
from verify.gdn.tables import matrix

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

__all__ = ["MATRIX_DECAYS", "matrices", "matrix"]

MATRIX_DECAYS = ("0", "mild", "strong")


def matrices(seeds: int, decays: tuple[str, ...] = MATRIX_DECAYS) -> Iterator[tuple[str, np.ndarray]]:
    """Every family of keys and write strengths."""
    for keys in KEYS:
        for beta in BETAS:
            for decay in decays:
                for seed in range(seeds):
                    yield f"{keys}, beta {beta}, decay {decay}, seed {seed}", matrix(keys, beta, decay, seed)
