"""The contract of an FP32 kernel: good kernels pass at long context, rounded frequencies and positions do not."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from verify.attention.problem import BF16
from verify.devices import CPU_INTERPRET
from verify.rotary import oracle_float64
from verify.rotary.contract import FP32_UNIT, contract
from verify.rotary.problem import RotaryProblem

POSITIONS = np.array([0, 1, 255, 256, 257, 4095, 131071, 524287, 1048576])
"""Those of the public report, and the ends."""

BASES = (1e4, 1e5, 1e7)


def ones(base: float, **options: object) -> RotaryProblem:
    """The report's input: 128 lanes of ones."""
    return RotaryProblem(np.ones((1, 1, len(POSITIONS), 128), dtype=np.float32), POSITIONS, base, **options)


def frequencies(base: float, width: int) -> np.ndarray:
    """Inverse frequencies in float64."""
    return base ** (-np.arange(0, width, 2) / width)


@functools.partial(jax.jit, static_argnames="interleaved")
def rotate(x: jax.Array, positions: jax.Array, inverse_frequencies: jax.Array, *, interleaved: bool) -> jax.Array:
    """An FP32 rotation as models write it."""
    phase = positions[:, None].astype(jnp.float32) * inverse_frequencies
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    half = x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    one, two = first * cos - second * sin, second * cos + first * sin
    return jnp.stack([one, two], -1).reshape(x.shape) if interleaved else jnp.concatenate([one, two], -1)


def run(problem: RotaryProblem, table: np.ndarray, positions: np.ndarray = POSITIONS) -> np.ndarray:
    """The FP32 rotation with a table of inverse frequencies."""
    interleaved = problem.layout == "interleaved"
    return np.asarray(
        rotate(problem.x.astype(np.float32), positions, table.astype(np.float32), interleaved=interleaved)
    )


def reciprocal_of_power(base: float) -> np.ndarray:
    """Inverse frequencies computed in FP32, as most models do."""
    return np.asarray(1.0 / (jnp.float32(base) ** (jnp.arange(0, 128, 2, dtype=jnp.float32) / 128)))


def test_first_components_at_4095() -> None:
    """cos - sin of pairs 0..3 at position 4095, base 1e4, to the digits of the public report."""
    case = ones(1e4)
    row = oracle_float64.rotate(case).out[0, 0, POSITIONS.tolist().index(4095)]
    assert np.round(row[:4], 8).tolist() == [0.93184521, -1.41236059, 0.90603980, -0.85022096]
    interleaved = oracle_float64.rotate(dataclasses.replace(case, layout="interleaved")).out[0, 0, 5]
    assert np.array_equal(interleaved[0:8:2], row[:4])


def test_neighbouring_positions_differ() -> None:
    """256 and 257, which BF16 cannot tell apart, rotate differently, by far more than the bounds."""
    found = oracle_float64.rotate(ones(1e4))
    bound = contract(ones(1e4), CPU_INTERPRET)
    moved = np.abs(found.out[0, 0, 4] - found.out[0, 0, 3])
    assert np.max(moved / (bound.out[0, 0, 3] + bound.out[0, 0, 4])) > 1000


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_an_fp32_kernel_passes_everywhere(base: float, layout: str) -> None:
    """A rotation all in FP32 keeps the contract at every position up to 2^20, in both layouts."""
    case = ones(base, layout=layout)
    bound, reference = contract(case, CPU_INTERPRET), oracle_float64.rotate(case)
    for table in (reciprocal_of_power(base), frequencies(base, 128)):
        assert bound.admits(run(case, table), reference).all()


@pytest.mark.parametrize("base", BASES)
def test_a_rounded_table_keeps_the_tighter_contract(base: float) -> None:
    """A kernel whose frequencies are correctly rounded may declare so, and keeps the smaller bound."""
    case = ones(base)
    tight = contract(case, CPU_INTERPRET, frequency_error=FP32_UNIT)
    assert np.all(tight.out <= contract(case, CPU_INTERPRET).out)
    assert tight.admits(run(case, frequencies(base, 128)), oracle_float64.rotate(case)).all()


def test_frequencies_by_a_rounded_logarithm_are_caught() -> None:
    """exp(-log(base) i / d) in FP32 errs by more than the contract allows by default, and by what it can declare."""
    exponents = jnp.arange(0, 128, 2, dtype=jnp.float32) / 128
    table = np.asarray(jnp.exp(-jnp.log(jnp.float32(1e5)) * exponents))
    case, reference = ones(1e5), oracle_float64.rotate(ones(1e5))
    error = np.max(np.abs(table / frequencies(1e5, 128) - 1.0))
    assert error > 2 * FP32_UNIT
    got = run(case, table)
    assert contract(case, CPU_INTERPRET, frequency_error=error * 1.001).admits(got, reference).all()
    assert not contract(case, CPU_INTERPRET).admits(got, reference).all()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("position", [257, 4095, 131071, 524287])
def test_bf16_frequencies_are_caught(base: float, position: int) -> None:
    """Inverse frequencies rounded to BF16 miss the contract at each of these positions alone."""
    index = POSITIONS.tolist().index(position)
    case = ones(base)
    got = run(case, frequencies(base, 128).astype(BF16))
    admitted = contract(case, CPU_INTERPRET).admits(got, oracle_float64.rotate(case))
    assert not admitted[0, 0, index].all()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("position", [257, 4095, 131071, 524287])
def test_bf16_positions_are_caught(base: float, position: int) -> None:
    """Positions rounded to BF16 (257 becomes 256) miss the contract at each of these positions alone."""
    index = POSITIONS.tolist().index(position)
    case = ones(base)
    got = run(case, frequencies(base, 128), POSITIONS.astype(BF16).astype(np.int32))
    admitted = contract(case, CPU_INTERPRET).admits(got, oracle_float64.rotate(case))
    assert not admitted[0, 0, index].all()


def test_bf16_tables_are_caught() -> None:
    """Cosine and sine rounded to BF16 miss the contract even at position 1."""
    case = ones(1e4)
    phase = POSITIONS[:, None] * frequencies(1e4, 128)
    cos, sin = (f(phase).astype(BF16).astype(np.float32) for f in (np.cos, np.sin))
    got = np.concatenate([cos - sin, cos + sin], axis=-1)[None, None]
    assert not contract(case, CPU_INTERPRET).admits(got, oracle_float64.rotate(case))[0, 0, 1].all()


@pytest.mark.parametrize(("base", "seen"), [(1e4, 3.7e-3), (1e7, 8.3e-3)])
def test_the_bound_at_524287_is_neither_below_good_kernels_nor_far_above(base: float, seen: float) -> None:
    """In cosine the bound covers what a correct FP32 phase errs by there, and is at most 20 times that."""
    x = np.zeros((1, 1, 1, 128), dtype=np.float32)
    x[..., :64] = 1.0  # the first lane of each pair comes out as the cosine
    case = RotaryProblem(x, np.array([524287]), base)
    bound = contract(case, CPU_INTERPRET, frequency_error=FP32_UNIT).out[0, 0, 0, :64]
    table = frequencies(base, 128).astype(np.float32)
    phase = (np.float32(524287) * table).astype(np.float64)
    with mpmath.workdps(30):
        exact = [float(mpmath.cos(524287 * mpmath.power(base, mpmath.mpf(-i) / 64))) for i in range(64)]
    error = np.abs(np.cos(phase) - exact)
    assert seen <= error.max() < 1.02 * seen
    assert np.all(error <= bound)
    assert bound.max() < 20 * seen


def test_phase_error_grows_with_the_position() -> None:
    """The allowed phase error of pair 0 is proportional to position * 2^-24, and 0 at position 0."""
    phase = contract(ones(1e4), CPU_INTERPRET).phase[0, :, 0]
    assert phase[0] == 0.0
    share = phase[1:] / (POSITIONS[1:] * FP32_UNIT)
    assert share.min() >= 2.5
    assert share.max() <= 3.001


def test_a_bf16_result_may_be_rounded_once_more() -> None:
    """BF16 in and out: the FP32 rotation rounded to BF16 passes, at every position."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, 1, len(POSITIONS), 128)).astype(BF16)
    case = RotaryProblem(x, POSITIONS, 1e4)
    got = run(case, frequencies(1e4, 128)).astype(BF16)
    assert contract(case, CPU_INTERPRET).admits(got, oracle_float64.rotate(case)).all()
    strict = contract(case, CPU_INTERPRET, out_dtype=np.dtype(np.float32))
    assert not strict.admits(got, oracle_float64.rotate(case)).all()


def test_lanes_that_are_not_rotated_pass_exactly() -> None:
    """With rotary_dim below head_dim, the other lanes have a bound of 0."""
    bound = contract(ones(1e4, rotary_dim=64), CPU_INTERPRET)
    assert np.all(bound.out[..., 64:] == 0.0)
    assert np.all(bound.out[:, :, 1:, :64] > 0.0)


def test_undefined_pairs_admit_anything() -> None:
    """A NaN input promises nothing for its pair, and everything for the others."""
    case = ones(1e4)
    x = case.x.copy()
    x[0, 0, 1, 3] = np.nan
    case = dataclasses.replace(case, x=x)
    got = run(case, frequencies(1e4, 128)).copy()
    bound, reference = contract(case, CPU_INTERPRET), oracle_float64.rotate(case)
    assert bound.admits(got, reference).all()
    got[0, 0, 1, 4] = np.nan
    assert np.argwhere(~bound.admits(got, reference)).tolist() == [[0, 0, 1, 4]]


def test_the_envelope_of_the_device_is_charged() -> None:
    """A machine with wider cosine and sine gets a wider bound, by what its model says; position 0 is charged it too."""
    wide = dataclasses.replace(CPU_INTERPRET, cos_absolute=CPU_INTERPRET.cos_absolute + 2.0**-10)
    case = ones(1e4)
    more = contract(case, wide).out - contract(case, CPU_INTERPRET).out
    assert more == pytest.approx(np.full(more.shape, 2.0**-10), rel=2.0**-10)


def test_unknown_types_are_refused() -> None:
    """Another output type and another shape are named."""
    with pytest.raises(ValueError, match="out_dtype must be bfloat16 or float32, got float16"):
        contract(ones(1e4), CPU_INTERPRET, out_dtype=np.dtype(np.float16))
    bound = contract(ones(1e4), CPU_INTERPRET)
    with pytest.raises(ValueError, match=r"got must have shape \(1, 1, 9, 128\), got \(1, 9, 128\)"):
        bound.admits(np.zeros((1, 9, 128)), oracle_float64.rotate(ones(1e4)))


def test_a_subnormal_lane_may_pass_or_become_zero() -> None:
    """Of lanes that are not rotated: the number as it is and zero keep the contract, a normal number does not."""
    x = np.array([1.0, 2.0, 2.0**-130, 3.0], np.float32).reshape(1, 1, 1, 4)
    case = RotaryProblem(x, np.array([0]), rotary_dim=2)
    bound, reference = contract(case, CPU_INTERPRET), oracle_float64.rotate(case)
    for kept in (2.0**-130, 0.0):
        got = x.copy()
        got[..., 2] = kept
        assert bound.admits(got, reference).all()
    got[..., 2] = 2.0**-120
    assert not bound.admits(got, reference)[0, 0, 0, 2]
