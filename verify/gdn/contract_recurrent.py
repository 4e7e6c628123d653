"""The contract of a token-recurrent kernel (decode, speculative windows): FP32 throughout, no matrix unit.

docs/gdn-contract.md, section 9.  As lemma 8 of the float64 oracle, with the device's roundings, and with the kernel's
own state bounded by the exact one and its error.  Decay per key channel is covered.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.contract import EVALUATION, LARGEST, GdnBound
from verify.gdn.contract_front import front, gamma
from verify.gdn.float64_rule import HeadInputs, norm_growth, recur, vector_norms
from verify.gdn.float64_stages import Approx
from verify.gdn.inverse_levels import half_spacing
from verify.gdn.layout import initial_state, key_head
from verify.gdn.problem import shapes

if TYPE_CHECKING:
    from verify.devices import DeviceModel
    from verify.gdn.contract_front import FrontBound
    from verify.gdn.problem import Problem
    from verify.gdn.steps import ChunkSteps


def recurrent_bound(problem: Problem, steps: ChunkSteps, device: DeviceModel) -> GdnBound:
    """Evaluate the contract; of `steps` only silu, convolution and out matter."""
    _, n_v, _, d_v = shapes(problem)
    out, state = np.zeros((problem.tokens, n_v, d_v)), np.zeros(problem.state.shape)
    inside_out, inside_state = np.ones((problem.tokens, n_v), dtype=bool), np.ones(problem.state.shape[:2], dtype=bool)
    for sequence in range(problem.sequences.count):
        span, write = problem.sequences.span(sequence), int(problem.sequences.write_slots[sequence])
        taken = problem.sequences.taken(sequence)
        inputs = front(problem, sequence, steps, device)
        for head in range(n_v):
            lane = _head(problem, sequence, head, inputs, device)
            key = key_head(problem, head)
            with np.errstate(over="ignore", invalid="ignore"):
                found, errors, sizes = _bounds(lane, device)
            if steps.out == "bf16":
                exact = np.abs(recur(lane).out)
                found = found + half_spacing(exact + found) + device.smallest_normal
            inside = np.logical_and.accumulate(inputs.inside[:, key] & (sizes <= LARGEST))
            out[span, head] = np.where(np.isnan(found), np.inf, found)
            inside_out[span, head] = inside
            if write >= 0:
                state[write, head] = np.where(np.isnan(errors[taken]), np.inf, errors[taken])[None, :]
                inside_state[write, head] = bool(inside[:taken].all())
    return GdnBound(out * EVALUATION, state * EVALUATION, inside_out, inside_state)


def _head(problem: Problem, sequence: int, head: int, inputs: FrontBound, device: DeviceModel) -> HeadInputs:
    """One head's inputs with the device's errors; the scale is multiplied into q."""
    key = key_head(problem, head)
    g = Approx(inputs.g.value[:, head], inputs.g.error[:, head])
    decay = np.exp(g.value)
    own = np.expm1(np.minimum(g.error, 700.0)) + device.exp_relative + device.unit_roundoff
    error = np.where(g.value == 0.0, g.error, np.minimum(decay * own + device.smallest_normal, 1.0))
    error = np.where(np.isneginf(g.value) & (g.error == 0.0), 0.0, error)
    q, k, v, beta = (
        Approx(x.value[:, h], x.error[:, h])
        for x, h in ((inputs.q, key), (inputs.k, key), (inputs.v, head), (inputs.beta, head))
    )
    return HeadInputs(
        q=q,
        k=k,
        v=v,
        beta=beta,
        decay=Approx(decay, error),
        state=initial_state(problem, sequence)[head],
        scale=problem.scale,
        unit_keys=inputs.unit_keys,
        taken=problem.sequences.taken(sequence),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Norms:
    """Norms per token of vectors and of their errors, `[tokens, 1]`."""

    value: np.ndarray
    error: np.ndarray

    @classmethod
    def of(cls, x: Approx) -> _Norms:
        return cls(vector_norms(x.value), vector_norms(x.error))


def _bounds(head: HeadInputs, device: DeviceModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of the outputs, of the state's lanes after 0, 1, .. tokens, and the largest number of each token."""
    trace, u, omega = recur(head), device.unit_roundoff, device.smallest_normal
    tokens, d_k = head.k.value.shape
    keys, queries = _Norms.of(head.k), _Norms.of(head.q)
    beta, of_beta = np.abs(head.beta.value)[:, None], head.beta.error[:, None]
    decay, of_decay = (x.reshape(tokens, -1).max(axis=1)[:, None] if tokens else x for x in _pair(head.decay))
    exact_keys = np.minimum(keys.value, 1.0) if head.unit_keys else keys.value
    growth = norm_growth(head.beta, exact_keys, unit_keys=head.unit_keys)
    summing = gamma(d_k + 3, max(u, device.dot_unit_roundoff))
    out, sizes = np.zeros((tokens, head.v.value.shape[1])), np.zeros(tokens)
    errors = np.zeros((tokens + 1, head.v.value.shape[1]))
    least = 2 * omega * d_k  # products and partial sums of one inner product
    for t in range(tokens):
        before = trace.norms[t] + errors[t]
        decayed = (decay[t] + of_decay[t]) * before * (1.0 + u)
        of_state = of_decay[t] * before + u * decayed + least
        most_keys, most_beta = keys.value[t] + keys.error[t], beta[t] + of_beta[t]
        to_residual = exact_keys[t] * (decay[t] * errors[t] + of_state)
        residual = np.abs(trace.residual[t]) + to_residual + head.v.error[t] + keys.error[t] * decayed
        of_residual = summing * (np.abs(head.v.value[t]) + head.v.error[t] + most_keys * decayed) + least
        size = most_beta * (residual + of_residual) * (1.0 + u)
        local = (of_beta[t] * most_keys + beta[t] * keys.error[t]) * (residual + of_residual)
        local = local + beta[t] * exact_keys[t] * (head.v.error[t] + keys.error[t] * decayed)
        local = local + most_keys * (most_beta * of_residual + 3 * u * size + omega) + growth[t] * of_state + 2 * least
        moved = growth[t] * decay[t] * errors[t] + local
        errors[t + 1] = (moved + u * trace.norms[t + 1]) / (1.0 - 2 * u)
        after = trace.norms[t + 1] + errors[t + 1]
        most_queries = queries.value[t] + queries.error[t]
        through = queries.value[t] * errors[t + 1] + (queries.error[t] + (summing + 2 * u) * most_queries) * after
        # Scaled queries may be flushed, wherever the scale is multiplied in.
        flushed = least * after * (most_queries > 0.0)
        out[t] = abs(head.scale) * (through + least) * (1.0 + 2 * u) + flushed + 3 * u * np.abs(trace.out[t]) + omega
        sizes[t] = float(np.max(most_keys * decayed + size + after * (1.0 + most_queries), initial=0.0))
    return out, errors, sizes


def _pair(x: Approx) -> tuple[np.ndarray, np.ndarray]:
    return x.value, x.error
