"""The public function: from what a caller passes to one launch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from flywheel.attention.budget import LANES
from flywheel.attention.checks import (
    Softmax,
    check_flags,
    check_operands,
    check_scale,
    check_segment_ids,
    check_sinks,
    check_softcap,
    check_softmax,
    check_window,
    rotary_operands,
)
from flywheel.attention.kernel import MAX_BLOCKS, MAX_BODIES, MAX_STEPS, Operands, RawOutputs, call
from flywheel.attention.rotary import Rotary, RotaryTables, expand_tables
from flywheel.attention.schedule import Band, Schedule
from flywheel.attention.spec import CallSpec
from flywheel.attention.tile import ScoreRule, largest_or_nan
from flywheel.attention.tiling import VMEM_LIMIT, AttentionConfig, Tiling, resolve, vmem_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax import Array
    from jax.experimental.pallas import tpu as pltpu
    from jaxtyping import BFloat16, Float32, Int32

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
    """The result of `attention` when more than the output was asked for; what was not asked for is None.

    Attributes:
        out: the output.
        lse: each row's log-sum-exp in nats, sinks included.
        diagnostics: what the softmax did.
        max_logit: each head's largest visible logit in nats.
    """

    out: BFloat16[Array, "batch heads q_len v_dim"]
    lse: Float32[Array, "batch heads q_len"] | None
    diagnostics: AttentionDiagnostics | None
    max_logit: Float32[Array, "batch heads"] | None = None


def attention(
    q: BFloat16[Array, "batch heads q_len head_dim"],
    k: BFloat16[Array, "batch kv_heads kv_len head_dim"],
    v: BFloat16[Array, "batch kv_heads kv_len v_dim"],
    *,
    causal: bool,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float32[Array, " heads"] | None = None,
    q_segment_ids: Int32[Array, "batch q_len"] | None = None,
    kv_segment_ids: Int32[Array, "batch kv_len"] | None = None,
    rotary: Rotary | None = None,
    softmax: Softmax = "static",
    return_lse: bool = False,
    return_max_logit: bool = False,
    return_diagnostics: bool = False,
    config: AttentionConfig | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> BFloat16[Array, "batch heads q_len v_dim"] | AttentionOutput:
    """Softmax attention, with a static anchor that is checked at run time (forward only).

    out_i = sum_k P_ik v_k with P_ik = exp(z_ik) / (sum_j exp(z_ij) + exp(sink)) over the keys that row i sees, where
    z_ik = scale q_i.k_k, or softcap tanh(scale q_i.k_k / softcap), are natural-log logits.  A row that sees no key has
    out = 0 and lse = -inf (the sink, if there is one).  Results are the same, bit for bit, from run to run.

    Args:
        q: queries, BF16.  Tokens lie on sublanes: `[batch, heads, tokens, head_dim]`, head_dim 64, 128, 192 or 256.
        k: keys, BF16.  Query head h reads KV head h // (heads // kv_heads): MHA, GQA and MQA.
        v: values, BF16; v_dim is 64, 128, 192 or 256 and may differ from head_dim.
        causal: row i is aligned with key p = i + kv_len - q_len (bottom-right) and sees keys 0 .. p; else every key.
        scale: factor of the logits, a Python number; 1 / sqrt(head_dim) by default.
        window: (left, right): row i sees keys p - left .. p + right only; None is unbounded.  Key blocks that no row of
            a query block sees are neither fetched nor computed.
        softcap: bound of the logits, positive; None for none.
        sinks: a natural-log logit per head, FP32, neither scaled nor capped, of a null key with value zero that every
            row sees; -inf is no sink.
        q_segment_ids: with kv_segment_ids: a row sees keys of its own id only, under causal mask and window as well.
        kv_segment_ids: see q_segment_ids.
        rotary: rotate the queries first (`Rotary`); the keys come rotated.
        softmax: "static" measures scores against an anchor per row that does not move, checks that nothing overflowed,
            and replays a query block with the rescaling softmax if something did; "online" rescales throughout.  Both
            obey the same bound.  With a soft cap of at most 51.9 nats all rows share one anchor.
        return_lse: also return each row's log-sum-exp, natural log, FP32.
        return_max_logit: also return each head's largest logit over its rows and their visible keys (never the sink),
            in nats, FP32; -inf if there is none.
        return_diagnostics: also return `AttentionDiagnostics`.
        config: block sizes and the TPU generation to choose them for; chosen by default.
        interpret: run in one of Pallas' interpret modes (a machine without a TPU): True, or `pltpu.InterpretParams`.

    Returns:
        The output, BF16; an `AttentionOutput` if anything else is asked for.

    Numerical contract.  Domain: finite q, k, v, subnormal inputs read as zero, and for each visible pair
    max(1, |scale| log2 e) sum_d |q_d k_d| <= 2**127; |sink| log2 e <= 2**127; softcap, softcap log2 e and
    |scale| / softcap within [2**-126, 2**127].  On the domain, elementwise and for any order of summation,

        |out - exact| <= B + 2**-8 (|exact| + B) + 2**-125,   B = min(S, A) + a few 2**-24 (|exact| + min(S, A))
        A = (sum_k P_k alpha_k |v_k| + |exact| sum_k P_k beta_k + 2**-89 (sum_k |v_k| + n |exact|) + n 2**-88)
            / (1 - sum_k P_k beta_k - n 2**-89)
        S = max_k |v_k - exact| + (2**-8 + a few 2**-24 n) max_k |v_k| + n 2**-88     (visible keys; n of them)

    where beta_k is the relative error of a weight and of the sum of weights (2**-24 head_dim per unit of
    |scale| log2 e sum_d |q_d k_d|, one exp2, 2**-24 n; with a soft cap that of one tanh) and alpha_k adds the rounding
    of P to BF16, 2**-8.  The exact expressions and their derivation: docs/attention-contract.md; their evaluation:
    `verify.attention.contract`.  There is no further condition: jumps between scores and the size of |v| are covered by
    the run-time checks and the replay.

    Outside the domain: a row with a visible +inf or NaN score is NaN; a score of -inf has weight 0; a row whose visible
    scores are all -inf is NaN; a non-finite value reaches exactly the rows that see its key (with a score above -inf).
    Keys and values that a row does not see never reach it, whatever they hold.

    Source: the static anchor is that of "Flywheel Attention" (2026), section 3.1 and appendix A; the rescaling softmax
    is FlashAttention's (arXiv:2205.14135) with an integer running maximum; sinks are gpt-oss's, the soft cap Gemma 2's.

    Raises:
        TypeError: an operand or an option is not of its type.
        ValueError: ranks, shapes, head counts, head_dim, lengths, scale, window, softcap, segment ids, rotary tables or
            block sizes break a rule that the message states.  Nothing is launched.
    """
    if scale is None and getattr(q, "ndim", 0) == _RANK and q.shape[3] > 0:
        scale = 1.0 / math.sqrt(q.shape[3])
    check_operands(q, k, v)
    check_flags(
        causal=causal,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        return_diagnostics=return_diagnostics,
    )
    check_softmax(softmax)
    rule = ScoreRule(check_scale(scale), check_softcap(softcap, scale))
    check_sinks(sinks, q.shape[1])
    check_segment_ids(q_segment_ids, kv_segment_ids, q.shape, k.shape)
    tables = rotary_operands(rotary, q.shape)
    schedule, tiling = _plan(
        q,
        k,
        v,
        _band(causal, window, q.shape[2], k.shape[2]),
        config,
        online=softmax == "online",
        segments=q_segment_ids is not None,
    )
    spec = CallSpec(
        schedule,
        tiling,
        q.shape[1] // k.shape[1],
        rule,
        online=softmax == "online",
        segments=q_segment_ids is not None,
        sinks=sinks is not None,
        rotary=None if rotary is None else rotary.layout,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        return_diagnostics=return_diagnostics,
    )
    raw = _jitted(Operands(q, k, v, sinks, q_segment_ids, kv_segment_ids, *tables), spec, interpret)
    if not (return_lse or return_max_logit or return_diagnostics):
        return raw.out
    diagnostics = None
    if return_diagnostics:
        assert raw.replays is not None and raw.anchor is not None and raw.l is not None  # noqa: S101, PT018  asked for above
        diagnostics = AttentionDiagnostics(raw.replays, raw.anchor, raw.l)
    return AttentionOutput(raw.out, raw.lse, diagnostics, raw.max_logit)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _jitted(operands: Operands, spec: CallSpec, interpret: Any) -> RawOutputs:  # noqa: ANN401  bool or InterpretParams
    if spec.rotary is not None:
        assert operands.cos is not None and operands.sin is not None  # noqa: S101, PT018  rotary_operands gives both
        cos, sin = expand_tables(RotaryTables(operands.cos, operands.sin), spec.rotary)
        operands = operands._replace(cos=cos, sin=sin)
    raw = call(operands, spec=spec, interpret=interpret)
    if raw.max_logit is None:
        return raw
    return raw._replace(max_logit=largest_or_nan(raw.max_logit, axis=2)[..., 0])


def _band(causal: bool, window: tuple[int | None, int | None] | None, q_len: int, kv_len: int) -> Band:  # noqa: FBT001
    """What row r sees of the keys, bottom-right aligned; a bound that hides nothing is None."""
    left, right = check_window(window)
    if causal:
        right = 0
    offset = kv_len - q_len
    lower = None if left is None or left >= kv_len - 1 else offset - left
    upper = None if right is None or right >= q_len - 1 else offset + right
    return Band(lower, upper)


def _counts(schedule: Schedule) -> Iterator[tuple[str, int, int]]:
    """What a schedule has how many of, and of how many the kernel has room; the costly counts last."""
    yield "query blocks", schedule.q_blocks, MAX_BLOCKS
    yield "key blocks", schedule.kv_blocks, MAX_BLOCKS
    yield "steps per head", schedule.step_count, MAX_STEPS
    yield "kinds of partly visible blocks", len(schedule.bodies), MAX_BODIES


def _plan(
    q: Array,
    k: Array,
    v: Array,
    band: Band,
    config: AttentionConfig | None,
    *,
    online: bool,
    segments: bool,
) -> tuple[Schedule, Tiling]:
    """Blocks and steps; refuses what the chip has no room for."""
    wide = max(q.shape[3], v.shape[3]) > LANES
    lengths = q.shape[2], k.shape[2]
    tiling = resolve(config or AttentionConfig(), *lengths, online=online, wide=wide, band=band, segments=segments)
    need = vmem_bytes(tiling, q.shape[3], v.shape[3])
    if need > VMEM_LIMIT:
        message = (
            f"config needs {need} bytes of VMEM at head_dim {q.shape[3]} and v_dim {v.shape[3]}, the budget is "
            f"{VMEM_LIMIT}: {tiling}"
        )
        raise ValueError(message)
    schedule = Schedule(*lengths, band, tiling.block_q, tiling.block_kv, tiling.fragment, tiling.overlap)
    for what, count, most in _counts(schedule):
        if count > most:
            message = (
                f"config makes {count} {what}, at most {most}: block_q = {tiling.block_q} and "
                f"block_kv = {tiling.block_kv} with {q.shape[2]} queries and {k.shape[2]} keys"
            )
            raise ValueError(message)
    return schedule, tiling
