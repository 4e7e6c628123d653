"""What an oracle hands back: values of f with proved errors; and how it says that it cannot be trusted."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
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
        max_logit: largest natural-log logit among the visible keys of a row, after the soft cap and without the sink
            (nats); None if it was not computed.
        max_logit_error: proved bound of |max_logit - f_max_logit|, >= 0, never NaN.
    """

    out: Float64[np.ndarray, "batch heads q_len v_dim"]
    out_error: Float64[np.ndarray, "batch heads q_len v_dim"]
    lse: Float64[np.ndarray, "batch heads q_len"]
    lse_error: Float64[np.ndarray, "batch heads q_len"]
    tier: str
    escalated: int = 0
    max_logit: Float64[np.ndarray, "batch heads q_len"] | None = None
    max_logit_error: Float64[np.ndarray, "batch heads q_len"] | None = None

    @property
    def head_max_logit(self) -> Float64[np.ndarray, "batch heads"]:
        """The largest logit of each head over all its rows (nats); NaN if one of them is NaN, -inf without keys."""
        value, _ = self._row_maxima
        return value.max(axis=-1, initial=-math.inf)

    @property
    def head_max_logit_error(self) -> Float64[np.ndarray, "batch heads"]:
        """Proved bound of |head_max_logit - f|: a maximum moves by no more than its arguments do."""
        _, error = self._row_maxima
        return np.where(np.isfinite(self.head_max_logit), error.max(axis=-1, initial=0.0), 0.0)

    def contenders(self, batch: int, head: int) -> list[int]:
        """Rows of a head among which its largest logit certainly is; all of them where one is NaN."""
        value, error = (x[batch, head] for x in self._row_maxima)
        # Sum and difference are rounded by half an ulp at most: one number further out is certainly outside.
        highest, lowest = np.nextafter(value + error, np.inf), np.nextafter(value - error, -np.inf)
        beaten = highest < lowest.max(initial=-math.inf)
        return np.flatnonzero(~beaten).tolist()

    @property
    def _row_maxima(self) -> tuple[np.ndarray, np.ndarray]:
        """The largest logit of each row, and its error."""
        if self.max_logit is None or self.max_logit_error is None:
            message = f"the {self.tier} reference holds no maximum logits"
            raise ValueError(message)
        return self.max_logit, self.max_logit_error
