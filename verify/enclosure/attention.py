"""Attention with a static anchor, and with running maxima, on balls: docs/enclosures.md, section 3.

Any anchor, any fragments, any partial sums: what they change is how s - A is rounded, what is flushed, and in which
order is summed.  Nominal units are those of the largest anchor that the row may have, A = ceil(max s) + BIAS; a
kernel's own anchor A' <= A multiplies its weights by the power of two 2**(A - A') >= 1, exactly.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.contract import BIAS, DOMAIN_LIMIT, LARGEST_EXPONENT
from verify.attention.problem import widen
from verify.enclosure.ball import Ball, concatenate, where
from verify.enclosure.machine import LN2, LOG2_E, Machine
from verify.rounding import BF16

if TYPE_CHECKING:
    from jaxtyping import Bool

    from verify.attention.problem import AttentionProblem
    from verify.devices import DeviceModel

SOFTMAXES = ("static", "online")
SPARE = 10
"""Additions of partial sums: 8 sublanes, and a sink."""
HALF_BF16_MAX = BF16.largest / 2


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionEnclosure:
    """Everything that a conforming kernel may return.

    Attributes:
        out: `[batch, heads, q_len, v_dim]`.
        lse: in nats, `[batch, heads, q_len]`; nothing is known of rows that see no key and have no sink.
        empty: those rows: output 0, LSE -inf.
    """

    out: Ball
    lse: Ball
    empty: Bool[np.ndarray, "batch heads q_len"]

    def contains(self, out: np.ndarray, lse: np.ndarray | None = None) -> bool:
        """Whether a result lies inside, element by element."""
        inside = bool(self.out.contains(out).all())
        if lse is None:
            return inside
        wide = np.asarray(lse, dtype=np.float64)
        return inside and bool(np.where(self.empty, np.isneginf(wide), self.lse.contains(wide)).all())


def attention(
    problem: AttentionProblem, device: DeviceModel, *, softmax: str = "static", tight: bool = False
) -> AttentionEnclosure:
    """Enclose the results of every execution.

    Args:
        problem: the inputs.
        device: what each operation may do.
        softmax: "static": one anchor per row, any of its scores, with a replay where the check demands it; "online":
            running maxima.
        tight: as in `Machine`.

    Raises:
        ValueError: another softmax.
    """
    if softmax not in SOFTMAXES:
        message = f"softmax must be one of {', '.join(SOFTMAXES)}, got {softmax!r}"
        raise ValueError(message)
    shape = problem.q.shape[:3]
    mids = np.zeros((*shape, problem.v_dim)), np.zeros(shape)
    rads = np.zeros((*shape, problem.v_dim)), np.zeros(shape)
    empty = np.ones(shape, dtype=bool)
    q_all, k_all, v_all = (widen(x) for x in (problem.q, problem.k, problem.v))
    for b in range(problem.batch):
        for view in problem.views(b):
            members = np.arange(problem.q_len)[view.rows]
            for h in range(problem.heads):
                kv = problem.kv_head(h)
                rows = _Rows(problem, h, Machine(device, tight), softmax)
                visible = rows.visible(view.start, view.stop, len(k_all[b, kv, view.keys]))
                out, lse = rows.enclose(q_all[b, h, members], k_all[b, kv, view.keys], v_all[b, kv, view.keys], visible)
                mids[0][b, h, members], rads[0][b, h, members] = out.mid, out.rad
                mids[1][b, h, members], rads[1][b, h, members] = lse.mid, lse.rad
                empty[b, h, members] = ~visible.any(axis=1) & (problem.sink(h) is None)
    return AttentionEnclosure(Ball(mids[0], rads[0]), Ball(mids[1], rads[1]), empty)


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of one head."""

    problem: AttentionProblem
    head: int
    machine: Machine
    softmax: str

    @staticmethod
    def visible(start: np.ndarray, stop: np.ndarray, keys: int) -> np.ndarray:
        numbers = np.arange(keys)[None, :]
        return (numbers >= start[:, None]) & (numbers < stop[:, None])

    def enclose(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> tuple[Ball, Ball]:
        """Outputs `[rows, v_dim]` and LSEs `[rows]`."""
        machine, sink = self.machine, self.problem.sink(self.head)
        some = visible.any(axis=1)
        if not some.any() and sink is None:
            return Ball.exact(np.zeros((len(q), v.shape[1]))), Ball(np.zeros(len(q)), np.full(len(q), np.inf))
        finite_k = np.where(np.isfinite(k), k, 0.0)
        with np.errstate(all="ignore"):
            s = self.scores(np.where(np.isfinite(q), q, 0.0), finite_k)
            outside = ~self.inside(q, k, visible)
            if sink is not None:
                outside |= not abs(sink) * LOG2_E <= DOMAIN_LIMIT
                sink = sink if np.isfinite(sink) else 0.0
                s, visible = self.with_sink(s, sink, visible)
                v = np.concatenate([v, np.zeros((1, v.shape[1]))])
            anchor = np.ceil(np.max(np.where(visible, s.high, -np.inf), axis=1)) + BIAS
            anchor = np.where(visible.any(axis=1), anchor, 0.0)[:, None]
            p = where(visible, machine.exp2(self.shifted(s, anchor)), Ball.exact(np.zeros(s.shape)))
            l = machine.sum(p, 1, keepdims=True, spare=SPARE)  # noqa: E741  the field's name
            out = self.output(p, l, v, visible)
            lse = self.log_sum_exp(l[:, 0], anchor[:, 0])
        unknown = outside[:, None] | ((visible.astype(np.float64) @ (~np.isfinite(v)).astype(np.float64)) > 0.0)
        out = where(some[:, None], out, Ball.exact(np.zeros(out.shape)))
        return Ball(out.mid, np.where(unknown & some[:, None], np.inf, out.rad)), Ball(
            lse.mid, np.where(outside & some, np.inf, lse.rad)
        )

    def inside(self, q: np.ndarray, k: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """Rows in the contract's domain."""
        finite_q, finite_k = (np.where(np.isfinite(x), np.abs(x), np.inf) for x in (q, k))
        size = np.where(visible, finite_q @ finite_k.T, 0.0) * max(1.0, abs(self.problem.scale) * LOG2_E)
        return np.isfinite(q).all(axis=1) & (size <= DOMAIN_LIMIT).all(axis=1)

    def scores(self, q: np.ndarray, k: np.ndarray) -> Ball:
        """In log2 units."""
        machine, problem = self.machine, self.problem
        dot = machine.dot(Ball.exact(q), Ball.exact(k.T))
        if problem.softcap is None:
            return machine.mul(dot, machine.constant(problem.scale * LOG2_E))
        argument = machine.mul(dot, machine.constant(problem.scale / problem.softcap))
        return machine.mul(machine.tanh(argument), machine.constant(problem.softcap * LOG2_E))

    def with_sink(self, s: Ball, sink: float, visible: np.ndarray) -> tuple[Ball, np.ndarray]:
        """One key more."""
        score = self.machine.mul(Ball.exact(sink), self.machine.constant(LOG2_E))
        column = Ball(np.full((len(s.mid), 1), score.mid), np.full((len(s.mid), 1), score.rad))
        return concatenate([s, column], 1), np.column_stack([visible, np.ones(len(visible), dtype=bool)])

    def shifted(self, s: Ball, anchor: np.ndarray) -> Ball:
        """Exponents s - A, in nominal units, with the rounding that any conforming shift makes.

        A static anchor's exponent is at most 124.00001 (the check), and is rounded once; a running maximum is
        subtracted first and BIAS afterwards, or both at once.
        """
        u = self.machine.device.unit_roundoff
        exact = s - Ball.exact(np.broadcast_to(anchor, s.shape))
        once = np.maximum(exact.size, LARGEST_EXPONENT) if self.softmax == "static" else exact.size
        rounding = u * once + 2 * u * (exact.size + BIAS)
        return exact.widened(rounding)

    def output(self, p: Ball, l: Ball, v: np.ndarray, visible: np.ndarray) -> Ball:  # noqa: E741
        """o / l, limited, in BF16."""
        machine = self.machine
        values = np.where(np.isfinite(v), v, 0.0)
        n = visible.sum(axis=1, keepdims=True)
        o = machine.dot(machine.to_bf16(p), Ball.exact(values), spare=SPARE)
        o = o.widened(np.where(n > 0, n * machine.device.smallest_normal, 0.0))  # rescaled sums that are flushed
        exact = machine.quotient(o, l).cut(*self.hull(values, visible, n))
        half = machine.divided(Ball(0.5 * exact.mid, 0.5 * exact.rad), roundings=2)
        half = Ball.between(
            np.clip(half.low, -HALF_BF16_MAX, HALF_BF16_MAX), np.clip(half.high, -HALF_BF16_MAX, HALF_BF16_MAX)
        )
        return machine.to_bf16(machine.doubled(half, 2.0))

    def hull(self, v: np.ndarray, visible: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Between what values o / l lies however wrong the scores are: the contract's section 6.2."""
        device = self.machine.device
        lanes = visible[:, :, None]
        highest = np.max(np.where(lanes, v[None], -np.inf), axis=1)
        lowest = np.min(np.where(lanes, v[None], np.inf), axis=1)
        u = max(device.unit_roundoff, device.dot_unit_roundoff)
        growth = np.expm1((n + 130.0) * u)
        skew = ((1.0 + BF16.unit_roundoff) * (1.0 + growth) ** 2 - 1.0) * np.maximum(np.abs(highest), np.abs(lowest))
        flushed = 32.0 * 2.0 ** (BIAS + 2) * device.smallest_normal * n * (1.0 + growth)
        room = (skew + flushed) * (1.0 + 2.0**-30)
        return np.where(n > 0, lowest - room, -np.inf), np.where(n > 0, highest + room, np.inf)

    def log_sum_exp(self, l: Ball, anchor: np.ndarray) -> Ball:  # noqa: E741
        """A ln 2 + ln l: the kernel's own A' is up to 160 below A, its ln l' as much larger."""
        device = self.machine.device
        u, log_size = device.unit_roundoff, LN2 * LARGEST_EXPONENT
        ln2 = Ball.exact(LN2).widened(2.0**-53)
        exact = Ball.exact(anchor) * ln2 + self.machine.log(l)
        room = device.log_relative * log_size + device.log_absolute
        room = room + 6 * u * ((np.abs(anchor) + 160.0) * LN2 + log_size)
        return exact.widened(room)
