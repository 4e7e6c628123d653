"""Whether the oracles can be trusted, asked before anything is judged by them.

Known answers come from closed forms and from the definition written a second time (`verify.attention.definition`), with
its own mask and its own head map: a mistake that the tiers share (they all ask the problem what a row sees) shows
against it.  Each tier has to give every known answer within its own bound, and the bound has to be small;
then the tiers have to agree with each other within the sum of their bounds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from verify.attention import agreement, oracle_arb, oracle_float64, oracle_mpmath
from verify.attention.definition import Known, by_decimal, exact
from verify.attention.known_features import feature_answers
from verify.attention.problem import AttentionProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from verify.attention.reference import Reference

    Oracle = Callable[[AttentionProblem], Reference]

# An oracle has to be better than an FP32 result by far; the float64 tier reaches about 1e-13 on the known cases.
ACCURACY = 2.0**-36


def tiers() -> dict[str, Oracle]:
    """The oracles by name."""
    return {
        "float64": oracle_float64.attention,
        "arb": oracle_arb.attention,
        "mpmath": oracle_mpmath.attention,
    }


def check_oracles() -> None:
    """Check every oracle against the known answers, and all of them against each other (well under a second).

    Raises:
        OracleUnsound: one of them is wrong; the message names it, the case and the element.
    """
    for name, oracle in tiers().items():
        check_oracle(name, oracle)
    for problem in (_grouped(), _large()):
        cross_check(problem, tiers())


def check_oracle(name: str, oracle: Oracle, answers: Iterable[Known] | None = None) -> None:
    """Check one oracle against the known answers, or against some of them.

    Raises:
        OracleUnsound: it misses one of them, or its own bound is too large to judge anything.
    """
    for known in known_answers() if answers is None else answers:
        found = oracle(known.problem)
        _agree(f"{name} on {known.name}", found, known.answer)
        _accurate(f"{name} on {known.name}", found, known.problem)


def cross_check(problem: AttentionProblem, oracles: Mapping[str, Oracle]) -> None:
    """Compare oracles on one problem, pair by pair.

    Raises:
        OracleUnsound: two of them differ by more than the sum of their bounds.
    """
    agreement.cross_check({name: oracle(problem) for name, oracle in oracles.items()}, _agree)


def _agree(what: str, found: Reference, other: Reference) -> None:
    for name in ("out", "lse", "max_logit"):
        got, want = getattr(found, name), getattr(other, name)
        if name == "max_logit" and (got is None or want is None):
            continue
        agreement.agree(what, name, got, want, getattr(found, f"{name}_error") + getattr(other, f"{name}_error"))


def _accurate(what: str, found: Reference, problem: AttentionProblem) -> None:
    """Bounds far below what is judged: relative to the largest |v|, and to 1 + |lse|."""
    values = problem.v.astype(np.float64)
    largest = np.max(np.abs(values[np.isfinite(values)]), initial=1.0)
    sizes = {"out": largest, "lse": 1.0 + np.abs(np.where(np.isfinite(found.lse), found.lse, 0.0))}
    if found.max_logit is not None:
        sizes["max_logit"] = 1.0 + np.abs(np.where(np.isfinite(found.max_logit), found.max_logit, 0.0))
    for name, size in sizes.items():
        agreement.accurate(what, name, getattr(found, f"{name}_error"), size, ACCURACY)


def known_answers() -> Iterator[Known]:
    """Problems with answers that no oracle had a hand in."""
    for name, problem in {"grouped heads": _grouped(), "large logits": _large(), "flat logits": _flat()}.items():
        yield Known(name, problem, by_decimal(problem))
    yield _aligned()
    yield _empty_rows()
    yield from _classes()
    yield from feature_answers()


def _problem(q: object, k: object, v: object, *, causal: bool, scale: float = 1.0) -> AttentionProblem:
    arrays = [np.asarray(x, dtype=np.float64).astype(ml_dtypes.bfloat16) for x in (q, k, v)]
    return AttentionProblem(*arrays, causal=causal, scale=scale)


def _grouped() -> AttentionProblem:
    """Six query heads on two KV heads (a ratio other than the number of KV heads); causal, more keys than queries."""
    rng = np.random.default_rng(1)
    shapes = ((1, 6, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4))
    return _problem(*(rng.integers(-12, 13, shape) / 8 for shape in shapes), causal=True, scale=0.375)


def _large() -> AttentionProblem:
    """Logits in the thousands, of which the largest two differ by one."""
    key = [[40.0, 0.0], [40.0, 1.0], [-30.0, 2.0], [39.0, 3.0]]
    return _problem(
        [[[[40.0, 1.0], [64.0, -2.0]]]], [[key]], [[[[1.0, 2.0], [-3.0, 5.0], [7.0, 0.5], [1e30, 0.25]]]], causal=False
    )


def _flat() -> AttentionProblem:
    """Logits of which none stands out, a value row far larger than the others."""
    steps = np.arange(40.0)
    values = np.stack([steps, np.where(steps == 7.0, 2.0**100, 1.0)], axis=-1)
    return _problem(
        np.full((1, 1, 2, 2), 0.25),
        np.stack([steps / 64, -steps / 32], axis=-1)[None, None],
        values[None, None],
        causal=True,
    )


def _aligned() -> Known:
    """Three queries, 128 keys, equal logits, v_j = j: bottom-right alignment gives 62.5, 63, 63.5."""
    problem = _problem(
        np.ones((1, 1, 3, 1)), np.zeros((1, 1, 128, 1)), np.arange(128.0)[None, None, :, None], causal=True
    )
    return Known(
        "bottom-right alignment",
        problem,
        exact([[[[62.5], [63.0], [63.5]]]], [[[math.log(n) for n in (126, 127, 128)]]]),
    )


def _empty_rows() -> Known:
    """Five queries, two keys, equal logits: three rows see nothing."""
    problem = _problem(np.ones((1, 1, 5, 1)), np.zeros((1, 1, 2, 1)), [[[[1.0], [3.0]]]], causal=True)
    out = [[[[0.0], [0.0], [0.0], [1.0], [2.0]]]]
    return Known("rows that see no key", problem, exact(out, [[[-math.inf] * 3 + [0.0, math.log(2.0)]]]))


def _classes() -> Iterator[Known]:
    """Inputs that are not finite: a name, the key row, the value row, and the class of output and log-sum-exp.

    One query (1, 1) sees the key (0, 0) with value (1, 2), then the given pair.
    """
    nan, inf = math.nan, math.inf
    even = [1.5, 2.5]
    table = (
        ("NaN score", [nan, 0], [2, 3], [nan, nan], nan),
        ("+inf score", [inf, 0], [2, 3], [nan, nan], nan),
        ("inf - inf", [inf, -inf], [2, 3], [nan, nan], nan),
        ("-inf score", [-inf, 0], [2, 3], [1, 2], 0.0),
        ("-inf score, NaN value", [-inf, 0], [nan, inf], [1, 2], 0.0),
        ("+inf value", [0, 0], [inf, 3], [inf, even[1]], math.log(2.0)),
        ("-inf value of vanishing weight", [-(2.0**60), 0], [-inf, 2], [-inf, 2], 0.0),
        ("NaN value", [0, 0], [2, nan], [even[0], nan], math.log(2.0)),
        ("subnormal key", [2.0**-130, 0], [2, 3], even, math.log(2.0)),
    )
    for name, key, value, out, lse in table:
        problem = _problem(np.ones((1, 1, 1, 2)), [[[[0.0, 0.0], key]]], [[[[1.0, 2.0], value]]], causal=False)
        yield Known(name, problem, exact([[[out]]], [[[lse]]]))
    zero_times_inf = _problem([[[[0.0, 1.0]]]], [[[[0.0, 0.0], [inf, 0.0]]]], np.ones((1, 1, 2, 2)), causal=False)
    yield Known("0 * inf", zero_times_inf, exact([[[[nan, nan]]]], [[[nan]]]))
    only_minus_inf = _problem(np.ones((1, 1, 1, 1)), [[[[-inf], [-inf]]]], np.ones((1, 1, 2, 1)), causal=False)
    yield Known("nothing but -inf", only_minus_inf, exact([[[[nan]]]], [[[nan]]]))
    hidden = _problem(np.ones((1, 1, 2, 1)), [[[[0.0], [nan]]]], [[[[5.0], [nan]]]], causal=True)
    yield Known("NaN behind the mask", hidden, exact([[[[5.0], [nan]]]], [[[0.0, nan]]]))
