"""Gated DeltaNet's public configurations as compile targets for the checks.

The process that compiles imports this file by path, so it imports nothing of `verify`.
"""

# ruff: noqa: PLC0415  JAX is imported in the process that compiles alone

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

HEAD_DIM = 128


@dataclasses.dataclass(frozen=True)
class GdnCase:
    """One call of `flywheel.gdn.fused_conv1d_gdn`.

    Attributes:
        n_v: value heads.
        n_kq: query/key heads.
        tokens: of all sequences, which are equally long.
        sequences: how many, each with an initial state.
        width: taps of the convolution.
        precision: of the products.
    """

    n_v: int = 48
    n_kq: int = 16
    tokens: int = 1024
    sequences: int = 1
    width: int = 4
    precision: str = "bf16"

    @property
    def flops(self) -> float:
        """Of the recurrence: the state is read by the key, written, and read by the query."""
        return 6.0 * self.tokens * self.n_v * HEAD_DIM * HEAD_DIM


@dataclasses.dataclass(frozen=True)
class InverseCase:
    """One call of `flywheel.gdn.triangular_inverse`.

    Attributes:
        matrices: of a batch.
        precision: of the products.
    """

    matrices: int
    precision: str = "bf16"

    @property
    def flops(self) -> float:
        """Of a substitution: a multiplication and an addition for each triple i >= j >= k."""
        return self.matrices * 64.0**3 / 3.0


GDN_CASES = MappingProxyType(
    {
        "gdn-48-heads": GdnCase(),
        "gdn-48-heads-8-sequences": GdnCase(sequences=8),
        "gdn-48-heads-bf16x3": GdnCase(precision="bf16x3"),
        "gdn-32-heads": GdnCase(n_v=32),
        "inverse-1": InverseCase(1),
        "inverse-4": InverseCase(4),
    }
)


def gdn(case: str) -> tuple[Any, Any]:
    """Factory of a case: the function and its abstract arguments."""
    found = GDN_CASES[case]
    return inverse_call(found) if isinstance(found, InverseCase) else layer_call(found)


def inverse_call(case: InverseCase) -> tuple[Any, Any]:
    """The function and the abstract arguments of a case."""
    import jax
    import jax.numpy as jnp

    from flywheel.gdn.inverse import invert_batch

    def function(lower: Any) -> Any:  # noqa: ANN401
        return invert_batch(lower, case.precision, False)  # type: ignore[arg-type]  # noqa: FBT003

    return function, (jax.ShapeDtypeStruct((case.matrices, 64, 64), jnp.float32),)


def layer_call(case: GdnCase) -> tuple[Any, Any]:
    """The function and the abstract arguments of a case; lengths are constants, so that the report knows them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from flywheel import gdn as family

    dim, slots = (2 * case.n_kq + case.n_v) * HEAD_DIM, case.sequences
    bf16, fp32 = jnp.bfloat16, jnp.float32
    shapes = (
        ((case.tokens, dim), bf16),
        ((case.tokens, case.n_v), bf16),
        ((case.tokens, case.n_v), bf16),
        ((slots, case.width - 1, dim), bf16),
        ((slots, case.n_v, HEAD_DIM, HEAD_DIM), fp32),
        ((case.width, dim), bf16),
        ((case.n_v,), fp32),
        ((case.n_v,), fp32),
    )
    starts = np.linspace(0, case.tokens, slots + 1).astype(np.int32)

    names = ("qkv", "b", "a", "conv_state", "recurrent_state", "conv_weight", "a_log", "dt_bias")

    def function(*layer: Any) -> Any:  # noqa: ANN401
        return family.fused_conv1d_gdn(
            **dict(zip(names, layer, strict=True)),
            conv_bias=None,
            query_start_loc=starts,  # type: ignore[arg-type]
            state_indices=np.arange(slots, dtype=np.int32),  # type: ignore[arg-type]
            has_initial_state=np.ones(slots, bool),  # type: ignore[arg-type]
            n_kq=case.n_kq,
            n_v=case.n_v,
            precision=case.precision,  # type: ignore[arg-type]
        )

    return function, tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
