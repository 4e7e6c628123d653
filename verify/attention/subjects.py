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
    from verify.attention.ragged import RaggedProblem

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
        max_logit: largest logit of each head in nats, or None.
    """

    out: np.ndarray
    lse: Float32[np.ndarray, "batch heads q_len"] | None
    replays: Int32[np.ndarray, "batch heads q_blocks"] | None = None
    anchor: Float32[np.ndarray, "batch heads q_len"] | None = None
    l: Float32[np.ndarray, "batch heads q_len"] | None = None  # noqa: E741  the field's name
    max_logit: Float32[np.ndarray, "batch heads"] | None = None


def run_flywheel(
    problem: AttentionProblem,
    *,
    config: tuple[int, int, int] = (0, 0, 0),
    softmax: flywheel.Softmax = "static",
    interpret: bool | pltpu.InterpretParams = True,
) -> SubjectResult:
    """Run `flywheel.attention` with LSE, maximum logits and diagnostics.

    Args:
        problem: aligned bottom-right.
        config: (block_q, block_kv, fragment), 0 the default.
        softmax: with a static anchor or rescaling throughout.
        interpret: Pallas' interpret mode.

    Raises:
        ValueError: the problem states positions of its own.
    """
    if problem.q_positions is not None:
        message = "flywheel.attention must be given a bottom-right aligned problem, got q_positions"
        raise ValueError(message)
    sizes: dict[str, Any] = {
        name: size or None for name, size in zip(("block_q", "block_kv", "fragment"), config, strict=True)
    }
    result = flywheel.attention(
        jnp.asarray(problem.q),
        jnp.asarray(problem.k),
        jnp.asarray(problem.v),
        causal=problem.causal,
        scale=problem.scale,
        window=problem.window,
        softcap=problem.softcap,
        sinks=None if problem.sinks is None else jnp.asarray(problem.sinks),
        q_segment_ids=None if problem.q_segments is None else jnp.asarray(problem.q_segments, jnp.int32),
        kv_segment_ids=None if problem.k_segments is None else jnp.asarray(problem.k_segments, jnp.int32),
        softmax=softmax,
        return_lse=True,
        return_max_logit=True,
        return_diagnostics=True,
        config=flywheel.AttentionConfig(**sizes),
        interpret=interpret,
    )
    assert isinstance(result, flywheel.AttentionOutput)  # noqa: S101  more than the output was asked for
    assert result.diagnostics is not None  # noqa: S101
    replays, anchor, l = (np.asarray(x) for x in result.diagnostics)  # noqa: E741
    out, lse, max_logit = (np.asarray(x) for x in (result.out, result.lse, result.max_logit))
    return SubjectResult(out, lse, replays, anchor, l, max_logit)


def run_ragged(
    problem: RaggedProblem,
    *,
    block: int | None = None,
    short: int | None = None,
    softmax: flywheel.Softmax = "static",
    batch_invariant: bool = False,
    interpret: bool | pltpu.InterpretParams = True,
) -> SubjectResult:
    """Run `flywheel.ragged_attention` with LSE, maximum logits and diagnostics.

    Args:
        problem: the batch; results come in its packed layout, padding cut off (`RaggedProblem.pack`).
        block: as in `flywheel.RaggedConfig`.
        short: likewise.
        softmax: with a static anchor or rescaling throughout.
        batch_invariant: bitwise the same wherever a sequence lies.
        interpret: Pallas' interpret mode.
    """
    result = flywheel.ragged_attention(
        jnp.asarray(problem.q),
        jnp.asarray(problem.k),
        jnp.asarray(problem.v),
        jnp.asarray(problem.cu_seqlens_q, jnp.int32),
        jnp.asarray(problem.cu_seqlens_k, jnp.int32),
        causal=problem.causal,
        scale=problem.scale,
        window=problem.window,
        softcap=problem.softcap,
        sinks=None if problem.sinks is None else jnp.asarray(problem.sinks),
        softmax=softmax,
        batch_invariant=batch_invariant,
        return_lse=True,
        return_max_logit=True,
        return_diagnostics=True,
        config=flywheel.RaggedConfig(block, short),
        interpret=interpret,
    )
    assert isinstance(result, flywheel.RaggedOutput)  # noqa: S101  more than the output was asked for
    assert result.diagnostics is not None  # noqa: S101
    replays, anchor, l = (np.asarray(x) for x in result.diagnostics)  # noqa: E741
    packed = [problem.pack(np.asarray(x)) for x in (result.out, result.lse, anchor, l)]
    return SubjectResult(packed[0], packed[1], replays[None], packed[2], packed[3], np.asarray(result.max_logit)[None])
