"""The tile's maths alone: convolution, activations, gates and one tile of the delta rule, against exact values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.gdn import residual, tile
from flywheel.gdn.products import (
    Track,
    dot,
    dot_shared,
    dot_short,
    interleave,
    keep,
    kept,
    lockstep,
    multiply,
    parts,
    split,
    stack,
)
from verify.devices import BF16_UNIT_ROUNDOFF, CPU_INTERPRET
from verify.gdn import oracle_float64
from verify.gdn.cases import DECAYS, KEYS, GdnCase
from verify.gdn.contract import contract_bound
from verify.gdn.inverse_steps import PRECISIONS
from verify.gdn.problem import BF16, DeltaRuleProblem
from verify.subjects import gdn_ours

U = CPU_INTERPRET.unit_roundoff

STATE_TARGET = 1e-4
"""Relative Frobenius error of the state that `bf16x3` promises for beta <= 1 (docs/gdn-kernel.md)."""

SPLIT_UNIT = 2.0**-17
"""hi is off by half a spacing, 2^-8 of x's binade; lo, in the binade below that, by half of its own, 2^-17 of x's."""


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """BF16 numbers as FP32."""
    return rng.standard_normal(shape).astype(BF16).astype(np.float32)


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_both_convolutions_err_by_their_sums_alone(width: int) -> None:
    """On the vector unit and on the matrix unit, products of BF16 numbers are exact: gamma of the sum is all."""
    rng = np.random.default_rng(width)
    before, chunk, taps = bf16(rng, 64, 256), bf16(rng, 64, 256), bf16(rng, width, 256)
    bias = bf16(rng, 1, 256)
    rows = np.concatenate([before, chunk]).astype(np.float64)
    terms = [rows[64 - age : 128 - age] * taps[width - 1 - age] for age in range(width)]
    exact, size = sum(terms) + bias, sum(np.abs(t) for t in terms) + np.abs(bias)
    vector = tile.convolve(lambda age: jnp.asarray(rows[64 - age : 128 - age], jnp.float32), taps, bias)
    products = tile.convolve_by_products(*(jnp.asarray(x) for x in (chunk, before, taps, bias)))
    for found in (vector, products):
        room = (np.expm1((2 * width + 1) * U)) * size
        assert (np.abs(np.asarray(found, np.float64) - exact) <= room).all()


def test_selector_picks_one_row_per_tap() -> None:
    """The selector is constant, 0/1, with one 1 per row and tap."""
    pick = np.asarray(tile.selector(4)).reshape(64, 4, 64)
    assert set(np.unique(pick)) == {0.0, 1.0}
    assert (pick.sum(axis=2) == 1.0).all()


def test_three_pieces_are_exact() -> None:
    """Every FP32 log-decay of normal size is the sum of its three BF16 pieces."""
    rng = np.random.default_rng(0)
    g = (-np.exp(rng.uniform(-20, 5, (3, 128)))).astype(np.float32)
    words = tile.gates(jnp.ones((3, 128)), jnp.asarray(g)).words
    pieces = [(np.asarray(w).astype(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64) for w in words]
    halves = [(np.asarray(w).astype(np.uint32) << 16).view(np.float32) for w in words]
    assert np.array_equal(sum(pieces), np.maximum(g, tile.LEAST_LOG_DECAY).astype(np.float64))
    assert all(np.array_equal(a, b) for a, b in zip(pieces, halves, strict=True))


@pytest.mark.parametrize("reset", [-np.inf, -1e30, -700.0])
def test_a_reset_leaves_its_neighbours_their_digits(reset: float) -> None:
    """Segments that contain a reset vanish; all others are sums of their own terms, to FP32's rounding of these."""
    rng = np.random.default_rng(1)
    g = -(10.0 ** rng.uniform(-8, 0, (1, 128))).astype(np.float32)
    g[0, [20, 100]] = reset
    found = tile.gates(jnp.ones((1, 128)), jnp.asarray(g))
    rows = jax.jit(tile.segment_rows)(found.words, tile.up_to_row())
    sums = np.asarray(multiply(rows, tile.segment_weights()), np.float64)
    for c in range(2):
        own = np.maximum(g[0, 64 * c : 64 * c + 64].astype(np.float64), tile.LEAST_LOG_DECAY)
        i, j = np.indices((64, 64))
        total = np.concatenate([[0.0], np.cumsum(own)])
        exact = np.where(i >= j, total[i + 1] - total[j + 1], 0.0)
        plain = np.where((i >= j), np.isfinite(own).all(), True)
        got = sums[:, 64 * c : 64 * c + 64]
        size = np.where(i >= j, np.abs(exact), 0.0)
        # Every term comes in PIECES, one sum after another; total itself errs by 2^-53 of up to 400.
        room = np.expm1((tile.PIECES * 64 + 2) * U) * size + 2.0**-42
        assert (np.abs(got - exact)[plain] <= room[plain]).all()
        assert not got[i < j].any()
        hit = (i >= 20 + 16 * c) & (j < 20 + 16 * c)
        assert not np.exp(got[hit].astype(np.float32)).any()
    assert np.isfinite(np.asarray(found.from_start)).all()


def test_log_decay_at_its_ends() -> None:
    """A large a_log with a small softplus does not overflow; infinite logits give decays of exactly 1 and 0."""
    a = jnp.asarray([[-120.0, -jnp.inf, jnp.inf, 0.0, -20.0]], jnp.float32)
    g = np.asarray(tile.log_decay(a, jnp.full((1, 5), 100.0), jnp.zeros((1, 5))), np.float64)[0]
    # Both exponents are exact: a_log + a = -20, and ln softplus(x) is x below FAR.
    of_exp, of_log = CPU_INTERPRET.exp_relative, CPU_INTERPRET.log_relative
    assert abs(g[0] + np.exp(-20.0)) <= of_exp * np.exp(-20.0)
    assert g[1] == 0.0
    assert g[2] == -np.inf
    small = np.asarray(tile.log_decay(a, jnp.zeros((1, 5)), jnp.zeros((1, 5))), np.float64)[0]
    # log1p(1) as a logarithm near 2, then ln of it, whose absolute error is a relative one of the exponential.
    of_softplus = of_log + CPU_INTERPRET.log_absolute / np.log(2.0)
    of_its_log = of_log * abs(np.log(np.log(2.0))) + CPU_INTERPRET.log_absolute
    assert abs(small[3] + np.log(2.0)) <= np.expm1(of_softplus + of_its_log + of_exp) * np.log(2.0)
    assert abs(small[4] + np.log1p(np.exp(-20.0))) <= (of_exp + np.exp(-20.0)) * np.exp(-20.0)


def test_norm_of_zero_and_epsilon() -> None:
    """The zero vector stays zero without an epsilon; an epsilon stands on the sum, inside the root."""
    assert not np.asarray(tile.l2norm(jnp.zeros((8, 128)), 0.0)).any()
    found = np.asarray(tile.l2norm(jnp.full((8, 128), 1e-4), 1e-6))
    x, eps = float(np.float32(1e-4)), float(np.float32(1e-6))
    exact = x / np.sqrt(128 * x * x + eps)
    # 128 squares, their sum and eps under the root; the root; two products.
    room = np.expm1(129 * U / 2 + CPU_INTERPRET.rsqrt_relative + 2 * U) * exact
    assert (np.abs(found.astype(np.float64) - exact) <= room).all()


def test_silu_of_twice() -> None:
    """silu, with an absolute error on the left."""
    y = np.linspace(-30, 30, 4001).astype(np.float32)
    exact = y / (1 + np.exp(-y.astype(np.float64)))
    found = np.asarray(tile.silu_of_twice(jnp.asarray(0.5 * y)), np.float64)
    # |tanh| <= 1; the product and the sum, which is at most twice as large, are rounded once each.
    room = (CPU_INTERPRET.tanh_relative + CPU_INTERPRET.tanh_absolute + 3 * U) * np.abs(y) / 2
    assert (np.abs(found - exact) <= room + CPU_INTERPRET.smallest_normal).all()


RULES = {"bf16": tile.delta_rule_tile, "bf16x3": residual.delta_rule_tile}


def run_tiles(problem: DeltaRuleProblem, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and final state of one sequence of one head, tile by tile."""
    assert problem.g is not None
    q, k, v = problem.q[:, 0].astype(np.float32) * problem.scale, problem.k[:, 0], problem.v[:, 0]
    state, outs = jnp.asarray(problem.state[0, 0]), []
    for start in range(0, problem.tokens, tile.TILE):
        here = slice(start, start + tile.TILE)
        out, state = RULES[precision](
            *(jnp.asarray(x[here], jnp.float32) for x in (q, k, v)),
            *(jnp.asarray(x[here, 0]) for x in (problem.beta, problem.g)),
            state,
        )
        outs.append(np.asarray(out, np.float64))
    return np.concatenate(outs), np.asarray(state, np.float64)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("keys", "beta", "decay"), [("random", "up to 1", "mild"), ("identical", "1", "0")])
def test_one_tile_of_the_delta_rule(precision: str, keys: str, beta: str, decay: str) -> None:
    """Outputs and state of 128 tokens lie within the contract."""
    problem = GdnCase(keys, beta, decay, seed=1, lengths=(128,), heads=(1, 1, 128, 128)).rule()
    exact = oracle_float64.gdn_chunked(problem)
    out, state = run_tiles(problem, precision)
    bound = contract_bound(problem, gdn_ours.steps(precision), CPU_INTERPRET)
    pairs = ((out, exact.out[:, 0], bound.out[:, 0]), (state, exact.state[0, 0], bound.state[0, 0]))
    for found, want, room in pairs:
        assert np.isfinite(room).all()
        assert (np.abs(found - want) <= room).all()


UP_TO_1 = ("up to 1", "1", "constant", "tiny or 1")
"""Families of write strengths of at most 1."""


def state_error(case: GdnCase, precision: str) -> float:
    """Relative Frobenius error of the final state."""
    problem = case.rule()
    exact = oracle_float64.gdn_chunked(problem).state[0, 0]
    return float(np.linalg.norm(run_tiles(problem, precision)[1] - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("keys", KEYS)
def test_split_states_meet_their_target(keys: str) -> None:
    """With hi/lo products the state after 128 tokens is within its target on every family of keys, without decay."""
    case = GdnCase(keys, "up to 1", "0", seed=1, lengths=(128,), heads=(1, 1, 128, 128))
    assert state_error(case, "bf16x3") <= STATE_TARGET


@pytest.mark.deep
@pytest.mark.parametrize("keys", KEYS)
def test_split_states_meet_their_target_everywhere(keys: str) -> None:
    """The same for every family of write strengths up to 1 and of decays, after 512 tokens, three draws each."""
    for beta in UP_TO_1:
        for decay in DECAYS:
            for seed in range(3):
                case = GdnCase(keys, beta, decay, seed=seed, lengths=(512,), heads=(1, 1, 128, 128))
                assert state_error(case, "bf16x3") <= STATE_TARGET, case.name


def test_a_small_residual_beside_a_large_state() -> None:
    """A state of 2^10, values that it predicts up to 2^-2: hi/lo products write that residual, not its rounding.

    The state read as one BF16 number errs by up to 2 there: the contract of `bf16` promises nothing about the residual,
    which vanishes.
    """
    rng = np.random.default_rng(7)
    state = (rng.integers(2**19, 2**20, (128, 128)) / 2.0**10).astype(np.float32)  # sums with the change are exact
    change = 2.0**-2 * rng.choice([-1.0, 1.0], (128, 128))
    base = GdnCase("random", "1", "0", seed=1, lengths=(128,), heads=(1, 1, 128, 128)).rule()
    keys = np.eye(128, dtype=np.float32)[:, None]
    problem = dataclasses.replace(
        base,
        k=keys.astype(base.k.dtype),
        v=(state + change).astype(np.float32)[:, None],
        beta=np.ones((128, 1), np.float32),
        g=np.zeros((128, 1), np.float32),
        state=state[None, None],
    )
    exact = oracle_float64.gdn_chunked(problem).state[0, 0]
    assert np.array_equal(exact - state, change)
    for precision, written in (("bf16x3", True), ("bf16", False)):
        bound = contract_bound(problem, gdn_ours.steps(precision), CPU_INTERPRET).state[0, 0]
        found = run_tiles(problem, precision)[1]
        assert (np.abs(found - exact) <= bound).all()
        assert (bound < np.abs(change)).all() == written
        assert (np.sign(found - state) == np.sign(change)).all() == written


def test_hi_lo_operands() -> None:
    """hi + lo holds 16 bits, and a product errs by its operands and sums alone."""
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal((16, 16)).astype(np.float32) for _ in range(2))
    high, low = (np.asarray(part, np.float64) for part in split(jnp.asarray(x)))
    assert (np.abs(high + low - x) <= SPLIT_UNIT * np.abs(x)).all()
    of_x, of_y = (parts(jnp.asarray(z), "bf16x3") for z in (x, y))
    found = np.asarray(dot(of_x, of_y), np.float64)
    # Both operands off by SPLIT_UNIT; the low columns' sum joins the high ones'.
    room = (2.0 * SPLIT_UNIT + SPLIT_UNIT**2 + np.expm1(33 * U)) * (np.abs(x) @ np.abs(y).astype(np.float64))
    assert (np.abs(found - x.astype(np.float64) @ y) <= room).all()
    two = stack(of_x, of_y, axis=0)
    assert np.array_equal(dot(two, of_y)[:16], dot(of_x, of_y))


@pytest.mark.parametrize("memory", [((16, 128), jnp.bfloat16), ((8, 128), jnp.int32)])
def test_kept_parts_come_back_as_they_were(memory: tuple[tuple[int, int], Any]) -> None:
    """In memory of BF16, and of 32-bit words."""

    def kernel(x: Any, high: Any, low: Any, ref: Any) -> None:
        keep(ref, split(x[...]))
        high[...], low[...] = kept(ref)

    x = np.random.default_rng(4).standard_normal((16, 128)).astype(np.float32)
    shape, dtype = memory
    found = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)] * 2,
        scratch_shapes=[pltpu.VMEM((2, *shape), dtype)],
        interpret=True,
    )(x)
    for a, b in zip(found, split(jnp.asarray(x)), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("rows", [48, 64])
def test_products_of_pairs_err_by_their_operands_and_sums(rows: int) -> None:
    """With few rows, which are stacked and leave lo x lo out, and with more."""
    rng = np.random.default_rng(rows)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 128), (128, 128)))
    found = np.asarray(dot(*(parts(jnp.asarray(z), "bf16x3") for z in (x, y))), np.float64)
    lost = 2.0 * SPLIT_UNIT + BF16_UNIT_ROUNDOFF**2  # both operands' ends, and lo x lo
    room = (lost + np.expm1(3 * 128 * U)) * (np.abs(x) @ np.abs(y).astype(np.float64))
    assert (np.abs(found - x.astype(np.float64) @ y) <= room).all()


def test_short_products() -> None:
    """Two chunks' matrices over 64 terms, alone and with several rights, of which the odd one is left over."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((128, 128)).astype(np.float32)
    rights = [rng.standard_normal((64, 128)).astype(np.float32) for _ in range(3)]
    of_rights = [parts(jnp.asarray(y), "bf16x3") for y in rights]
    lefts = jax.jit(lambda z: residual.short(parts(z, "bf16x3")))(x)
    for c, left in enumerate(lefts):
        for found, y in zip(
            (dot_short(left, of_rights[0]), *dot_shared(left, of_rights)), (rights[0], *rights), strict=True
        ):
            of_x = x[:, 64 * c : 64 * c + 64].astype(np.float64)
            room = (2.0 * SPLIT_UNIT + SPLIT_UNIT**2 + np.expm1(4 * 64 * U)) * (np.abs(of_x) @ np.abs(y))
            assert (np.abs(np.asarray(found, np.float64) - of_x @ y) <= room).all()


def test_emission_order() -> None:
    """Tracks give all their pieces, spread evenly over their rounds, and chains in lockstep alternate."""
    seen: list[str] = []

    def chain(name: str, pieces: int) -> object:
        for _ in range(pieces):
            seen.append(name)
            yield
        return name

    interleave([Track([chain("a", 4)], 4, 0, 3), Track([chain("b", 2)], 2, 2, 3), Track([chain("c", 3)], 1, 0, 0)])  # type: ignore[list-item]
    assert seen == ["a", "c", "a", "a", "b", "a", "b", "c", "c"]
    seen.clear()
    assert lockstep([chain("x", 2), chain("y", 1)]) == ["x", "y"]  # type: ignore[list-item]
    assert seen == ["x", "y", "x"]
