"""Whether the gradient oracles can be trusted, asked before anything is judged by them.

Known answers come from closed forms and from central differences of the forward definition, written here a second time
in the standard library's decimal arithmetic, with its own mask and its own head map: no derivative that the oracles
state is used.  Each tier has to give every known answer within its own bound, and the bound has to be small; then the
tiers have to agree with each other within the sum of their bounds.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention import agreement
from verify.attention.gradients import oracle_arb, oracle_float64, oracle_mpmath
from verify.attention.gradients.problem import GradientProblem, causal_rows, exact
from verify.attention.gradients.reference import Bounded, Gradients
from verify.attention.problem import BF16
from verify.attention.reference import OracleUnsound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Oracle = Callable[[GradientProblem], Gradients]

DIGITS = 60
STEP = decimal.Decimal("1e-18")
# Central differences err by STEP^2 times a third derivative, which stays below 10^9 on the known problems, plus
# 10^-DIGITS / STEP times the loss.
DIFFERENCE_ERROR = 1e-26
# An oracle has to be better than an FP32 result by far; the float64 tier reaches about 1e-13 on the known cases.
ACCURACY = 2.0**-36


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """A problem with its answer."""

    name: str
    problem: GradientProblem
    answer: Gradients


def tiers() -> dict[str, Oracle]:
    """The oracles by name."""
    return {
        "float64": oracle_float64.gradients,
        "arb": oracle_arb.gradients,
        "mpmath": oracle_mpmath.gradients,
    }


def check_oracles() -> None:
    """Check every oracle against the known answers, and all of them against each other (well under a second).

    Raises:
        OracleUnsound: one of them is wrong; the message names it, the case and the element.
    """
    for name, oracle in tiers().items():
        check_oracle(name, oracle)
    for known in known_answers():
        cross_check(known.problem, tiers())


def check_oracle(name: str, oracle: Oracle) -> None:
    """Check one oracle against the known answers.

    Raises:
        OracleUnsound: it misses one of them, or its own bound is too large to judge anything.
    """
    for known in known_answers():
        found = oracle(known.problem)
        _agree(f"{name} on {known.name}", found, known.answer)
        _accurate(f"{name} on {known.name}", found)


def cross_check(problem: GradientProblem, oracles: Mapping[str, Oracle]) -> None:
    """Compare oracles on one problem, pair by pair.

    Raises:
        OracleUnsound: two of them differ by more than the sum of their bounds.
    """
    agreement.cross_check({name: oracle(problem) for name, oracle in oracles.items()}, _agree)


def _agree(what: str, found: Gradients, other: Gradients) -> None:
    wanted = dict(other.parts())
    parts = dict(found.parts())
    if parts.keys() != wanted.keys():
        message = f"{what}: derivatives {sorted(parts)} instead of {sorted(wanted)}"
        raise OracleUnsound(message)
    for name, part in parts.items():
        agreement.agree(what, name, part.value, wanted[name].value, part.error + wanted[name].error)


def _accurate(what: str, found: Gradients) -> None:
    """Bounds far below what is judged, relative to the largest derivative of their kind."""
    for name, part in found.parts():
        defined = ~np.isnan(part.value)
        size = max(1.0, float(np.max(np.abs(part.value[defined]), initial=0.0)))
        agreement.accurate(what, name, part.error[defined], size, ACCURACY)


@functools.cache
def known_answers() -> tuple[Known, ...]:
    """Problems with answers that no oracle had a hand in."""
    return (*_by_differences(), _equal_logits(), _nothing_seen(), _behind_the_mask(), _reached())


def _bf16(x: object) -> np.ndarray:
    return np.asarray(x, dtype=np.float64).astype(BF16)


def _fp32(x: object) -> np.ndarray:
    return np.asarray(x, dtype=np.float32)


def _by_differences() -> Iterator[Known]:
    """Six query heads on two KV heads (a ratio other than the number of KV heads), all dimensions different."""
    rng = np.random.default_rng(3)
    shapes = {"q": (1, 6, 3, 1), "k": (1, 2, 4, 1), "v": (1, 2, 4, 2), "d_out": (1, 6, 3, 2)}
    q, k, v, d_out = (_bf16(rng.integers(-12, 13, shape) / 8) for shape in shapes.values())
    plain = GradientProblem(q, k, v, d_out, mask=causal_rows(3, 4), scale=0.375)
    yield Known("grouped heads", plain, _differences(plain))
    rich = dataclasses.replace(
        plain,
        d_lse=_fp32(rng.standard_normal((1, 6, 3))),
        sinks=_fp32([0.5, -1.0, 2.0, -np.inf, 0.0, 1.0]),
        softcap=1.25,
    )
    yield Known("sinks, soft cap and LSE", rich, _differences(rich))
    large = GradientProblem(
        q=_bf16([[[[20.0, 1.0], [24.0, -2.0]]]]),
        k=_bf16([[[[20.0, 0.0], [20.0, 1.0], [-15.0, 2.0]]]]),
        v=_bf16([[[[1.0], [-3.0], [7.0]]]]),
        d_out=_fp32([[[[0.3], [-2.5]]]]),
        mask=causal_rows(2, 3),
        scale=0.75,
    )
    yield Known("large logits", large, _differences(large))


def _equal_logits() -> Known:
    """Five queries, two equal logits, causal: three rows see nothing, one sees one key, one sees both."""
    problem = GradientProblem(
        q=_bf16(np.ones((1, 1, 5, 1))),
        k=_bf16(np.zeros((1, 1, 2, 1))),
        v=_bf16([[[[1.0], [3.0]]]]),
        d_out=_fp32(np.ones((1, 1, 5, 1))),
        mask=causal_rows(5, 2),
        scale=1.0,
    )
    dk, dv = [[[[-0.5], [0.5]]]], [[[[1.5], [0.5]]]]
    return Known("rows that see no key", problem, _exact(np.zeros((1, 1, 5, 1)), dk, dv))


def _nothing_seen() -> Known:
    """With a sink and no key, the LSE is the sink: its cotangents reach the sink and nothing else."""
    problem = GradientProblem(
        q=_bf16(np.ones((1, 1, 2, 1))),
        k=_bf16(np.ones((1, 1, 1, 1))),
        v=_bf16(np.ones((1, 1, 1, 1))),
        d_out=_fp32(np.ones((1, 1, 2, 1))),
        mask=lambda _batch, rows: np.zeros((len(range(2)[rows]), 1), dtype=bool),
        scale=1.0,
        d_lse=_fp32([[[0.25, 2.0]]]),
        sinks=_fp32([3.0]),
    )
    nothing = np.zeros((1, 1, 1, 1))
    return Known("only a sink", problem, _exact(np.zeros((1, 1, 2, 1)), nothing, nothing, [2.25]))


def _behind_the_mask() -> Known:
    """Two rows, the second key and value NaN and seen by no row, a NaN cotangent in a row that sees nothing."""
    nan = math.nan
    problem = GradientProblem(
        q=_bf16([[[[nan], [1.0]]]]),
        k=_bf16([[[[0.0], [nan]]]]),
        v=_bf16([[[[2.0], [nan]]]]),
        d_out=_fp32([[[[nan], [0.5]]]]),
        mask=lambda _batch, rows: np.array([[False, False], [True, False]])[rows],
        scale=1.0,
    )
    return Known("NaN behind the mask", problem, _exact(np.zeros((1, 1, 2, 1)), [[[[0], [0]]]], [[[[0.5], [0.0]]]]))


def _reached() -> Known:
    """A NaN value that one row sees: what that row adds to is undefined, the other row's query is not."""
    nan = math.nan
    problem = GradientProblem(
        q=_bf16([[[[1.0], [1.0]]]]),
        k=_bf16([[[[0.0], [0.0]]]]),
        v=_bf16([[[[2.0], [nan]]]]),
        d_out=_fp32([[[[1.0], [1.0]]]]),
        mask=causal_rows(2, 2),
        scale=1.0,
    )
    return Known("NaN that is seen", problem, _exact([[[[0.0], [nan]]]], [[[[nan], [nan]]]], [[[[nan], [nan]]]]))


def _exact(dq: object, dk: object, dv: object, dsinks: object | None = None) -> Gradients:
    """An answer whose numbers are exact (NaN: undefined)."""
    sinks = None if dsinks is None else _numbers(dsinks)
    return Gradients(_numbers(dq), _numbers(dk), _numbers(dv), sinks, "known")


def _numbers(x: object) -> Bounded:
    value = np.asarray(x, dtype=np.float64)
    return Bounded(value, np.where(np.isnan(value), np.inf, 0.0))


Numbers = list[decimal.Decimal]


def _differences(problem: GradientProblem) -> Gradients:
    """Central differences of the loss in decimal arithmetic; causal, bottom-right aligned."""
    result = Gradients.blank(problem, "known")
    with decimal.localcontext(decimal.Context(prec=DIGITS, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)):
        forward = _Forward(problem)
        for name, part in (("q", result.dq), ("k", result.dk), ("v", result.dv), ("sinks", result.dsinks)):
            if part is None:
                continue
            for index in np.ndindex(part.value.shape):
                slope = forward.slope(name, index)
                part.value[index] = slope
                part.error[index] = 2.0 * np.spacing(abs(slope)) + DIFFERENCE_ERROR
    return result


class _Forward:
    """The loss of a small problem with inputs that are decimal numbers."""

    def __init__(self, problem: GradientProblem) -> None:
        self.problem = problem
        arrays = {name: getattr(problem, name) for name in ("q", "k", "v", "d_out", "d_lse", "sinks")}
        self.arrays = {
            name: np.vectorize(decimal.Decimal, otypes=[object])(exact(x))
            for name, x in arrays.items()
            if x is not None
        }

    def slope(self, name: str, index: tuple[int, ...]) -> float:
        """The derivative of the loss with respect to one input number."""
        array = self.arrays[name]
        here = array[index]
        if not here.is_finite():
            return 0.0  # a sink of -inf is no sink
        losses: Numbers = []
        for step in (STEP, -STEP):
            array[index] = here + step
            losses.append(self._loss(name, index))
        array[index] = here
        return float((losses[0] - losses[1]) / (2 * STEP))

    def _loss(self, name: str, index: tuple[int, ...]) -> decimal.Decimal:
        """The part of the loss that one input number can change."""
        batch, heads, q_len, _ = self.problem.q.shape
        kv_heads = self.problem.k.shape[1]
        total = decimal.Decimal(0)
        for b in range(batch):
            for h in range(heads):
                touched = h if name in {"q", "sinks"} else h * kv_heads // heads
                if touched == index[0 if name == "sinks" else 1]:
                    rows = [index[2]] if name == "q" else range(q_len)
                    total = sum((self._row(b, h, h * kv_heads // heads, i) for i in rows), total)
        return total

    def _row(self, b: int, h: int, kv_head: int, i: int) -> decimal.Decimal:
        q, k, v, d_out = (self.arrays[name] for name in ("q", "k", "v", "d_out"))
        seen = [j for j in range(k.shape[2]) if j - i <= k.shape[2] - q.shape[2]]
        logits = [_capped(self._score(q[b, h, i], k[b, kv_head, j]), self.problem.softcap) for j in seen]
        weights = [z.exp() for z in logits]
        total = sum(weights, self.arrays["sinks"][h].exp() if "sinks" in self.arrays else decimal.Decimal(0))
        loss = decimal.Decimal(0)
        for w, j in zip(weights, seen, strict=True):
            loss += w / total * sum(v[b, kv_head, j] * d_out[b, h, i])
        return loss + (total.ln() * self.arrays["d_lse"][b, h, i] if "d_lse" in self.arrays else 0)

    def _score(self, q: np.ndarray, key: np.ndarray) -> decimal.Decimal:
        return decimal.Decimal(self.problem.scale) * sum(q * key)


def _capped(score: decimal.Decimal, softcap: float | None) -> decimal.Decimal:
    if softcap is None:
        return score
    cap = decimal.Decimal(softcap)
    square = (2 * score / cap).exp()
    return cap * (square - 1) / (square + 1)
