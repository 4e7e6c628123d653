"""What an oracle of Gated DeltaNet hands back: values of f with proved errors."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from verify.attention.reference import OracleUnsound

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64

__all__ = ["GdnReference", "OracleUnsound"]


@dataclasses.dataclass(frozen=True, eq=False)
class GdnReference:
    """The exact result f up to a proved error, elementwise.

    Where a non-finite input may have an effect, f is NaN with error 0 (nothing is promised there).  Tokens of no
    sequence have out = 0.

    Attributes:
        out: `[tokens, n_v, d_v]`.
        out_error: proved bound of |out - f_out|, >= 0, never NaN.
        state: all slots after the call, `[slots, n_v, d_k, d_v]`; slots that nobody writes are the input's, error 0.
        state_error: proved bound of |state - f_state|.
        tier: which oracle computed it: "float64", "float64 chunked", "arb", "arb chunked", "mpmath".
    """

    out: Float64[np.ndarray, "tokens n_v d_v"]
    out_error: Float64[np.ndarray, "tokens n_v d_v"]
    state: Float64[np.ndarray, "slots n_v d_k d_v"]
    state_error: Float64[np.ndarray, "slots n_v d_k d_v"]
    tier: str
