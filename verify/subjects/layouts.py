"""Between the suite's layout `[batch, heads, tokens, head_dim]` and a kernel's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

AXES = {"b": 0, "h": 1, "t": 2, "d": 3}
BATCHED = ("bhtd", "bthd", "hbtd", "tbhd")
UNBATCHED = ("htd", "thd")
LAYOUTS = (*BATCHED, *UNBATCHED)
"""Letters name the axes: b batch, h heads, t tokens, d head_dim.  Without b it is called for each batch entry."""


def to_layout(x: np.ndarray, layout: str) -> np.ndarray:
    """An array `[batch, heads, tokens, head_dim]` (or without its first axis) in the kernel's layout, contiguous."""
    shift = 0 if "b" in layout else 1
    return np.ascontiguousarray(x.transpose([AXES[letter] - shift for letter in layout]))


def from_layout(x: np.ndarray, layout: str) -> np.ndarray:
    """The inverse of `to_layout`; LSE comes in the layout without its d, such as "bht"."""
    order = [letter for letter in "bhtd" if letter in layout]
    return np.ascontiguousarray(x.transpose([layout.index(letter) for letter in order]))


def per_batch_entry(
    call: Callable[..., tuple[np.ndarray, np.ndarray | None]], arrays: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Call an unbatched kernel for each batch entry and stack what it returns."""
    results = [call(entry, *(x[entry] for x in arrays)) for entry in range(arrays[0].shape[0])]
    outs = np.stack([out for out, _ in results])
    lses = [lse for _, lse in results]
    return outs, None if lses[0] is None else np.stack([lse for lse in lses if lse is not None])
