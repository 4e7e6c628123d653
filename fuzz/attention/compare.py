"""Comparing two results of one subject: bitwise, or within what the contract allows both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verify.measures import bits, errors, measure
from verify.verdict import Judgement, Verdict, decide, describe, within_bound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verify.attention.subjects import SubjectResult

Pair = tuple[np.ndarray, np.ndarray, np.ndarray]
"""What is found, what it is compared with, and how far apart they may be."""


def close(pairs: Mapping[str, Pair], what: str) -> Judgement:
    """Whether two results agree within the bounds; `what` says which relation must hold.

    NaN matches NaN, since both results follow from the same inputs; infinite bounds (nothing promised) are left out.
    """
    measures, wrong = {}, []
    for name, (got, want, limit) in pairs.items():
        judged = np.isfinite(limit)
        if not judged.any():
            continue
        found = errors(got, want, nan_matches=True, where=None if judged.all() else judged)
        decision = decide(found, np.where(judged, limit, 0.0))
        measures[name] = measure(found, np.where(judged, limit, 0.0))
        if decision.wrong.any():
            wrong.append(describe(name, found, decision))
    if wrong:
        return Judgement(Verdict.FAIL, f"{what} does not hold: {'; '.join(wrong)}", measures)
    if not measures:
        return Judgement(Verdict.OUTSIDE_DOMAIN, "nothing is promised about either result")
    words = "; ".join(within_bound(name, found) for name, found in measures.items())
    return Judgement(Verdict.PASS, f"{what} holds: {words}", measures)


def same_bits(first: SubjectResult, second: SubjectResult, what: str, rows: np.ndarray | None = None) -> str | None:
    """How two results differ in their bits, NaN payloads apart; None if they do not.

    Args:
        first: `[batch, heads, q_len, ...]`.
        second: the same.
        what: the relation that must hold.
        rows: `[batch, heads, q_len]`, the rows to compare; None: all.
    """
    for name in ("out", "lse"):
        a, b = getattr(first, name), getattr(second, name)
        if a is None or b is None:
            continue
        found = different_words(name, a, b, what, rows)
        if found is not None:
            return found
    return None


def different_words(name: str, a: np.ndarray, b: np.ndarray, what: str, rows: np.ndarray | None = None) -> str | None:
    """How two BF16 or FP32 arrays differ in their bits, NaN payloads apart; None if they do not.

    Args:
        name: of the arrays.
        a: one.
        b: the other, of the same shape and type.
        what: the relation that must hold.
        rows: of the leading axes, which are compared; None: all.
    """
    words = np.uint16 if a.dtype.itemsize == 2 else np.uint32
    wide = (a.astype(np.float32), b.astype(np.float32))
    differ = (np.ascontiguousarray(a).view(words) != np.ascontiguousarray(b).view(words)) & ~(
        np.isnan(wide[0]) & np.isnan(wide[1])
    )
    if rows is not None:
        differ &= rows.reshape(rows.shape + (1,) * (differ.ndim - rows.ndim))
    if not differ.any():
        return None
    at = tuple(int(i) for i in np.argwhere(differ)[0])
    where = ", ".join(map(str, at))
    return (
        f"{what} does not hold: {name}[{where}] is {wide[0][at]:.9g} ({bits(a[at])}) and "
        f"{wide[1][at]:.9g} ({bits(b[at])}); {int(differ.sum())} of {differ.size} words differ"
    )
