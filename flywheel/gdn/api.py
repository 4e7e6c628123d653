"""The public functions: from what a caller passes to one launch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from flywheel.gdn.checks import (
    check_beta,
    check_heads,
    check_layer,
    check_lower,
    check_options,
    check_precision,
    check_sequences,
)
from flywheel.gdn.inverse import CHUNK, invert_batch
from flywheel.gdn.kernel import Operands, call
from flywheel.gdn.schedule import MOST_TOKENS, sequences_operand
from flywheel.gdn.spec import HEAD_DIM, GdnSpec
from flywheel.gdn.tile import TILE
from flywheel.gdn.tiling import group_of
from flywheel.packing import Packing, padded_tokens

if TYPE_CHECKING:
    from jax import Array
    from jax.experimental.pallas import tpu as pltpu
    from jaxtyping import BFloat16, Bool, Float, Float32, Int32

    from flywheel.gdn.products import Precision


def triangular_inverse(
    l: Float32[Array, "*batch 64 64"],  # noqa: E741  the matrix's name
    *,
    beta: Float32[Array, "*batch 64"] | None = None,
    precision: Precision = "bf16",
    interpret: bool | pltpu.InterpretParams = False,
) -> Float32[Array, "*batch 64 64"]:
    """(I + l)^-1 of strictly lower triangular matrices, each in eight products on the matrix unit.

    Bottom-up 4 -> 16 -> 64 (Flywheel Attention, section 3.2; the levels stand in `inverse`).  The diagonal is exactly 1
    and the upper triangle exactly 0.  Matrices of a batch do not touch each other.

    Args:
        l: FP32, the lower triangle that is inverted with a unit diagonal: beta_i (k_i . k_j) exp(g_(j+1) + .. + g_i) in
            the delta rule.
        beta: the write strengths that went into each row of `l`, if they are to be checked: `bf16` is refused above 1.
        precision: "bf16": operands of products rounded to BF16.  "bf16x3": operands as hi/lo pairs of BF16, three
            passes of the matrix unit per product.
        interpret: Pallas' interpret mode.

    Error: |found - exact| is within the a-priori bound of docs/gdn-inverse-contract.md, computed from `l` alone
    (InverseSteps(precision, "add")).  The worst errors that searches have found stand in docs/gdn-kernel.md.

    Traced arguments are not looked at before the launch: entries on and above the diagonal of `l` are then ignored, a
    non-finite entry below makes that matrix NaN below its diagonal, and so does a beta above 1 (or NaN) in `bf16`.

    Raises:
        TypeError: `l` or `beta` is not FP32.
        ValueError: a shape, an unknown precision, `l` not strictly lower triangular and finite, or beta above 1 in
            `bf16`.
    """
    check_precision(precision)
    check_lower(l)
    check_beta(beta, l, precision)
    strict = jnp.tril(jnp.ones((CHUNK, CHUNK), jnp.bool_), -1)
    lower = jnp.where(strict, l, 0.0)
    sound = jnp.isfinite(lower).all(axis=(-2, -1), keepdims=True)
    flat = jnp.where(sound, lower, 0.0).reshape(-1, CHUNK, CHUNK)
    found = invert_batch(flat, precision, interpret).reshape(l.shape)
    if beta is not None and precision == "bf16":
        sound = sound & (beta <= 1.0).all(axis=-1)[..., None, None]
    return jnp.where(sound | ~strict, found, jnp.nan)


class GdnOutput(NamedTuple):
    """The result of `fused_conv1d_gdn`.

    Attributes:
        out: outputs, packed as the tokens came; rows of no sequence are 0.
        conv_state: the cache after the call.
        recurrent_state: the cache after the call.
    """

    out: BFloat16[Array, "tokens n_v_x_d_v"]
    conv_state: BFloat16[Array, "slots width_minus_1 dim"]
    recurrent_state: Float32[Array, "slots n_v d_k d_v"]


def fused_conv1d_gdn(
    qkv: BFloat16[Array, "tokens dim"],
    b: Float[Array, "tokens n_v"],
    a: Float[Array, "tokens n_v"],
    conv_state: BFloat16[Array, "slots width_minus_1 dim"],
    recurrent_state: Float32[Array, "slots n_v d_k d_v"],
    conv_weight: Float[Array, "width dim"],
    conv_bias: Float[Array, " dim"] | None,
    a_log: Float32[Array, " n_v"],
    dt_bias: Float32[Array, " n_v"],
    *,
    query_start_loc: Int32[Array, " sequences_plus_1"],
    state_indices: Int32[Array, " sequences"],
    has_initial_state: Bool[Array, " sequences"],
    read_state_indices: Int32[Array, " sequences"] | None = None,
    n_kq: int,
    n_v: int,
    scale: float | None = None,
    norm_eps: float | None = 1e-6,
    beta_scale: float = 1.0,
    activation: str = "silu",
    precision: Precision = "bf16",
    interpret: bool | pltpu.InterpretParams = False,
) -> GdnOutput:
    """Gated DeltaNet prefill of packed sequences: convolution, silu, l2norm, gates and delta rule in one kernel.

        y_t  = bias + sum_j conv_weight_j x_(t - width + 1 + j)        z = silu(y)
        q, k = z / sqrt(sum_d z_d^2 + norm_eps)  per head              v = z
        beta = beta_scale sigmoid(b)                                   g = -exp(a_log) softplus(a + dt_bias), nats
        S_t  = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) S_(t-1)^T k_t))^T           o_t = scale S_t^T q_t

    (Gated Delta Networks, arXiv:2412.06464; the kernel's form is Flywheel Attention, section 3.2.)  Value head h reads
    query/key head h // (n_v / n_kq); g = -inf is a hard reset.  docs/gdn-semantics.md has the edges.

    Args:
        qkv: the projection in its native layout: queries, keys, values, head by head; dim = (2 n_kq + n_v) 128.  A
            multiple of 8 tokens is read in place, another number is padded first (a copy).
        b: logits of beta, BF16 or FP32.
        a: what the log-decay is made from, BF16 or FP32.
        conv_state: for each slot the last width - 1 rows of qkv, oldest first.  Donate both caches under `jit`: they
            are updated in place.
        recurrent_state: for each slot the state, FP32.
        conv_weight: taps, oldest first, BF16 or FP32; width 2 to 8.
        conv_bias: of the convolution; None for none.
        a_log: see g.
        dt_bias: see g.
        query_start_loc: first token of each sequence, and the end of the last; from 0, never falling.  Lengths are
            traced: one compiled kernel serves all.  Sequences may be empty: then the state is handed on as it is.
        state_indices: slot that a sequence's state is written to; -1: it is not kept.
        has_initial_state: False: the sequence starts from zeros, and its slot is not read, whatever it holds.
        read_state_indices: slot that it is read from, `state_indices` by default; -1: zeros.  No sequence may read what
            another writes.
        n_kq: query and key heads.
        n_v: value heads, a multiple of n_kq, at most 128.
        scale: factor of the outputs, 1 / sqrt(d_k) by default.
        norm_eps: on the sum of squares, inside the root; None leaves queries and keys as they are.
        beta_scale: 2 for models that allow negative eigenvalues: use "bf16x3" for them.
        activation: "silu" or "none".
        precision: "bf16": operands of products, the state among them, rounded to BF16; the state itself is FP32
            throughout.  "bf16x3": operands as hi/lo pairs, but for products that reach the outputs alone, q k^T, q S
            and tril(q k^T D) V.
        interpret: Pallas' interpret mode.

    Error: docs/gdn-contract.md, ChunkSteps(InverseSteps(precision), precision, decay="pieces", snap=8, tile=128),
    with updates="residual" for "bf16x3": elementwise, for outputs and final states.  Slots that no sequence names keep
    their bits.

    Traced arguments are not looked at before the launch: bounds that fall or exceed the tokens make empty or shorter
    sequences (`flywheel.packing.clean`), and slots out of range count as -1.

    Raises:
        TypeError: an array or an option is not of its type.
        ValueError: shapes, head counts, width, options, bounds or slots break a rule that the message states.
    """
    heads = check_heads(n_kq, n_v)
    check_precision(precision)
    check_options(scale=scale, norm_eps=norm_eps, beta_scale=beta_scale, activation=activation)
    read = state_indices if read_state_indices is None else read_state_indices
    width = check_layer(heads, qkv, b, a, conv_state, recurrent_state, conv_weight, conv_bias, a_log, dt_bias)
    slots = recurrent_state.shape[0]
    check_sequences(qkv.shape[0], slots, query_start_loc, state_indices, read, has_initial_state)
    if qkv.shape[0] > MOST_TOKENS:
        message = f"qkv must have at most {MOST_TOKENS} tokens, got {qkv.shape[0]}"
        raise ValueError(message)
    spec = GdnSpec(
        Packing(padded_tokens(qkv.shape[0]), state_indices.shape[0], TILE, padding=True),
        qkv.shape[0],
        n_kq,
        n_v,
        group_of(n_kq, n_v, precision),
        width,
        precision,
        HEAD_DIM**-0.5 if scale is None else float(scale),
        None if norm_eps is None else float(norm_eps),
        float(beta_scale),
        silu=activation == "silu",
        bias=conv_bias is not None,
    )
    layer = (qkv, b, a, conv_state, recurrent_state, conv_weight, conv_bias, a_log, dt_bias)
    return _fused(layer, (query_start_loc, read, state_indices, has_initial_state), spec, interpret)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _fused(layer: tuple[Any, ...], sequences: tuple[Any, ...], spec: GdnSpec, interpret: Any) -> GdnOutput:  # noqa: ANN401
    qkv, b, a, conv_state, state, weight, bias, a_log, dt_bias = layer
    starts, read, write, has_initial = sequences
    tokens = qkv.shape[0]
    more = ((0, spec.packing.tokens - tokens), (0, 0))
    if more[0][1]:
        qkv, b, a = (jnp.pad(x, more) for x in (qkv, b, a))
    operands = Operands(
        sequences_operand(starts, read, write, has_initial),
        weight,
        None if bias is None else bias[None],
        a_log[None],
        dt_bias[None],
        qkv,
        b,
        a,
        conv_state,
        state,
    )
    out, conv_state, state = call(operands, spec=spec, interpret=interpret)
    return GdnOutput(out[:tokens], conv_state, state)
