"""What an oracle hands back: values of f with proved errors; and how it says that it cannot be trusted."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64


class OracleUnsound(RuntimeError):  # noqa: N818 - the name states the finding, as in a verdict
    """An oracle missed a known answer, left its own error bound, or could not reach the precision asked for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """The exact result f up to a proved error, elementwise: |out - f_out| <= out_error, |lse - f_lse| <= lse_error.

    A non-finite entry is exact: its class (NaN, +inf, -inf) is that of f, and its error is 0.

    Attributes:
        out: attention output.
        out_error: proved bound of |out - f_out|, >= 0, never NaN.
        lse: natural-log sum of exponentials (nats).
        lse_error: proved bound of |lse - f_lse|, >= 0, never NaN.
        tier: which oracle computed it: "float64", "arb", "mpmath", or "float64+arb" after `refine`.
        escalated: how many (batch, head, row) rows `refine` has recomputed with ball arithmetic.
    """

    out: Float64[np.ndarray, "batch heads q_len head_dim"]
    out_error: Float64[np.ndarray, "batch heads q_len head_dim"]
    lse: Float64[np.ndarray, "batch heads q_len"]
    lse_error: Float64[np.ndarray, "batch heads q_len"]
    tier: str
    escalated: int = 0
