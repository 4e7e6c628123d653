"""flywheel-tpu's dense and packed prefill, in Pallas' TPU interpreter."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from verify.subjects.arithmetic import Arithmetic
from verify.subjects.subject import EVERYWHERE, Features, Subject

if TYPE_CHECKING:
    from verify.attention.ragged import RaggedProblem
    from verify.subjects.jax_pallas import Window

_ASSUMPTION = "a comment in pallas/fwd_pipeline.py assumes |v| <= 2^12; the documentation states no numerical bound"


def _unbounded(window: Window | None) -> tuple[int, int]:
    left, right = window or (None, None)
    return (-1 if left is None else left, -1 if right is None else right)


@functools.cache
def _dense_run(causal: bool, scale: float, window: tuple[int, int], softcap: float) -> Any:  # noqa: ANN401, FBT001
    flash_attn_func = importlib.import_module("flywheel_tpu").flash_attn_func

    return jax.jit(
        functools.partial(
            flash_attn_func,
            softmax_scale=scale,
            causal=causal,
            window_size=window,
            softcap=softcap,
            return_softmax_lse=True,
            interpret=True,
        )
    )


def _dense(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
) -> Any:  # noqa: ANN401  a pair of arrays
    return _dense_run(causal, scale, _unbounded(window), softcap or 0.0)(q, k, v)


DENSE = Subject(
    name="flywheel_tpu.flash_attn_func",
    call=_dense,
    layout="bhtd",
    features=Features(lse="fp32", masked_rows="zero", window=True, softcap=True, v_dim=True),
    domain=EVERYWHERE,
    arithmetic=Arithmetic(weights="bf16", exponential="exp2", block_kv=128),
    package="flywheel-tpu",
    modules=("flywheel_tpu",),
    contract=_ASSUMPTION,
)


@functools.cache
def _packed_run(
    lengths: tuple[int, int],
    causal: bool,  # noqa: FBT001  a key of the cache
    scale: float,
    window: tuple[int, int],
    softcap: float,
) -> Any:  # noqa: ANN401
    flash_attn_varlen_func = importlib.import_module("flywheel_tpu").flash_attn_varlen_func

    def run(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:  # noqa: ANN401
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_q,
            cu_k,
            *lengths,
            softmax_scale=scale,
            causal=causal,
            window_size=window,
            softcap=softcap,
            return_softmax_lse=True,
            interpret=True,
        )

    return jax.jit(run)


def boundaries(segments: np.ndarray) -> np.ndarray:
    """Cumulative lengths of ascending segment ids; the last id is padding and gets no boundary if it is negative.

    Raises:
        NotImplementedError: an id occurs in more than one run, which a packed batch cannot say.
    """
    starts = np.flatnonzero(np.diff(segments)) + 1
    values = segments[np.concatenate([[0], starts])]
    if len(set(values.tolist())) != len(values):
        message = f"segments must be contiguous runs of one id each, got {values.tolist()}"
        raise NotImplementedError(message)
    ends = [*starts.tolist(), len(segments)]
    kept = [end for end, value in zip(ends, values, strict=True) if value >= 0]
    return np.array([0, *kept], np.int32)


def _packed(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
    q_segments: jax.Array | None = None,
    k_segments: jax.Array | None = None,
) -> Any:  # noqa: ANN401  a pair of arrays
    if q_segments is None or k_segments is None:
        cu_q, cu_k = (np.array([0, x.shape[1]], np.int32) for x in (q, k))
    else:
        cu_q, cu_k = boundaries(np.asarray(q_segments)), boundaries(np.asarray(k_segments))
    if cu_q.shape != cu_k.shape or (causal and (np.diff(cu_k) < np.diff(cu_q)).any()):
        message = "as many segments of keys as of queries, with at least as many keys when causal"
        raise NotImplementedError(message)
    run = _packed_run((q.shape[1], k.shape[1]), causal, scale, _unbounded(window), softcap or 0.0)
    return run(q, k, v, cu_q, cu_k)


def ragged(problem: RaggedProblem) -> tuple[np.ndarray, np.ndarray]:
    """The packed kernel on a packed batch, padding and empty sequences included: out and LSE of every row.

    Raises:
        NotImplementedError: sinks; or a sequence with rows that see no key, which its documentation leaves unspecified.
    """
    cu_q, cu_k = (np.asarray(x, np.int32) for x in (problem.cu_seqlens_q, problem.cu_seqlens_k))
    queries, keys = np.diff(cu_q), np.diff(cu_k)
    if problem.sinks is not None or ((queries > 0) & (keys < (queries if problem.causal else 1))).any():
        message = "no sinks, and a key for every row"
        raise NotImplementedError(message)
    lengths = (problem.q.shape[1], problem.k.shape[1])
    run = _packed_run(lengths, problem.causal, problem.scale, _unbounded(problem.window), problem.softcap or 0.0)
    out, lse = run(*(jnp.asarray(x) for x in (problem.q, problem.k, problem.v)), cu_q, cu_k)
    return np.asarray(out), np.asarray(lse)


VARLEN = Subject(
    name="flywheel_tpu.flash_attn_varlen_func",
    call=_packed,
    layout="htd",
    features=Features(lse="fp32", masked_rows="zero", window=True, softcap=True, segments=True, ragged=True),
    domain=EVERYWHERE,
    arithmetic=Arithmetic(weights="bf16", exponential="exp2", block_kv=128),
    package="flywheel-tpu",
    modules=("flywheel_tpu",),
    contract=f"buffer rows past the last boundary 'never attend or are attended'; {_ASSUMPTION}",
    notes=("segment ids become cumulative lengths; a negative id at the end is padding after the last sequence",),
)
