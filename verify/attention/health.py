"""Whether the oracles can be trusted, asked before anything is judged by them.

Known answers come from closed forms and from a definition written here a second time, in the standard library's decimal
arithmetic, with its own mask and its own head map: a mistake that the tiers share (they all ask the problem what a row
sees) shows against it.  Each tier has to give every known answer within its own bound, and the bound has to be small;
then the tiers have to agree with each other within the sum of their bounds.
"""

from __future__ import annotations

import dataclasses
import decimal
import math
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from verify.attention import oracle_arb, oracle_float64, oracle_mpmath
from verify.attention.problem import AttentionProblem
from verify.attention.reference import OracleUnsound, Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Oracle = Callable[[AttentionProblem], Reference]

DIGITS = 60
# An oracle has to be better than an FP32 result by far; the float64 tier reaches about 1e-13 on the known cases.
ACCURACY = 2.0**-36


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """A problem with its answer."""

    name: str
    problem: AttentionProblem
    answer: Reference


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


def check_oracle(name: str, oracle: Oracle) -> None:
    """Check one oracle against the known answers.

    Raises:
        OracleUnsound: it misses one of them, or its own bound is too large to judge anything.
    """
    for known in known_answers():
        found = oracle(known.problem)
        _agree(f"{name} on {known.name}", found, known.answer)
        _accurate(f"{name} on {known.name}", found, known.problem)


def cross_check(problem: AttentionProblem, oracles: Mapping[str, Oracle]) -> None:
    """Compare oracles on one problem, pair by pair.

    Raises:
        OracleUnsound: two of them differ by more than the sum of their bounds.
    """
    found = {name: oracle(problem) for name, oracle in oracles.items()}
    names = list(found)
    for position, first in enumerate(names):
        for second in names[position + 1 :]:
            _agree(f"{first} against {second}", found[first], found[second])


def _agree(what: str, found: Reference, other: Reference) -> None:
    for name in ("out", "lse"):
        got, want = getattr(found, name), getattr(other, name)
        room = getattr(found, f"{name}_error") + getattr(other, f"{name}_error")
        if got.shape != want.shape:
            message = f"{what}: {name} has shape {got.shape}, not {want.shape}"
            raise OracleUnsound(message)
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        with np.errstate(invalid="ignore"):
            same |= np.isfinite(got) & np.isfinite(want) & (np.abs(got - want) <= room)
        if not same.all():
            index = tuple(int(i) for i in np.unravel_index(int(same.argmin()), same.shape))
            message = f"{what}: {name}{list(index)} is {got[index]!r}, not {want[index]!r} +- {room[index]!r}"
            raise OracleUnsound(message)


def _accurate(what: str, found: Reference, problem: AttentionProblem) -> None:
    """Bounds far below what is judged: relative to the largest |v|, and to 1 + |lse|."""
    values = problem.v.astype(np.float64)
    largest = np.max(np.abs(values[np.isfinite(values)]), initial=1.0)
    sizes = {"out": largest, "lse": 1.0 + np.abs(np.where(np.isfinite(found.lse), found.lse, 0.0))}
    for name, size in sizes.items():
        error = getattr(found, f"{name}_error") / size
        if not np.all(error <= ACCURACY):
            message = f"{what}: its own bound of {name} is {error.max():.3g}, more than {ACCURACY:.3g}"
            raise OracleUnsound(message)


def known_answers() -> Iterator[Known]:
    """Problems with answers that no oracle had a hand in."""
    for name, problem in {"grouped heads": _grouped(), "large logits": _large(), "flat logits": _flat()}.items():
        yield Known(name, problem, _by_decimal(problem))
    yield _aligned()
    yield _empty_rows()
    yield from _classes()


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
        _exact([[[[62.5], [63.0], [63.5]]]], [[[math.log(n) for n in (126, 127, 128)]]]),
    )


def _empty_rows() -> Known:
    """Five queries, two keys, equal logits: three rows see nothing."""
    problem = _problem(np.ones((1, 1, 5, 1)), np.zeros((1, 1, 2, 1)), [[[[1.0], [3.0]]]], causal=True)
    out = [[[[0.0], [0.0], [0.0], [1.0], [2.0]]]]
    return Known("rows that see no key", problem, _exact(out, [[[-math.inf] * 3 + [0.0, math.log(2.0)]]]))


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
        yield Known(name, problem, _exact([[[out]]], [[[lse]]]))
    zero_times_inf = _problem([[[[0.0, 1.0]]]], [[[[0.0, 0.0], [inf, 0.0]]]], np.ones((1, 1, 2, 2)), causal=False)
    yield Known("0 * inf", zero_times_inf, _exact([[[[nan, nan]]]], [[[nan]]]))
    only_minus_inf = _problem(np.ones((1, 1, 1, 1)), [[[[-inf], [-inf]]]], np.ones((1, 1, 2, 1)), causal=False)
    yield Known("nothing but -inf", only_minus_inf, _exact([[[[nan]]]], [[[nan]]]))
    hidden = _problem(np.ones((1, 1, 2, 1)), [[[[0.0], [nan]]]], [[[[5.0], [nan]]]], causal=True)
    yield Known("NaN behind the mask", hidden, _exact([[[[5.0], [nan]]]], [[[0.0, nan]]]))


def _exact(out: object, lse: object) -> Reference:
    """An answer that is exact but for the rounding of its numbers to float64."""
    arrays = [np.asarray(x, dtype=np.float64) for x in (out, lse)]
    ulps = [np.where(np.isfinite(x), 2.0 * np.spacing(np.abs(np.where(np.isfinite(x), x, 0.0))), 0.0) for x in arrays]
    return Reference(arrays[0], ulps[0], arrays[1], ulps[1], "known")


def _by_decimal(problem: AttentionProblem) -> Reference:
    """The definition again, in decimal arithmetic of 60 digits with correctly rounded exponentials and logarithms."""
    shape = problem.q.shape
    out, lse = np.zeros(shape), np.zeros(shape[:3])
    q, k, v = (x.astype(np.float64) for x in (problem.q, problem.k, problem.v))
    with decimal.localcontext(decimal.Context(prec=DIGITS, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)):
        for batch, head, row in np.ndindex(*shape[:3]):
            kv_head = head * k.shape[1] // shape[1]
            seen = [j for j in range(k.shape[2]) if not problem.causal or j - row <= k.shape[2] - shape[2]]
            pairs = [(k[batch, kv_head, j], v[batch, kv_head, j]) for j in seen]
            out[batch, head, row], lse[batch, head, row] = _decimal_row(q[batch, head, row], pairs, problem.scale)
    return _exact(out, lse)


def _decimal_row(q: np.ndarray, pairs: list[tuple[np.ndarray, np.ndarray]], scale: float) -> tuple[list[float], float]:
    exact = decimal.Decimal
    factor = exact(scale)
    weights = [(factor * sum(exact(a) * exact(b) for a, b in zip(q, key, strict=True))).exp() for key, _ in pairs]
    total = sum(weights, exact(0))
    lanes = [[w * exact(value[lane]) for w, (_, value) in zip(weights, pairs, strict=True)] for lane in range(len(q))]
    return [float(sum(terms) / total) for terms in lanes], float(total.ln())
