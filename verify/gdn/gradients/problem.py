"""What is differentiated: L = sum out * d_out + sum final_state * d_state, exactly, at the inputs of the delta rule.

With the names of `verify.gdn.problem`, per value head, the derivatives are those of

    S'_t = exp(g_t) S_(t-1)     r_t = v_t - S'_t^T k_t     u_t = beta_t r_t
    S_t = S'_t + k_t u_t^T      o_t = scale S_t^T q_t

by q, k (summed over the value heads that read them), v, beta, g (nats) and the initial state of each sequence.  Where
g = -inf, S' is 0 whatever g is nearby: the derivative by g is 0, and nothing flows to earlier tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.problem import BF16, FP32, DeltaRuleProblem

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Float64

NAMES = ("q", "k", "v", "beta", "g", "initial")


@dataclasses.dataclass(frozen=True, eq=False)
class GradientProblem:
    """A delta rule, and the gradients of L by its outputs.

    Attributes:
        rule: the inputs; all finite but for g, which may be -inf.
        d_out: BF16 or FP32 `[tokens, n_v, d_v]`; tokens of no sequence do not count.
        d_state: FP32 `[sequences, n_v, d_k, d_v]`: by each sequence's final state.
    """

    rule: DeltaRuleProblem
    d_out: Float[np.ndarray, "tokens n_v d_v"]
    d_state: Float32[np.ndarray, "sequences n_v d_k d_v"]

    def __post_init__(self) -> None:
        shapes = {
            "d_out": self.rule.v.shape,
            "d_state": (self.rule.sequences.count, *self.rule.state.shape[1:]),
        }
        for name, shape in shapes.items():
            x = getattr(self, name)
            if x.shape != shape or x.dtype not in (BF16, FP32):
                message = f"{name} must be BF16 or FP32 {list(shape)}, got {x.dtype} {list(x.shape)}"
                raise ValueError(message)
        if self.rule.sequences.accepted is not None:
            message = "gradients are of the state after all tokens: accepted must be None"
            raise ValueError(message)
        for name in ("q", "k", "v", "beta", "state"):
            if not np.isfinite(getattr(self.rule, name).astype(np.float32)).all():
                message = f"{name} must be finite"
                raise ValueError(message)
        for name in shapes:
            if not np.isfinite(getattr(self, name).astype(np.float32)).all():
                message = f"{name} must be finite"
                raise ValueError(message)


@dataclasses.dataclass(frozen=True, eq=False)
class GradientReference:
    """Exact derivatives up to a proved error, elementwise, by name of the input.

    Attributes:
        value: arrays of the shape of each input; "initial" is `[sequences, n_v, d_k, d_v]`, "g" has the shape of the
            problem's g, `[tokens, n_v]` if it has none.
        error: proved bounds.
        tier: "float64", "arb" or "mpmath".
    """

    value: dict[str, Float64[np.ndarray, "..."]]
    error: dict[str, Float64[np.ndarray, "..."]]
    tier: str

    @classmethod
    def blank(cls, problem: GradientProblem, tier: str) -> GradientReference:
        """Zeros: what tokens of no sequence have."""
        rule = problem.rule
        shapes = {
            "q": rule.q.shape,
            "k": rule.k.shape,
            "v": rule.v.shape,
            "beta": rule.beta.shape,
            "g": rule.beta.shape if rule.g is None else rule.g.shape,
            "initial": problem.d_state.shape,
        }
        return cls({n: np.zeros(s) for n, s in shapes.items()}, {n: np.zeros(s) for n, s in shapes.items()}, tier)
