"""Our Gated DeltaNet kernel as subjects, one per precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from flywheel.gdn import fused_conv1d_gdn
from verify.attention.subjects import INTERPRET
from verify.gdn.inverse_steps import PRECISIONS, InverseSteps
from verify.gdn.judge import GdnResult
from verify.gdn.problem import BF16
from verify.gdn.steps import ChunkSteps
from verify.subjects.gdn import GdnSubject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verify.gdn.problem import GdnProblem

HEAD_DIM = 128
CONTRACT = "docs/gdn-contract.md: the bound that the judge evaluates; docs/gdn-semantics.md for the rest"


BUCKETS = {"tokens": 128, "sequences": 4, "slots": 4}
"""Shapes are filled up to multiples of these: a kernel is compiled for shapes, lengths are traced."""


def run_flywheel_gdn(
    problem: GdnProblem,
    *,
    precision: Any = "bf16",  # noqa: ANN401
    interpret: str = "fast",
    exact_shapes: bool = False,
    buckets: Mapping[str, int] = BUCKETS,
) -> GdnResult:
    """Run `flywheel.gdn.fused_conv1d_gdn` on a layer's problem.

    Args:
        problem: one that the kernel takes (`lacking`).
        precision: of the products.
        interpret: "fast" or "tpu".
        exact_shapes: as they are; else tokens, sequences and slots are filled up, with NaN that must not be read.
        buckets: to multiples of these.
    """
    n_kq, n_v, _, d_v = problem.heads
    sequences = problem.sequences
    tokens, count, slots = problem.tokens, sequences.count, len(problem.state)
    wanted = {name: -(-n // buckets[name]) * buckets[name] for name, n in _sizes(problem).items()}
    if exact_shapes:
        wanted = _sizes(problem)

    def filled(x: np.ndarray, size: int, value: Any) -> jnp.ndarray:  # noqa: ANN401
        more = np.full((size - len(x), *x.shape[1:]), value, x.dtype)
        return jnp.asarray(np.concatenate([x, more]))

    def entries(x: np.ndarray, value: int, dtype: Any = jnp.int32) -> jnp.ndarray:  # noqa: ANN401
        return filled(np.asarray(x), wanted["sequences"] + len(x) - count, value).astype(dtype)

    found = fused_conv1d_gdn(
        qkv=filled(problem.qkv, wanted["tokens"], np.nan),
        b=filled(problem.b, wanted["tokens"], np.nan),
        a=filled(problem.a, wanted["tokens"], np.nan),
        conv_state=filled(problem.conv_state, wanted["slots"], np.nan),
        recurrent_state=filled(problem.state, wanted["slots"], np.nan),
        conv_weight=jnp.asarray(problem.taps),
        conv_bias=None if problem.bias is None else jnp.asarray(problem.bias),
        a_log=jnp.asarray(problem.a_log),
        dt_bias=jnp.asarray(problem.dt_bias),
        query_start_loc=entries(sequences.boundaries, int(sequences.boundaries[-1])),
        state_indices=entries(sequences.write_slots, -1),
        has_initial_state=entries(sequences.has_initial, 0, jnp.bool_),
        read_state_indices=entries(sequences.read_slots, -1),
        n_kq=n_kq,
        n_v=n_v,
        scale=problem.scale,
        norm_eps=problem.norm_eps,
        beta_scale=problem.beta_scale,
        activation=problem.activation,
        precision=precision,
        interpret=INTERPRET[interpret],
    )
    out = np.asarray(found.out)[:tokens].reshape(tokens, n_v, d_v)
    return GdnResult(out, np.asarray(found.recurrent_state)[:slots], np.asarray(found.conv_state)[:slots])


def _sizes(problem: GdnProblem) -> dict[str, int]:
    return {"tokens": problem.tokens, "sequences": problem.sequences.count, "slots": len(problem.state)}


def lacking(problem: GdnProblem) -> str | None:
    """What the kernel does not take: the reason, or None."""
    if problem.per_channel:
        return "no decay per channel"
    if problem.heads[2:] != (HEAD_DIM, HEAD_DIM):
        return f"d_k and d_v must be {HEAD_DIM}, got {problem.heads[2]} and {problem.heads[3]}"
    if problem.qkv.dtype != BF16:
        return "qkv must be BF16"
    if problem.sequences.accepted is not None:
        return "no speculative tokens"
    return None


def steps(precision: str) -> ChunkSteps:
    """The roundings of a precision."""
    updates = "residual" if precision == "bf16x3" else "products"
    inverse = InverseSteps(precision, "add")
    return ChunkSteps(inverse, precision=precision, decay="pieces", updates=updates, snap=8, tile=128)


def _subject(precision: str) -> GdnSubject:
    def call(problem: GdnProblem) -> GdnResult:
        return run_flywheel_gdn(problem, precision=precision)

    return GdnSubject(
        name=f"flywheel.gdn.fused_conv1d_gdn[{precision}]",
        call=call,
        steps=steps(precision),
        lacking=lacking,
        package="flywheel-verified",
        contract=CONTRACT,
    )


BF16_MODE, SPLIT_MODE = (_subject(precision) for precision in PRECISIONS)
