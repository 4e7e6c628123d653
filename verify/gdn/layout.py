"""Which numbers belong to which sequence and head, and what a non-finite input may touch; no arithmetic.

Non-finite inputs.  A hard reset (g = -inf), and gate logits of +-inf, are ordinary.  Any other non-finite input makes f
NaN where it may have an effect, and nowhere else:

- in q: that token and head; in v: that lane of the head, from that token on, and its final state;
- in k, beta, g, or a gate's inputs: that head, from that token on; in the initial state: that lane of the head;
- in qkv: the channel's next `width` tokens of the same sequence stand for it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.problem import DeltaRuleProblem, GdnProblem, shapes, widen
from verify.gdn.reference import GdnReference

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Bool, Float64

    from verify.gdn.problem import Problem


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceResult:
    """What an oracle computes for one sequence: outputs of its tokens, and the state where it is taken."""

    out: Float64[np.ndarray, "tokens n_v d_v"]
    out_error: Float64[np.ndarray, "tokens n_v d_v"]
    state: Float64[np.ndarray, "n_v d_k d_v"]
    state_error: Float64[np.ndarray, "n_v d_k d_v"]


def finite(x: np.ndarray) -> Float64[np.ndarray, "*shape"]:
    """The array as float64, what is not finite replaced by 0."""
    wide = widen(x)
    return np.where(np.isfinite(wide), wide, 0.0)


def numeric(x: np.ndarray) -> Float64[np.ndarray, "*shape"]:
    """The array as float64 with its infinities, NaN replaced by 0."""
    wide = widen(x)
    return np.where(np.isnan(wide), 0.0, wide)


def initial_state(problem: Problem, sequence: int) -> Float64[np.ndarray, "n_v d_k d_v"]:
    """The state with which a sequence starts; zeros for what is not finite."""
    slot = problem.sequences.initial_slot(sequence)
    return np.zeros(problem.state.shape[1:]) if slot is None else finite(problem.state[slot])


def convolved_rows(problem: GdnProblem, sequence: int) -> Float64[np.ndarray, "tokens_plus_width_minus_1 dim"]:
    """Inputs of a sequence's convolution, its state first; zeros for what is not finite."""
    return finite(_raw_rows(problem, sequence))


def _raw_rows(problem: GdnProblem, sequence: int) -> np.ndarray:
    slot = problem.sequences.initial_slot(sequence)
    before = np.zeros_like(problem.conv_state[0]) if slot is None else problem.conv_state[slot]
    return np.concatenate([before, problem.qkv[problem.sequences.span(sequence)]])


def key_head(problem: Problem, head: int) -> int:
    """The query/key head that a value head reads."""
    n_kq, n_v, _, _ = shapes(problem)
    return head // (n_v // n_kq)


def collect(problem: Problem, tier: str, compute: Callable[[int], SequenceResult]) -> GdnReference:
    """Compute every sequence and put outputs and states where they belong, NaN where nothing is promised."""
    _, n_v, _, d_v = shapes(problem)
    out = np.zeros((problem.tokens, n_v, d_v))
    out_error = np.zeros_like(out)
    with np.errstate(invalid="ignore"):
        state = problem.state.astype(np.float64)  # a slot that nobody writes keeps its words
    state_error = np.zeros_like(state)
    finals: dict[int, SequenceResult] = {}
    for sequence in range(problem.sequences.count):
        found = compute(sequence)
        span = problem.sequences.span(sequence)
        out[span], out_error[span] = found.out, found.out_error
        finals[sequence] = found
    for sequence, slot in problem.sequences.written():
        state[slot], state_error[slot] = finals[sequence].state, finals[sequence].state_error
    odd_out, odd_state = unpromised(problem)
    out[odd_out], out_error[odd_out] = np.nan, 0.0
    state[odd_state], state_error[odd_state] = np.nan, 0.0
    return GdnReference(out, out_error, state, state_error, tier)


def unpromised(problem: Problem) -> tuple[Bool[np.ndarray, "tokens n_v d_v"], Bool[np.ndarray, "slots n_v d_k d_v"]]:
    """Where a non-finite input may have an effect: outputs, and written states."""
    _, n_v, _, d_v = shapes(problem)
    out = np.zeros((problem.tokens, n_v, d_v), dtype=bool)
    state = np.zeros(problem.state.shape, dtype=bool)
    for sequence in range(problem.sequences.count):
        span = problem.sequences.span(sequence)
        q, k, v, gates = _odd(problem, sequence)
        heads = np.array([key_head(problem, h) for h in range(n_v)])
        lanes = (k[:, heads] | gates)[:, :, None] | v
        slot = problem.sequences.initial_slot(sequence)
        start = np.zeros((1, n_v, d_v), dtype=bool)
        if slot is not None:
            start[0] = ~np.isfinite(problem.state[slot]).all(axis=1)
        reached = np.logical_or.accumulate(np.concatenate([start, lanes]), axis=0)
        out[span] = reached[1:] | q[:, heads][:, :, None]
        write = int(problem.sequences.write_slots[sequence])
        if write >= 0:
            state[write] = reached[problem.sequences.taken(sequence)][:, None, :]
    return out, state


def _odd(problem: Problem, sequence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per token non-finite: q, k `[tokens, n_kq]`, v `[tokens, n_v, d_v]`, gates `[tokens, n_v]`."""
    span = problem.sequences.span(sequence)
    if isinstance(problem, DeltaRuleProblem):
        q, k = (~np.isfinite(x[span]).all(axis=2) for x in (problem.q, problem.k))
        gates = ~np.isfinite(problem.beta[span])
        if problem.g is not None:
            gates |= _any_channel(np.isnan(problem.g[span]))
        return q, k, ~np.isfinite(problem.v[span]), gates
    rows = ~np.isfinite(_raw_rows(problem, sequence))
    tokens = span.stop - span.start
    mixed = np.zeros((tokens, rows.shape[1]), dtype=bool)
    for tap in range(problem.width):
        mixed |= rows[tap : tap + tokens]
    mixed |= ~np.isfinite(problem.taps).all(axis=0)
    if problem.bias is not None:
        mixed |= ~np.isfinite(problem.bias)
    q, k, v = problem.split(mixed)
    gates = np.isnan(problem.b[span]) | _any_channel(np.isnan(problem.a[span]) | ~np.isfinite(problem.dt_bias))
    gates |= ~np.isfinite(problem.a_log)
    return q.any(axis=2), k.any(axis=2), v, gates


def _any_channel(x: np.ndarray) -> np.ndarray:
    return x.any(axis=2) if x.ndim == 3 else x
