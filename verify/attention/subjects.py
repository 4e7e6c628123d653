"""Kernels under judgement: what is called, and what came back, as numpy arrays."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

import flywheel

if TYPE_CHECKING:
    from jaxtyping import Float32, Int32

    from verify.attention.problem import AttentionProblem

FLYWHEEL = "flywheel.attention"

INTERPRET = {
    "fast": True,
    "tpu": pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
}
"""Interpret modes by name: `fast` for volume; `tpu` also simulates DMA, finds races and poisons memory with NaN."""


@dataclasses.dataclass(frozen=True, eq=False)
class SubjectResult:
    """What a kernel returned.

    Attributes:
        out: BF16 `[batch, heads, q_len, head_dim]`.
        lse: nats, or None if the kernel does not return it.
        replays: per query block, or None if the kernel has no such thing.
        anchor: log2 units, per row, or None.
        l: denominator per row, or None.
    """

    out: np.ndarray
    lse: Float32[np.ndarray, "batch heads q_len"] | None
    replays: Int32[np.ndarray, "batch heads q_blocks"] | None = None
    anchor: Float32[np.ndarray, "batch heads q_len"] | None = None
    l: Float32[np.ndarray, "batch heads q_len"] | None = None  # noqa: E741  the field's name


def run_flywheel(
    problem: AttentionProblem,
    *,
    config: tuple[int, int, int] = (0, 0, 0),
    interpret: bool | pltpu.InterpretParams = True,
) -> SubjectResult:
    """Run `flywheel.attention` with LSE and diagnostics; `config` is (block_q, block_kv, fragment), 0 the default."""
    sizes: dict[str, Any] = {
        name: size or None for name, size in zip(("block_q", "block_kv", "fragment"), config, strict=True)
    }
    result = flywheel.attention(
        jnp.asarray(problem.q),
        jnp.asarray(problem.k),
        jnp.asarray(problem.v),
        causal=problem.causal,
        scale=problem.scale,
        return_lse=True,
        return_diagnostics=True,
        config=flywheel.AttentionConfig(**sizes),
        interpret=interpret,
    )
    assert isinstance(result, flywheel.AttentionOutput)  # noqa: S101  more than the output was asked for
    assert result.diagnostics is not None  # noqa: S101
    replays, anchor, l = (np.asarray(x) for x in result.diagnostics)  # noqa: E741
    return SubjectResult(np.asarray(result.out), np.asarray(result.lse), replays, anchor, l)
