"""The public function: from what a caller passes to one launch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flywheel.attention.checks import (
    check_flags,
    check_scale,
    check_sinks,
    check_softcap,
    check_softmax,
    check_window,
)
from flywheel.attention.rotary import Rotary, RotaryTables, expand_tables, rotary_tables
from flywheel.attention.tile import ScoreRule, largest_or_nan
from flywheel.attention.tiling import VMEM_LIMIT
from flywheel.packing import GROUP, Packing, clean, padded_tokens, snap
from flywheel.ragged.checks import check_cu_seqlens, check_operands, check_rotary
from flywheel.ragged.geometry import Geometry, Keys
from flywheel.ragged.launch import Operands, call
from flywheel.ragged.spec import RaggedSpec
from flywheel.ragged.tiling import RaggedConfig, Tiling, resolve, row_bytes, vmem_bytes

if TYPE_CHECKING:
    from jax import Array
    from jax.experimental.pallas import tpu as pltpu
    from jaxtyping import BFloat16, Float32, Int32

    from flywheel.attention.checks import Softmax
    from flywheel.attention.kernel import RawOutputs

_RANK = 3


class RaggedDiagnostics(NamedTuple):
    """What the static-anchor softmax did.

    Attributes:
        replays: how often each block of queries was replayed with the rescaling softmax: 0 or 1; blocks as
            `flywheel.packing` numbers them, 0 for those that the lengths do not make.
        anchor: the shift of each row's exponent in log2 units, bias included: weights were exp2(s - anchor).
        l: each row's denominator, sum_k exp2(s_k - anchor).
    """

    replays: Int32[Array, "heads blocks"]
    anchor: Float32[Array, "heads q_tokens"]
    l: Float32[Array, "heads q_tokens"]  # noqa: E741  the field's name of the denominator


class RaggedOutput(NamedTuple):
    """The result of `ragged_attention` when more than the output was asked for; what was not asked for is None.

    Attributes:
        out: the output.
        lse: each row's log-sum-exp in nats, sinks included.
        diagnostics: what the softmax did.
        max_logit: each head's largest visible logit in nats, over all sequences.
    """

    out: BFloat16[Array, "heads q_tokens v_dim"]
    lse: Float32[Array, "heads q_tokens"] | None
    diagnostics: RaggedDiagnostics | None
    max_logit: Float32[Array, " heads"] | None = None


def ragged_attention(
    q: BFloat16[Array, "heads q_tokens head_dim"],
    k: BFloat16[Array, "kv_heads k_tokens head_dim"],
    v: BFloat16[Array, "kv_heads k_tokens v_dim"],
    cu_seqlens_q: Int32[Array, " sequences_plus_1"],
    cu_seqlens_k: Int32[Array, " sequences_plus_1"],
    *,
    causal: bool,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float32[Array, " heads"] | None = None,
    rotary: Rotary | None = None,
    softmax: Softmax = "static",
    return_lse: bool = False,
    return_max_logit: bool = False,
    return_diagnostics: bool = False,
    batch_invariant: bool = False,
    config: RaggedConfig | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> BFloat16[Array, "heads q_tokens v_dim"] | RaggedOutput:
    """Softmax attention of sequences of any lengths, packed one after another along the tokens (forward only).

    Sequence s has the queries cu_seqlens_q[s] .. cu_seqlens_q[s+1] - 1 and the keys cu_seqlens_k[s] ..
    cu_seqlens_k[s+1] - 1; either may be none, and any number of sequences may share a group of 8 rows.  Each is what
    `flywheel.attention` makes of it alone, under the same numerical contract: causal mask and window are bottom-right
    aligned within the sequence.  Rows that see no key have out = 0 and lse = -inf (the sink, if there is one), and so
    have the tokens that belong to no sequence.  Nothing that stands in another sequence or outside of all of them, NaN
    and infinities included, reaches a result.

    The lengths are traced: other lengths need no compilation.  Outputs lie at their final place in the packed array;
    there is no padded array and no gather.  A token axis that is not a multiple of 8 is padded first, which costs a
    copy of that operand.

    Args:
        q: queries, BF16; tokens lie on sublanes, head_dim 64, 128, 192 or 256.
        k: keys, BF16.  Query head h reads KV head h // (heads // kv_heads).
        v: values, BF16; v_dim is 64, 128, 192 or 256 and may differ from head_dim.
        cu_seqlens_q: cumulative lengths of the queries, INT32: from 0, never falling, at most q_tokens.  Concrete
            arrays that break this are refused.  In traced ones a bound outside of the tokens counts as the nearest
            inside, and one below an earlier bound as the largest before it (`flywheel.packing.clean`): such a
            sequence is cut short or empty, no other one is affected, and nothing is read or written out of bounds.
        cu_seqlens_k: the same of the keys.
        causal: row i of a sequence is aligned with its key p = i + k_length - q_length and sees keys 0 .. p; else all.
        scale: factor of the logits, a Python number; 1 / sqrt(head_dim) by default.
        window: (left, right): a row sees keys p - left .. p + right only; None is unbounded.
        softcap: bound of the logits, positive; None for none.
        sinks: a natural-log logit per head, FP32, as in `flywheel.attention`.
        rotary: rotate the queries first; tables or positions are those of the packed tokens.  With a base alone a
            token's position is that of the key of its own sequence with which it is aligned.
        softmax: "static" or "online", as in `flywheel.attention`.
        return_lse: also return each row's log-sum-exp, natural log, FP32.
        return_max_logit: also return each head's largest logit over all rows and their visible keys, in nats, FP32.
        return_diagnostics: also return `RaggedDiagnostics`.
        batch_invariant: a sequence's results are the same, bit for bit, wherever it lies and whatever its neighbours
            are (for the same `config` and sizes of the token axes): blocks and fragments count from its own first
            token, and K and V are moved onto the 8-row grid first, which costs a pass over them.  By default they are
            the same within the bound.
        config: block sizes; chosen from the lengths of the token axes by default.
        interpret: run in one of Pallas' interpret modes (a machine without a TPU): True, or `pltpu.InterpretParams`.

    Returns:
        The output, BF16; a `RaggedOutput` if anything else is asked for.

    Numerical contract: that of `flywheel.attention`, row by row; docs/attention-contract.md.

    Source: "Flywheel Attention" (2026), section 3.1: tokens on sublanes, windows on the 8-row grid.

    Raises:
        TypeError: an operand or an option is not of its type.
        ValueError: ranks, shapes, head counts, head_dim, cumulative lengths, scale, window, softcap, rotary tables or
            block sizes break a rule that the message states.  Nothing is launched.
    """
    if scale is None and getattr(q, "ndim", 0) == _RANK and q.shape[2] > 0:
        scale = 1.0 / math.sqrt(q.shape[2])
    check_operands(q, k, v)
    check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q.shape[1], k.shape[1])
    check_flags(
        causal=causal,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        return_diagnostics=return_diagnostics,
        batch_invariant=batch_invariant,
    )
    check_softmax(softmax)
    rule = ScoreRule(check_scale(scale), check_softcap(softcap, scale))
    check_sinks(sinks, q.shape[0])
    check_rotary(rotary, q.shape[1], q.shape[2])
    left, right = _bounds(causal, window, q.shape[1], k.shape[1])
    tiling = resolve(
        config or RaggedConfig(),
        max(q.shape[1], k.shape[1]),
        q.shape[0],
        k.shape[0],
        online=softmax == "online",
    )
    sequences = cu_seqlens_q.shape[0] - 1
    stride = tiling.block - GROUP if batch_invariant else tiling.block
    queries = Packing(padded_tokens(q.shape[1]), sequences, stride, own_origin=batch_invariant, padding=True)
    spec = RaggedSpec(
        Geometry(queries, left, right, tiling),
        q.shape[0] // k.shape[0],
        q.shape[0],
        rule,
        online=softmax == "online",
        sinks=sinks is not None,
        rotary=None if rotary is None else rotary.layout,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        return_diagnostics=return_diagnostics,
        whole_copies=interpret is not True,
    )
    _check_room(spec, q.shape, v.shape[2])
    tables = (None, None, None) if rotary is None else (rotary.tables, rotary.positions, rotary.base)
    raw = _jitted(_Given(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, *tables[:2]), spec, tables[2], interpret)
    if not (return_lse or return_max_logit or return_diagnostics):
        return raw.out
    diagnostics = None
    if return_diagnostics:
        assert raw.replays is not None and raw.anchor is not None and raw.l is not None  # noqa: S101, PT018  asked for above
        diagnostics = RaggedDiagnostics(raw.replays, raw.anchor, raw.l)
    return RaggedOutput(raw.out, raw.lse, diagnostics, raw.max_logit)


class _Given(NamedTuple):
    """What a caller gave."""

    q: Array
    k: Array
    v: Array
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    sinks: Array | None
    tables: RotaryTables | None
    positions: Array | None


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _jitted(given: _Given, spec: RaggedSpec, base: float | None, interpret: Any) -> RawOutputs:  # noqa: ANN401  bool or InterpretParams
    q_tokens, head_dim = given.q.shape[1:]
    q_bounds = clean(given.cu_seqlens_q, q_tokens)
    k_bounds = clean(given.cu_seqlens_k, given.k.shape[1])
    k, v, keys = _padded(given.k, 1), _padded(given.v, 1), Keys(k_bounds[:-1], k_bounds[1:])
    if spec.geometry.queries.own_origin:
        k, v, keys = _on_grid(given.k, given.v, keys)
    operands = Operands(_padded(given.q, 1), k, v, q_bounds, keys, given.sinks)
    tables, positions = given.tables, given.positions
    if spec.rotary is not None:
        if tables is None:
            assert base is not None  # noqa: S101  check_rotary refuses its absence
            aligned = _aligned(q_bounds, k_bounds, q_tokens) if positions is None else positions
            tables = rotary_tables(aligned, head_dim, base)
        cos, sin = expand_tables(RotaryTables(*tables), spec.rotary)
        operands = operands._replace(cos=_padded(cos[0], 0), sin=_padded(sin[0], 0))
    raw = call(operands, spec=spec, interpret=interpret)
    rows = {
        name: x[:, :q_tokens] for name, x in raw._asdict().items() if x is not None and name not in ("replays", "out")
    }
    if raw.out.shape[1] != q_tokens:
        rows["out"] = raw.out[:, :q_tokens]
    raw = raw._replace(**rows)
    if raw.max_logit is None:
        return raw
    return raw._replace(max_logit=largest_or_nan(raw.max_logit, axis=1)[..., 0])


def _on_grid(k: Array, v: Array, keys: Keys) -> tuple[Array, Array, Keys]:
    """K and V with every sequence beginning on the 8-row grid."""
    sequences = keys.begin.shape[0]
    tokens = padded_tokens(k.shape[1]) + GROUP * sequences
    if not sequences:
        return _padded(k, 1), _padded(v, 1), keys
    lengths = keys.end - keys.begin
    ends = jnp.cumsum(snap(lengths + (GROUP - 1)), dtype=jnp.int32)
    begins = ends - snap(lengths + (GROUP - 1))
    row = jnp.asarray(np.arange(tokens, dtype=np.int32))
    sequence = jnp.minimum(jnp.searchsorted(ends, row, side="right", method="compare_all"), sequences - 1)
    source = jnp.minimum(row + (keys.begin - begins)[sequence], k.shape[1] - 1)
    k, v = (jnp.take(x, source, axis=1, mode="clip") for x in (k, v))
    return k, v, Keys(begins, begins + lengths)


def _padded(x: Array, axis: int) -> Array:
    """Zeros up to the next multiple of 8 tokens."""
    missing = padded_tokens(x.shape[axis]) - x.shape[axis]
    return x if not missing else jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)])


def _aligned(q_bounds: Array, k_bounds: Array, tokens: int) -> Array:
    """For each token the number of the key of its own sequence that it is aligned with; at least 0."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(q_bounds[1:], token, side="right", method="compare_all")
    sequence = jnp.minimum(sequence, max(q_bounds.shape[0] - 2, 0))
    if q_bounds.shape[0] == 1:
        return jnp.zeros_like(token)
    offset = jnp.diff(k_bounds) - q_bounds[1:]
    return jnp.maximum(token + offset[sequence], 0)


def _bounds(
    causal: bool,  # noqa: FBT001  as the caller gives it
    window: tuple[int | None, int | None] | None,
    q_tokens: int,
    k_tokens: int,
) -> tuple[int | None, int | None]:
    """Keys before and after its aligned one that a row sees; a bound that hides nothing is None."""
    left, right = check_window(window)
    if causal:
        right = 0
    left = None if left is None or left >= k_tokens - 1 else left
    right = None if right is None or (right >= q_tokens - 1 and right > 0) else right
    return left, right


def _check_room(spec: RaggedSpec, shape: tuple[int, ...], v_dim: int) -> None:
    """Refuse what the chip has no room for."""
    tiling: Tiling = spec.tiling
    need = vmem_bytes(tiling, shape[2], v_dim, rotary=spec.rotary is not None)
    rows = row_bytes(tiling, shape[1], len(spec.row_values))
    if need + rows > VMEM_LIMIT:
        message = (
            f"config and q need {need + rows} bytes of VMEM at head_dim {shape[2]}, v_dim {v_dim} and {shape[1]} "
            f"tokens, {rows} of them for values per row; the budget is {VMEM_LIMIT}: {tiling}"
        )
        raise ValueError(message)
