"""Whether a bound can tell the right answer from trivial and nearly right ones."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.attention import oracle_float64
from verify.attention.problem import widen
from verify.measures import BF16, Worst, bits, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float64

    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference

BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Accepted:
    """A wrong answer that a bound takes.

    Attributes:
        name: what it is.
        nearest: where it comes nearest to leaving the bound: index, its value and f's, the words nearest to both in
            BF16; the value is the share of the bound.
    """

    name: str
    nearest: Worst

    def __str__(self) -> str:
        return f"{self.name} (at most {self.nearest.value:.3g} of the bound, at out{self.nearest})"


Answer = tuple["Float64[np.ndarray, 'batch heads q_len v_dim']", "Float64[np.ndarray, 'batch heads q_len head_dim']"]


def powerless(
    problem: AttentionProblem,
    reference: Reference,
    bound: Float64[np.ndarray, "batch heads q_len v_dim"],
    inside_domain: Bool[np.ndarray, "batch heads q_len"],
) -> list[Accepted]:
    """The wrong answers that lie within the bound in every element that is judged by value.

    An answer that agrees with f everywhere to within the two proved errors is taken for f itself and does not count:
    for equal logits the mean of V is the right answer, and no comparison could tell them apart.
    """
    judged = np.isfinite(reference.out) & inside_domain[..., None]
    if not judged.any():
        return []
    want, doubt, limit = reference.out[judged], reference.out_error[judged], bound[judged]
    weak = []
    for name, (answer, error) in _wrong_answers(problem, reference):
        distance = np.abs(answer[judged] - want)  # NaN or inf, should the answer not be finite: never within
        equal = distance <= doubt + error[judged]
        if np.all(distance <= limit) and not equal.all():
            weak.append(Accepted(name, _nearest(answer, reference.out, bound, judged)))
    return weak


def _nearest(answer: np.ndarray, want: np.ndarray, bound: np.ndarray, judged: np.ndarray) -> Worst:
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(judged & (bound > 0.0), np.abs(answer - want) / bound, 0.0)
    index = tuple(int(i) for i in np.unravel_index(int(share.argmax()), share.shape))
    words = (bits(nearest(float(x[index]), BF16)) for x in (answer, want))
    return Worst(float(share[index]), index, float(answer[index]), float(want[index]), *words)


def _wrong_answers(problem: AttentionProblem, reference: Reference) -> Iterator[tuple[str, Answer]]:
    """Each with a bound of its own error."""
    with np.errstate(invalid="ignore", over="ignore"):
        yield "the mean of the visible values", _answer(dataclasses.replace(problem, scale=0.0))
        constant = np.full_like(reference.out, widen(problem.v).mean() if problem.v.size else 0.0)
        yield "a constant (the mean of all values)", (constant, np.zeros_like(constant))
        if problem.kv_heads > 1:
            turned = {name: np.roll(getattr(problem, name), -1, axis=1) for name in ("k", "v")}
            yield "the output of the next KV head", _answer(dataclasses.replace(problem, **turned))
        if problem.heads > 1:
            yield (
                "the output of the next query head",
                (np.roll(reference.out, -1, axis=1), np.roll(reference.out_error, -1, axis=1)),
            )
        if problem.causal:
            for name, shift in _shifts():
                yield name, _shifted(problem, shift)
        for name, other in _without_features(problem).items():
            yield name, _answer(other)


def _without_features(problem: AttentionProblem) -> dict[str, AttentionProblem]:
    """Problems in which one feature is missing or one step off."""
    changed: dict[str, AttentionProblem] = {}
    if problem.window is not None:
        left, right = problem.window
        for distance, name in ((1, "one key"), (BLOCK, f"one block ({BLOCK} keys)")):
            wider = tuple(None if side is None else side + distance for side in (left, right))
            changed[f"a window {name} wider"] = dataclasses.replace(problem, window=wider)
        changed["no window"] = dataclasses.replace(problem, window=None)
    if problem.softcap is not None:
        changed["no soft cap"] = dataclasses.replace(problem, softcap=None)
    if problem.sinks is not None:
        changed["no sinks"] = dataclasses.replace(problem, sinks=None)
        if problem.heads > 1:
            changed["the sink of the next head"] = dataclasses.replace(problem, sinks=np.roll(problem.sinks, -1))
    if problem.q_segments is not None:
        changed["no segment ids"] = dataclasses.replace(problem, q_segments=None, k_segments=None)
    return changed


def _shifts() -> Iterator[tuple[str, int]]:
    for distance, name in ((1, "one key"), (BLOCK, f"one block ({BLOCK} keys)")):
        yield f"a causal mask {name} early", -distance
        yield f"a causal mask {name} late", distance


def _shifted(problem: AttentionProblem, shift: int) -> Answer:
    if problem.window is None and problem.q_segments is None and problem.q_positions is None:
        counts = problem.visible_to(np.arange(problem.q_len, dtype=np.int64))
        other = oracle_float64.attention(problem, visible=np.clip(counts + shift, 0, problem.kv_len))
        return other.out, other.out_error
    # The window stays where it is: a causal mask that is late shows keys to its right.
    aligned = np.stack([problem.positions(batch) for batch in range(problem.batch)])
    left, right = problem.window or (None, None)
    moved = (None if left is None else left + shift, None if right is None else right - shift)
    if any(side is not None and side < 0 for side in moved):
        moved = (left, right)
    return _answer(
        dataclasses.replace(problem, q_positions=aligned + shift, window=None if moved == (None, None) else moved)
    )


def _answer(problem: AttentionProblem) -> Answer:
    reference = oracle_float64.attention(problem)
    return reference.out, reference.out_error
