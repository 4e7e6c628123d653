"""The contract of the chunked kernel: |kernel - f| <= bound for outputs and final states, with no free constant.

The derivation is docs/gdn-contract.md; names are its names.  The bound is evaluated per element from the inputs, chunk
by chunk; what one chunk adds to the state is carried to every later chunk through the exact transitions.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.contract_front import FrontBound, front, gamma
from verify.gdn.float64_chunks import segments
from verify.gdn.float64_stages import Approx, norms
from verify.gdn.inverse import float64
from verify.gdn.inverse_contract import inverse_bound
from verify.gdn.inverse_levels import Arithmetic, half_spacing
from verify.gdn.inverse_steps import CHUNK
from verify.gdn.layout import initial_state, key_head
from verify.gdn.problem import shapes
from verify.gdn.steps import PIECES, PIECES_SIZE, SUB_BLOCK, refuse_channels
from verify.rounding import BF16, nearest

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64

    from verify.devices import DeviceModel
    from verify.gdn.problem import Problem
    from verify.gdn.steps import ChunkSteps

EVALUATION = 1.0 + 2.0**-20
"""The bound is evaluated in float64, from exact values that err by about 2**-45 (the document's last section)."""
LARGEST = 2.0**127
"""Sizes beyond it may overflow in FP32: outside the domain."""
OMEGA_ROOM = 2.0**-126
"""What flushing an operand costs."""
OF_INVERSE = 2.0**18
"""Every sum in the inverse is at most so much larger than the bound of the result: the bound contains the sum's own
rounding, 64 u times its terms' sizes, carried to the result through matrices whose diagonals are 1."""
NEGLIGIBLE = 2.0**-60
"""Transitions of a smaller norm are merged with the next chunk's (their bounds are added, not dropped)."""


@dataclasses.dataclass(frozen=True, eq=False)
class GdnBound:
    """Elementwise bounds of |kernel - f|.

    Attributes:
        out: `[tokens, n_v, d_v]`; infinite outside the domain.
        state: all slots, `[slots, n_v, d_k, d_v]`; 0 for slots that nobody writes.
        inside_out: tokens and heads for which `out` is promised, `[tokens, n_v]`.
        inside_state: slots and heads for which `state` is promised, `[slots, n_v]`.
    """

    out: Float64[np.ndarray, "tokens n_v d_v"]
    state: Float64[np.ndarray, "slots n_v d_k d_v"]
    inside_out: Bool[np.ndarray, "tokens n_v"]
    inside_state: Bool[np.ndarray, "slots n_v"]


def contract_bound(problem: Problem, steps: ChunkSteps, device: DeviceModel) -> GdnBound:
    """Evaluate the contract."""
    _, n_v, _, d_v = shapes(problem)
    out, state = np.zeros((problem.tokens, n_v, d_v)), np.zeros(problem.state.shape)
    inside_out, inside_state = np.ones((problem.tokens, n_v), dtype=bool), np.ones(problem.state.shape[:2], dtype=bool)
    for sequence in range(problem.sequences.count):
        span, write = problem.sequences.span(sequence), int(problem.sequences.write_slots[sequence])
        inputs = front(problem, sequence, steps, device)
        for head in range(n_v):
            found = _head(problem, sequence, head, inputs, (steps, device))
            out[span, head], inside_out[span, head] = found.out, found.inside
            if write >= 0:
                state[write, head] = found.state
                inside_state[write, head] = found.inside_state
    return GdnBound(out * EVALUATION, state * EVALUATION, inside_out, inside_state)


@dataclasses.dataclass(frozen=True, eq=False)
class _HeadBound:
    out: np.ndarray
    state: np.ndarray
    inside: np.ndarray
    inside_state: bool


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """One chunk of one head: exact values with the errors of what the kernel has, q scaled."""

    q: Approx
    k: Approx
    v: Approx
    beta: Approx
    g: Approx


@dataclasses.dataclass
class _Carried:
    """The error of the state: what earlier chunks added, each with the exact map from there to here.

    A chunk adds k^T delta for the errors delta of its updates, and more: it is kept as two maps, `[d_k, n]` to what
    bounds |delta| and `[d_k, d_k]` to the rest, so that k meets every later factor before absolute values are taken.

    Attributes:
        maps: per addition.
        added: per addition its bound, `[n, d_v]` or `[d_k, d_v]`.
    """

    maps: list[np.ndarray]
    added: list[np.ndarray]

    def through(self, left: np.ndarray, lanes: int) -> np.ndarray:
        """A bound of |left E| for the state's error E; by absolute values or by Euclidean norms, whichever is less."""
        total = np.zeros((len(left), lanes))
        for each, added in zip(self.maps, self.added, strict=True):
            factor = left @ each
            total += np.minimum(np.abs(factor) @ added, norms(factor, 1)[:, None] * norms(added, 0))
        return total

    def advance(self, transition: np.ndarray, added: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Go through one chunk, which adds to the state's error."""
        self.maps = [transition @ x for x in self.maps]
        small = [n for n, x in enumerate(self.maps) if np.abs(x).sum() < NEGLIGIBLE]
        merged = sum((np.abs(self.maps[n]) @ self.added[n] for n in small), np.zeros(added[-1][1].shape))
        self.maps = [x for n, x in enumerate(self.maps) if n not in small] + [x for x, _ in added]
        self.added = [x for n, x in enumerate(self.added) if n not in small] + [x for _, x in added]
        self.added[-1] = self.added[-1] + merged


def _head(
    problem: Problem, sequence: int, head: int, inputs: FrontBound, how: tuple[ChunkSteps, DeviceModel]
) -> _HeadBound:
    """All chunks of one head."""
    steps, device = how
    key, taken = key_head(problem, head), problem.sequences.taken(sequence)
    state = initial_state(problem, sequence)[head]
    lanes = state.shape[1]
    carried = _Carried([], [])
    tokens = len(inputs.v.value)
    out, inside = np.zeros((tokens, lanes)), inputs.inside[:, key].copy()
    final, here, kept = np.zeros_like(state), True, True
    q = _scaled(inputs.q, problem.scale, device)
    kind = _ResidualChunk if steps.updates == "residual" else _Chunk
    with np.errstate(over="ignore", invalid="ignore"):
        for start, stop in steps.chunks(problem.sequences.span(sequence), taken):
            part = slice(start, stop)
            rows = _Rows(
                _of(q, part, key),
                _of(inputs.k, part, key),
                _of(inputs.v, part, head),
                _of(inputs.beta, part, head),
                _of(inputs.g, part, head),
            )
            chunk = kind(rows, state, carried, how)
            out[part] = chunk.outputs()
            # An overflow is infinite, and 0 times it NaN in every row of the products that the tile's tokens share.
            here = here and bool(inside[part].all()) and chunk.within
            if not here:
                inside[steps.tile_start(problem.sequences.span(sequence), start) : stop] = False
            state = chunk.advance()
            here = here and chunk.within
            if stop == taken:
                final, kept = carried.through(np.eye(len(state)), lanes), here
    out, final = (np.where(np.isnan(x), np.inf, x) for x in (out, final))
    return _HeadBound(out, final, inside, kept)


def _scaled(q: Approx, scale: float, device: DeviceModel) -> Approx:
    """q times the scale, which is rounded to FP32; below the normal range the product may be flushed."""
    value, error = q.value * scale, abs(scale) * (q.error + 2 * device.unit_roundoff * np.abs(q.value))
    return Approx(value, error + np.where((value != 0.0) | (error > 0.0), device.smallest_normal, 0.0))


def _of(x: Approx, part: slice, head: int) -> Approx:
    return Approx(x.value[part, head], x.error[part, head])


def _rows(x: Approx, part: slice) -> Approx:
    return Approx(x.value[part], x.error[part])


def _lane(x: Approx) -> Approx:
    return Approx(x.value[:, :, 0], x.error[:, :, 0])


def _transposed(x: Approx) -> Approx:
    return Approx(x.value.T, x.error.T)


class _Chunk:
    """Sections 4 to 6 of the document, for one chunk: exact matrices, and what each rounding site does."""

    def __init__(self, rows: _Rows, state: np.ndarray, carried: _Carried, how: tuple[ChunkSteps, DeviceModel]) -> None:
        self.steps, self.device = how
        self.carried, self.state_before = carried, state
        self.arithmetic = Arithmetic(self.steps.precision, self.device)
        self.reading = Arithmetic(self.steps.reading, self.device)
        self.unit = self.device.unit_roundoff
        self.within = True  # nothing so far may overflow
        self.rows = rows
        self.n, self.lanes = rows.v.value.shape
        self._pairs()
        self._inverse()
        self._updates()

    def _demand(self, *sizes: np.ndarray) -> None:
        """Sums of sizes that FP32 has to hold."""
        self.within = self.within and all(bool((x <= LARGEST).all()) for x in sizes)

    def _product(self, left: Approx, right: Approx, arithmetic: Arithmetic) -> Approx:
        """A matrix product of FP32 values that are known up to errors: operands rounded, FP32 sums."""
        a, b = self._operand(left, arithmetic), self._operand(right, arithmetic)
        exact = left.value @ right.value
        error = np.abs(a.value @ b.value - exact) + a.error @ (np.abs(b.value) + b.error) + np.abs(a.value) @ b.error
        error = error + arithmetic.accumulated(np.abs(a.value) + a.error, np.abs(b.value) + b.error)
        return Approx(exact, error)

    def _operand(self, x: Approx, arithmetic: Arithmetic) -> Approx:
        """What enters a product, itself: with known roundings mostly one number, to which both ends of x round."""
        if arithmetic.precision != "bf16" or self.steps.operands != "known":
            return self._entering(x, arithmetic)
        with np.errstate(invalid="ignore", over="ignore"):
            room = x.error * EVALUATION  # float64's own rounding of x.value is far below an FP32 rounding
            low, high = nearest(x.value - room, BF16), nearest(x.value + room, BF16)
            middle = 0.5 * low + 0.5 * high
            rest = 0.5 * (high - low)
        rest = rest + np.where((np.abs(middle) - rest < self.device.smallest_normal) & (middle != 0.0), OMEGA_ROOM, 0.0)
        unknown = ~np.isfinite(middle) | ~np.isfinite(rest)
        return Approx(np.where(unknown, x.value, middle), np.where(unknown, np.inf, rest))

    def _entering(self, x: Approx, arithmetic: Arithmetic) -> Approx:
        """The same about x: its error and the rounding together."""
        return Approx(x.value, x.error + arithmetic.rounded(np.abs(x.value) + x.error))

    def _times(self, x: Approx, factor: Approx) -> Approx:
        """An elementwise FP32 product."""
        value = x.value * factor.value
        error = x.error * (np.abs(factor.value) + factor.error) + np.abs(x.value) * factor.error
        return Approx(value, error + self.unit * (np.abs(value) + error) + self.device.smallest_normal)

    def _pairs(self) -> None:
        """A, P, exp(G), exp(G_C - G), L; the decays are one per head, or one per channel of the key."""
        rows, n = self.rows, self.n
        most_q, most_k = (np.abs(x.value) + x.error for x in (rows.q, rows.k))
        self._demand(most_k @ most_k.T, most_q @ most_k.T)
        decay = segments(self._segment_errors())
        decay = Approx(decay.value, self._exponential(decay))
        self.from_start = Approx(decay.value[:, 0], decay.error[:, 0])
        self.to_end = Approx(decay.value[-1, 1:], decay.error[-1, 1:])
        between = Approx(decay.value[:, 1:], decay.error[:, 1:])
        pairs = ((rows.k, self.arithmetic), (rows.q, self.reading))
        if rows.g.value.ndim == 1:
            d, transposed = _lane(between), _transposed(rows.k)
            a, p = (self._times(self._product(x, transposed, how), d) for x, how in pairs)
        else:
            refuse_channels(self.steps)
            a, p = (self._decayed_pairs(x, between, how) for x, how in pairs)
        self.beta = Approx(rows.beta.value[:, None], rows.beta.error[:, None])
        lower = self._times(a, self.beta)
        below, within = (np.tril(np.ones((n, n), dtype=bool), at) for at in (-1, 0))
        self.lower = Approx(*(np.where(below, x, 0.0) for x in (lower.value, lower.error)))
        self.scores = Approx(*(np.where(within, x, 0.0) for x in (p.value, p.error)))

    def _decayed_pairs(self, left: Approx, d: Approx, arithmetic: Arithmetic) -> Approx:
        """sum_c left_ic D_ijc k_jc for j up to i: FP32 in sub-blocks on the diagonal, products below them."""
        n, keys = self.n, self.rows.k
        size = SUB_BLOCK if self.steps.channels == "blocks" else n
        value, error = np.zeros((n, n)), np.zeros((n, n))
        for start in range(0, n, size):
            part = slice(start, min(start + size, n))
            found = self._sums(_rows(left, part), _rows(keys, part), Approx(d.value[part, part], d.error[part, part]))
            value[part, part], error[part, part] = found.value, found.error
            if start:
                rows = self._times(_rows(left, part), Approx(d.value[part, start], d.error[part, start]))
                before = slice(0, start)
                columns = self._times(_rows(keys, before), Approx(d.value[start, before], d.error[start, before]))
                found = self._product(rows, _transposed(columns), arithmetic)
                value[part, before], error[part, before] = found.value, found.error
        return Approx(value, error)

    def _sums(self, left: Approx, right: Approx, d: Approx) -> Approx:
        """sum_c left_ic D_ijc right_jc in FP32: two products a term, and a sum in any order."""
        size = [np.abs(x.value) for x in (left, d, right)]
        most = [a + x.error for a, x in zip(size, (left, d, right), strict=True)]
        whole, exact = (np.einsum("ic,ijc,jc->ij", *each, optimize=False) for each in (most, size))
        channels = left.value.shape[1]
        error = np.maximum(whole - exact, 0.0) + (gamma(channels + 3, self.unit) + 2.0**-45) * whole
        # Products and sums may be flushed; what is left of the first product of a term meets the third factor.
        third = most[0].sum(axis=1)[:, None] + most[2].sum(axis=1)[None, :]
        flushed = np.where(whole > 0.0, (4 * channels + third) * self.device.smallest_normal, 0.0)
        error = error + flushed
        return Approx(np.einsum("ic,ijc,jc->ij", left.value, d.value, right.value, optimize=False), error)

    def _segment_errors(self) -> Approx:
        """Log-decays with the errors that the kernel's sums may add to a segment that ends here."""
        g = self.rows.g
        reset = np.isneginf(g.value)
        size = np.where(reset, 0.0, np.abs(g.value))
        summing = gamma(self.n + 2, self.unit)
        if self.steps.decay == "pieces":
            summing = gamma(PIECES * self.n + 2, self.device.dot_unit_roundoff) * PIECES_SIZE
        if self.steps.decay == "cumulative":
            # A difference of two sums errs by what both do; charged to every token of a segment once.
            size = np.broadcast_to(size.sum(axis=0) * 2.0, size.shape)
        return Approx(g.value, np.where(reset, 0.0, g.error + summing * size))

    def _exponential(self, decay: Approx) -> np.ndarray:
        """The error of the device's exponential of the sums; exp(0) = 1 and exp(-inf) = 0 are exact.

        An exponential that is 1 in float64 is not exact: only that of a sum which has no error either (lemma 7).
        """
        own = (self.device.exp_relative + self.unit) * (decay.value + decay.error)
        exact = decay.error == 0.0
        return np.where(exact, 0.0, decay.error + own + self.device.smallest_normal)

    def _inverse(self) -> None:
        """X, and how far the kernel's may be from it."""
        padded, doubt = np.zeros((CHUNK, CHUNK)), np.zeros((CHUNK, CHUNK))
        padded[: self.n, : self.n], doubt[: self.n, : self.n] = self.lower.value, self.lower.error
        found = inverse_bound(padded, self.steps.inverse, self.device, lower_error=doubt)
        whole = float64(self.lower.value)
        self.inverse = Approx(whole.value, found.bound[: self.n, : self.n] + whole.error)
        self.found = found
        self._demand(found.bound * OF_INVERSE, np.abs(self.lower.value) + self.lower.error)

    def _missed(self, right: np.ndarray) -> np.ndarray:
        """A bound of |(X^ - X) right| for an exact matrix, X^ as an operand: the inverse's sites meet it first."""
        padded = np.zeros((CHUNK, right.shape[1]))
        padded[: self.n] = right
        return self.found.applied(padded)[: self.n] + self.rounding_x @ np.abs(right)

    def _entering_inverse(self) -> tuple[Approx, np.ndarray]:
        """X as an operand, and its size."""
        strict = Approx(self.inverse.value - np.eye(self.n), self.inverse.error)
        x = Approx(self.inverse.value, self._entering(strict, self.arithmetic).error)  # ones are exact
        self.rounding_x = self.arithmetic.rounded(np.abs(strict.value) + strict.error)
        return x, np.abs(x.value) + x.error

    def _entering_state(self) -> tuple[np.ndarray, ...]:
        """Sizes of the state, of its error, of what is lost where it enters a product, and of all three."""
        size, moved = np.abs(self.state_before), self.carried.through(np.eye(len(self.state_before)), self.lanes)
        entering = self.arithmetic.rounded(size + moved)
        self.state_error, self.entering_state, self.most_state = moved, entering, size + moved + entering
        return size, moved, entering, self.most_state

    def _updates(self) -> None:
        """V = X (beta v - beta k exp(G) S): what is not the earlier state's error."""
        rows, state = self.rows, self.state_before
        arithmetic = self.arithmetic
        exact_v = self._times(rows.v, self.beta)
        exact_k = self._times(rows.k, self._times(self.beta, self.from_start))
        in_v, in_k = (self._operand(x, arithmetic) for x in (exact_v, exact_k))
        off_v, off_k = in_v.value - exact_v.value, in_k.value - exact_k.value
        right_v = Approx(exact_v.value, np.abs(off_v) + in_v.error)
        right_k = Approx(exact_k.value, np.abs(off_k) + in_k.error)
        x, size_x = self._entering_inverse()
        size_state, moved, entering_state, most_state = self._entering_state()
        exact_right = rows.v.value * self.beta.value - (rows.k.value * self.beta.value * self.from_start.value) @ state
        w = x.value @ right_k.value
        of_k = np.abs(x.value @ off_k) + np.abs(x.value) @ in_k.error
        w_error = x.error @ (np.abs(right_k.value) + right_k.error) + of_k
        w_sum = arithmetic.accumulated(size_x, np.abs(right_k.value) + right_k.error)
        w_most = np.abs(w) + w_error + w_sum
        w_round = arithmetic.rounded(w_most)
        v_new = x.value @ exact_right
        error = np.minimum(x.error @ np.abs(exact_right), self._missed(exact_right))
        off = off_v - off_k @ state
        error = error + np.abs(x.value @ off) + x.error @ np.abs(off) + size_x @ (in_v.error + in_k.error @ size_state)
        error = error + arithmetic.accumulated(size_x, np.abs(right_v.value) + right_v.error)
        error = error + (w_sum + w_round) @ size_state
        error = error + (w_most + w_round) @ entering_state + (w_sum + w_round) @ moved
        error = error + of_k @ moved
        read = np.minimum(np.abs(right_k.value) @ moved, self.carried.through(right_k.value, self.lanes))
        error = error + x.error @ (read + right_k.error @ moved)
        error = error + arithmetic.accumulated(w_most + w_round, most_state)
        self.w = w
        carried = self.carried.through(w, self.lanes)
        most_u = size_x @ (np.abs(right_v.value) + right_v.error)
        error = error + arithmetic.joined(most_u, w_most + w_round, most_state)
        most = np.abs(v_new) + error + carried
        self.v_new = Approx(v_new, error + arithmetic.rounded(most))
        self.most_v = most + arithmetic.rounded(most)
        self._demand(w_most, most_u + (w_most + w_round) @ most_state)

    def outputs(self) -> np.ndarray:
        """Bounds of the outputs."""
        arithmetic, state = self.arithmetic, self.state_before
        scores = self._entering(self.scores, arithmetic)
        queries = self._times(self.rows.q, self.from_start)
        entering = self._entering(queries, arithmetic)
        size_q = np.abs(entering.value) + entering.error
        size_p = np.abs(scores.value) + scores.error
        exact = queries.value @ state + self.scores.value @ self.v_new.value
        error = np.abs(self.scores.value) @ self.v_new.error + scores.error @ self.most_v
        error = error + arithmetic.accumulated(size_p, self.most_v)
        error = error + entering.error @ (np.abs(state) + self.state_error) + size_q @ self.entering_state
        error = error + arithmetic.accumulated(size_q, self.most_state)
        error = error + self.carried.through(queries.value - self.scores.value @ self.w, self.lanes)
        read = size_q @ self.most_state
        error = error + arithmetic.joined(read, size_p, self.most_v)
        self._demand(read + size_p @ self.most_v)
        return self._returned(exact, error)

    def _returned(self, exact: np.ndarray, error: np.ndarray) -> np.ndarray:
        """The error of outputs in their format."""
        if self.steps.out == "bf16":
            error = error + half_spacing(np.abs(exact) + error) + self.device.smallest_normal
        return error

    def advance(self) -> np.ndarray:
        """The exact state after the chunk; its error goes to `carried`."""
        arithmetic, state = self.arithmetic, self.state_before
        keys = self._times(self.rows.k, self.to_end)
        entering = self._entering(keys, arithmetic)
        size = (np.abs(entering.value) + entering.error).T
        kept = Approx(self.from_start.value[-1], self.from_start.error[-1])
        after = state * kept.value[:, None] + keys.value.T @ self.v_new.value
        error = entering.error.T @ self.most_v
        error = error + arithmetic.accumulated(size, self.most_v)
        error = error + kept.error[:, None] * (np.abs(state) + self.state_error)
        decayed = (np.abs(state) + self.state_error) * (kept.value + kept.error)[:, None]
        error = error + arithmetic.joined(decayed, size, self.most_v)
        most = decayed + size @ self.most_v
        error = error + self.device.smallest_normal * (most > 0)
        self._demand(most)
        transition = kept.value[:, None] * np.eye(len(state)) - keys.value.T @ self.w
        self.carried.advance(transition, [(keys.value.T, self.v_new.error), (np.eye(len(state)), error)])
        return after


class _ResidualChunk(_Chunk):
    """The same with the residual first (the document's section 6a)."""

    def _updates(self) -> None:
        """V = X (beta v - beta exp(G) (k S)): what is not the earlier state's error."""
        rows, state, arithmetic = self.rows, self.state_before, self.arithmetic
        x, size_x = self._entering_inverse()
        size_state, moved, entering_state, most_state = self._entering_state()
        keys = self._entering(rows.k, arithmetic)
        size_k = np.abs(keys.value) + keys.error
        # k S, beside k E
        read_error = keys.error @ (size_state + moved) + size_k @ entering_state
        read_error = read_error + arithmetic.accumulated(size_k, most_state)
        most_read = np.abs(rows.k.value) @ (size_state + moved) + read_error
        weights, written = self._times(self.beta, self.from_start), self._times(rows.v, self.beta)
        most_weight = np.abs(weights.value) + weights.error
        taken = most_weight * most_read
        most_right = np.abs(written.value) + written.error + taken
        # beta v - beta exp(G) (k S), beside beta exp(G) k E: a product and a difference are rounded
        error = written.error + weights.error * most_read + np.abs(weights.value) * read_error
        error = error + self.unit * (taken + (1.0 + self.unit) * most_right) + 2.0 * self.device.smallest_normal
        most_right = most_right * (1.0 + self.unit) ** 2 + 2.0 * self.device.smallest_normal
        entering = arithmetic.rounded(most_right)
        error, most_right = error + entering, most_right + entering
        exact_k = rows.k.value * weights.value
        exact_right = rows.v.value * self.beta.value - exact_k @ state
        v_new = x.value @ exact_right
        of_x = np.minimum(x.error @ np.abs(exact_right), self._missed(exact_right))
        read = np.minimum(np.abs(exact_k) @ moved, self.carried.through(exact_k, self.lanes))
        delta = of_x + x.error @ read + size_x @ error + arithmetic.accumulated(size_x, most_right)
        self.w = x.value @ exact_k
        self.v_new = Approx(v_new, delta)
        self.most_v = np.abs(v_new) + delta + self.carried.through(self.w, self.lanes)
        self._demand(size_k @ most_state, most_right, size_x @ most_right)

    def outputs(self) -> np.ndarray:
        """Bounds of the outputs, whose products have operands of their own."""
        rows, state, reading = self.rows, self.state_before, self.reading
        scores, queries = self._entering(self.scores, reading), self._entering(rows.q, reading)
        size_p, size_q = (np.abs(x.value) + x.error for x in (scores, queries))
        size_state = np.abs(state) + self.state_error
        entering_state = reading.rounded(size_state)
        most_state = size_state + entering_state
        entering_v = reading.rounded(self.most_v)
        most_v = self.most_v + entering_v
        # q S, beside q E
        read_error = queries.error @ size_state + size_q @ entering_state + reading.accumulated(size_q, most_state)
        most_read = size_q @ most_state + reading.accumulated(size_q, most_state)
        decay = self.from_start
        read = (np.abs(decay.value) + decay.error) * most_read
        error = decay.error * most_read + np.abs(decay.value) * read_error
        error = error + self.unit * read + self.device.smallest_normal
        error = error + np.abs(self.scores.value) @ (self.v_new.error + entering_v) + scores.error @ most_v
        error = error + reading.accumulated(size_p, most_v)
        moved = decay.value * rows.q.value
        error = error + self.carried.through(moved - self.scores.value @ self.w, self.lanes)
        error = error + reading.joined(read, size_p, most_v)
        self._demand(most_read, read + size_p @ most_v)
        return self._returned(moved @ state + self.scores.value @ self.v_new.value, error)

    def advance(self) -> np.ndarray:
        """The exact state after the chunk; its error goes to `carried`."""
        rows, state, arithmetic = self.rows, self.state_before, self.arithmetic
        keys = self._entering(rows.k, arithmetic)
        size = (np.abs(keys.value) + keys.error).T
        # exp(G_C - G) V, beside what V errs by
        decay = self.to_end
        most = (np.abs(decay.value) + decay.error) * self.most_v * (1.0 + self.unit) + self.device.smallest_normal
        entering = arithmetic.rounded(most)
        scaled = decay.error * self.most_v + self.unit * most + self.device.smallest_normal + entering
        most = most + entering
        kept = Approx(self.from_start.value[-1], self.from_start.error[-1])
        error = keys.error.T @ most + np.abs(rows.k.value).T @ scaled
        error = error + arithmetic.accumulated(size, most, partial=4)
        error = error + kept.error[:, None] * (np.abs(state) + self.state_error)
        decayed = (np.abs(state) + self.state_error) * (kept.value + kept.error)[:, None]
        error = error + arithmetic.joined(decayed, size, most)
        whole = decayed + size @ most
        error = error + self.device.smallest_normal * (whole > 0)
        self._demand(whole)
        written = (rows.k.value * decay.value).T
        transition = kept.value[:, None] * np.eye(len(state)) - written @ self.w
        self.carried.advance(transition, [(written, self.v_new.error), (np.eye(len(state)), error)])
        return state * kept.value[:, None] + written @ self.v_new.value
