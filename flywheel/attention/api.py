"""The public function: validation and dispatch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from flywheel.attention.budget import MAX_KEYS
from flywheel.attention.kernel import CallSpec, RawOutputs, call
from flywheel.attention.schedule import Schedule
from flywheel.attention.tiling import VMEM_BUDGET, AttentionConfig, Tiling, resolve, vmem_bytes

if TYPE_CHECKING:
    from jax import Array
    from jax.experimental.pallas import tpu as pltpu
    from jaxtyping import BFloat16, Float32, Int32

HEAD_DIMS = (64, 128, 256)
_RANK = 4


class AttentionDiagnostics(NamedTuple):
    """What the static-anchor softmax did.

    Attributes:
        replays: how often each query block was replayed with the rescaling softmax: 0 or 1.
        anchor: the shift of each row's exponent in log2 units, bias included: weights were exp2(s - anchor).
        l: each row's denominator, sum_k exp2(s_k - anchor).
    """

    replays: Int32[Array, "batch heads q_blocks"]
    anchor: Float32[Array, "batch heads q_len"]
    l: Float32[Array, "batch heads q_len"]  # noqa: E741  the field's name of the denominator


class AttentionOutput(NamedTuple):
    """The result of `attention` when more than the output was asked for; what was not asked for is None."""

    out: BFloat16[Array, "batch heads q_len head_dim"]
    lse: Float32[Array, "batch heads q_len"] | None
    diagnostics: AttentionDiagnostics | None


def attention(
    q: BFloat16[Array, "batch heads q_len head_dim"],
    k: BFloat16[Array, "batch kv_heads kv_len head_dim"],
    v: BFloat16[Array, "batch kv_heads kv_len head_dim"],
    *,
    causal: bool,
    scale: float | None = None,
    return_lse: bool = False,
    return_diagnostics: bool = False,
    config: AttentionConfig | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> BFloat16[Array, "batch heads q_len head_dim"] | AttentionOutput:
    """Softmax attention with a static anchor, checked at run time (forward only).

    out_i = sum_k P_ik v_k with P_ik = exp(scale q_i.k_k) / sum_j exp(scale q_i.k_j) over the keys that row i sees.

    Args:
        q: queries, BF16.  Tokens lie on sublanes: `[batch, heads, tokens, head_dim]`, head_dim 64, 128 or 256.
        k: keys, BF16.  Query head h reads KV head h // (heads // kv_heads): MHA, GQA and MQA.
        v: values, BF16.
        causal: row i sees keys 0 .. i + kv_len - q_len (bottom-right aligned); otherwise every key.
        scale: factor of the logits, a Python number; 1 / sqrt(head_dim) by default.
        return_lse: also return each row's log-sum-exp, natural log, FP32.
        return_diagnostics: also return `AttentionDiagnostics`.
        config: block sizes; chosen from the lengths by default.
        interpret: run in one of Pallas' interpret modes (a machine without a TPU): True, or `pltpu.InterpretParams`.

    Returns:
        The output, BF16; an `AttentionOutput` if `return_lse` or `return_diagnostics` is set.  A row that sees no key
        has out = 0 and lse = -inf.

    Numerical contract.  Domain: finite q, k, v, subnormal inputs read as zero, and for each visible pair
    max(1, |scale| log2 e) sum_d |q_d k_d| <= 2**127.  On the domain, elementwise and for any order of summation,

        |out - exact| <= B + 2**-8 (|exact| + B) + 2**-125,   B = min(S, A) + a few 2**-24 (|exact| + min(S, A))
        A = (sum_k P_k alpha_k |v_k| + |exact| sum_k P_k beta_k + 2**-90 (sum_k |v_k| + n |exact|) + n 2**-89)
            / (1 - sum_k P_k beta_k - n 2**-90)
        S = max_k |v_k - exact| + (2**-8 + a few 2**-24 n) max_k |v_k| + n 2**-89     (visible keys; n of them)

    where beta_k is the relative error of a weight and of the sum of weights (2**-24 head_dim per unit of
    |scale| log2 e sum_d |q_d k_d|, one exp2, 2**-24 n) and alpha_k adds the rounding of P to BF16, 2**-8.  The exact
    expressions and their derivation: docs/attention-contract.md; their evaluation: `verify.attention.contract`.  There
    is no further condition: jumps between scores and the size of |v| are covered by the run-time checks and the replay.

    Outside the domain: a row with a visible +inf or NaN score is NaN; a score of -inf has weight 0; a row whose visible
    scores are all -inf is NaN; a non-finite value reaches exactly the rows that see its key (with a score above -inf).
    Keys and values that a row does not see never reach it, whatever they hold.

    Source: the static anchor is that of "Flywheel Attention" (2026), section 3.1 and appendix A; the rescaling softmax
    that replays a block is FlashAttention's (arXiv:2205.14135) with an integer running maximum.

    Raises:
        TypeError: an operand is not BF16, or an option is not of its type.
        ValueError: ranks, shapes, head counts, head_dim, lengths, scale or block sizes break a rule that the message
            states.  Nothing is launched.
    """
    if scale is None and getattr(q, "ndim", 0) == _RANK and q.shape[3] > 0:
        scale = 1.0 / math.sqrt(q.shape[3])
    _check_operands(q, k, v)
    _check_shapes(q, k, v)
    log2_scale = _log2_scale(scale)
    flags: dict[str, Any] = {"causal": causal, "return_lse": return_lse, "return_diagnostics": return_diagnostics}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            message = f"{name} must be a bool (it is part of the compiled kernel), got {flag!r}"
            raise TypeError(message)
    tiling = resolve(config or AttentionConfig(), q.shape[2], k.shape[2])
    need = vmem_bytes(tiling, q.shape[3])
    if need > VMEM_BUDGET:
        message = f"config needs {need} bytes of VMEM at head_dim {q.shape[3]}, the budget is {VMEM_BUDGET}: {tiling}"
        raise ValueError(message)
    raw = _jitted(q, k, v, causal, log2_scale, return_lse, return_diagnostics, tiling, interpret)
    if not (return_lse or return_diagnostics):
        return raw.out
    diagnostics = None
    if return_diagnostics:
        assert raw.replays is not None and raw.anchor is not None and raw.l is not None  # noqa: S101, PT018  asked for above
        diagnostics = AttentionDiagnostics(raw.replays, raw.anchor, raw.l)
    return AttentionOutput(raw.out, raw.lse, diagnostics)


@functools.partial(jax.jit, static_argnums=tuple(range(3, 9)))
def _jitted(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,  # noqa: FBT001  positional, for static_argnums
    log2_scale: float,
    return_lse: bool,  # noqa: FBT001
    return_diagnostics: bool,  # noqa: FBT001
    tiling: Tiling,
    interpret: Any,  # noqa: ANN401  bool or InterpretParams
) -> RawOutputs:
    schedule = Schedule(q.shape[2], k.shape[2], causal, tiling.block_q, tiling.block_kv, tiling.fragment)
    spec = CallSpec(schedule, tiling, q.shape[1] // k.shape[1], log2_scale, return_lse, return_diagnostics)
    return call(q, k, v, spec=spec, interpret=interpret)


def _check_operands(q: Any, k: Any, v: Any) -> None:  # noqa: ANN401  anything a caller may pass
    for name, x in (("q", q), ("k", k), ("v", v)):
        if getattr(x, "dtype", None) != jnp.bfloat16:
            message = f"{name} must be a BF16 array, got {getattr(x, 'dtype', type(x).__name__)}"
            raise TypeError(message)
        if x.ndim != _RANK:
            message = f"{name} must have rank 4, [batch, heads, tokens, head_dim], got shape {x.shape}"
            raise ValueError(message)
        if 0 in x.shape:
            message = f"{name} must not be empty in any axis, got shape {x.shape}"
            raise ValueError(message)
        if x.shape[2] > MAX_KEYS:
            message = f"{name} must have at most 2**30 tokens, got {x.shape[2]}"
            raise ValueError(message)


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    if k.shape != v.shape:
        message = f"k and v must have the same shape, got {k.shape} and {v.shape}"
        raise ValueError(message)
    for axis, what in ((0, "batch"), (3, "head_dim")):
        if q.shape[axis] != k.shape[axis]:
            message = f"q and k must agree in {what}, got {q.shape[axis]} and {k.shape[axis]}"
            raise ValueError(message)
    if q.shape[1] % k.shape[1]:
        message = f"heads must be a multiple of kv_heads, got {q.shape[1]} heads and {k.shape[1]} kv_heads"
        raise ValueError(message)
    if q.shape[3] not in HEAD_DIMS:
        message = f"head_dim must be one of {HEAD_DIMS}, got {q.shape[3]}"
        raise ValueError(message)


def _log2_scale(scale: Any) -> float:  # noqa: ANN401  anything a caller may pass
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        message = f"scale must be a Python number (it is part of the compiled kernel), got {type(scale).__name__}"
        raise TypeError(message)
    log2_scale = scale * math.log2(math.e) if math.isfinite(scale) else math.nan
    smallest_normal, largest = 2.0**-126, 2.0**127
    if scale != 0 and not smallest_normal <= abs(log2_scale) <= largest:
        message = f"scale must be 0 or have 2**-126 <= |scale| log2(e) <= 2**127, got {scale}"
        raise ValueError(message)
    return float(log2_scale)
