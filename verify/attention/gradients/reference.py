"""What a gradient oracle hands back: derivatives with proved errors."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float64

    from verify.attention.gradients.problem import GradientProblem

ROWS_AT_ONCE = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Bounded:
    """Numbers with a proved elementwise error: |value - exact| <= error.  NaN with an infinite error is undefined."""

    value: Float64[np.ndarray, "*shape"]
    error: Float64[np.ndarray, "*shape"]

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Bounded:
        """Exact zeros."""
        return cls(np.zeros(shape), np.zeros(shape))

    def settle(self) -> None:
        """Where the computation left the range of float64, say that nothing is known: 0 with an infinite error."""
        bad = ~(np.isfinite(self.value) & np.isfinite(self.error))
        self.value[bad] = 0.0
        self.error[bad] = np.inf


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
    """The derivatives of one problem up to proved errors.

    Attributes:
        dq: `[batch, heads, q_len, head_dim]`.
        dk: `[batch, kv_heads, kv_len, head_dim]`.
        dv: `[batch, kv_heads, kv_len, v_dim]`.
        dsinks: `[heads]`, summed over the batch; None for a problem without sinks.
        tier: "float64", "arb", "mpmath", or "float64+arb" where rows were escalated.
        escalated: how many (batch, head, row) rows the float64 tier handed to ball arithmetic.
    """

    dq: Bounded
    dk: Bounded
    dv: Bounded
    dsinks: Bounded | None
    tier: str
    escalated: int = 0

    @classmethod
    def blank(cls, problem: GradientProblem, tier: str) -> Gradients:
        """Zeros of the right shapes."""
        sinks = None if problem.sinks is None else Bounded.zeros((problem.heads,))
        dq, dk, dv = (Bounded.zeros(x.shape) for x in (problem.q, problem.k, problem.v))
        return cls(dq, dk, dv, sinks, tier)

    def parts(self) -> Iterator[tuple[str, Bounded]]:
        """The derivatives by name."""
        for name in ("dq", "dk", "dv", "dsinks"):
            part = getattr(self, name)
            if part is not None:
                yield name, part

    def mark_undefined(self, problem: GradientProblem) -> Gradients:
        """NaN with an infinite error wherever an undefined row adds to; returns itself."""
        for batch, head in np.ndindex(problem.batch, problem.heads):
            inputs = problem.head(batch, head)
            if not (inputs.odd_rows.any() or inputs.odd_keys.any()):
                continue
            kv_head = problem.kv_head(head)
            for start in range(0, problem.q_len, ROWS_AT_ONCE):
                rows = slice(start, min(start + ROWS_AT_ONCE, problem.q_len))
                bad = inputs.undefined(rows)
                if not bad.any():
                    continue
                keys = inputs.mask(rows)[bad].any(axis=0)
                _undefine(self.dq, (batch, head, start + np.flatnonzero(bad)))
                _undefine(self.dk, (batch, kv_head, np.flatnonzero(keys)))
                _undefine(self.dv, (batch, kv_head, np.flatnonzero(keys)))
                if self.dsinks is not None and inputs.sink > -np.inf:
                    _undefine(self.dsinks, (head,))
        return self


def _undefine(part: Bounded, where: tuple[int | np.ndarray, ...]) -> None:
    part.value[where] = np.nan
    part.error[where] = np.inf
