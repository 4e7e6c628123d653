"""Balls: every operation encloses what it says, in exact arithmetic, underflow and overflow included."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.devices import CPU_INTERPRET, MODELS
from verify.enclosure.ball import Ball, concatenate, maximum, where
from verify.enclosure.machine import NUMPY, Machine
from verify.rounding import BF16, FORMATS, FP32, down, nearest, stochastic, up

NUMBERS = st.one_of(
    st.just(0.0),
    st.floats(-1e4, 1e4, allow_subnormal=True),
    st.floats(-1e-290, 1e-290, allow_subnormal=True),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
RADII = st.one_of(st.just(0.0), st.floats(0.0, 1e3), st.floats(0.0, 1e-300, allow_subnormal=True))


@st.composite
def balls(draw: st.DrawFn, n: int = 4) -> Ball:
    """A few elements."""
    mid = draw(st.lists(NUMBERS, min_size=n, max_size=n))
    rad = draw(st.lists(RADII, min_size=n, max_size=n))
    return Ball(np.array(mid), np.array(rad))


def ends(x: Ball, i: int) -> list[Fraction]:
    """Both ends and the middle of an element, exactly."""
    mid, rad = Fraction(float(x.mid[i])), Fraction(float(x.rad[i]))
    return [mid - rad, mid, mid + rad]


def encloses(found: Ball, i: int, value: Fraction) -> bool:
    """Exactly."""
    if np.isinf(found.rad[i]):
        return True
    return abs(value - Fraction(float(found.mid[i]))) <= Fraction(float(found.rad[i]))


@settings(deadline=None, max_examples=60)
@given(balls(), balls())
def test_elementwise_operations_enclose_the_ends(x: Ball, y: Ball) -> None:
    """Sum, difference and product of all ends and middles, in rational arithmetic."""
    for i in range(4):
        for a in ends(x, i):
            assert encloses(-x, i, -a)
            for b in ends(y, i):
                assert encloses(x + y, i, a + b)
                assert encloses(x - y, i, a - b)
                assert encloses(x * y, i, a * b)
                assert encloses(maximum(x, y), i, max(a, b))


@settings(deadline=None, max_examples=40)
@given(balls(6), balls(6), st.integers(0, 2**12))
def test_sums_and_matrix_products_enclose_corners(x: Ball, y: Ball, corner: int) -> None:
    """Of any corner of both boxes."""
    a = [ends(x, i)[2 * (corner >> i & 1)] for i in range(6)]
    b = [ends(y, i)[2 * (corner >> (6 + i) & 1)] for i in range(6)]
    assert encloses(x.sum(0).reshape(1), 0, sum(a, Fraction(0)))
    product = x.reshape(1, 6) @ y.reshape(6, 1)
    assert encloses(product.reshape(1), 0, sum((p * q for p, q in zip(a, b, strict=True)), Fraction(0)))
    assert encloses(x.max(0).reshape(1), 0, max(a))


def test_exact_elements_stay_exact() -> None:
    """Numbers without doubt keep none: zeros of a mask are zeros in every product and sum."""
    zero, some = Ball.exact(np.zeros(3)), Ball(np.ones(3), np.full(3, 0.5))
    assert (zero * some).is_zero.all()
    assert (zero + zero).is_zero.all()
    assert (zero.reshape(1, 3) @ some.reshape(3, 1)).is_zero.all()
    assert where(np.array([True, False, True]), zero, some).is_zero.tolist() == [True, False, True]
    assert concatenate([zero, some], 0).shape == (6,)


def test_what_is_not_finite_is_not_known() -> None:
    """An overflow, or an infinite radius, takes every number in; an exact zero does not hide it."""
    huge = Ball.exact(np.array([1e308]))
    assert np.isinf((huge + huge).rad).all()
    unknown = Ball(np.zeros(1), np.full(1, np.inf))
    for found in (
        unknown + huge,
        unknown * Ball.exact(np.zeros(1)),
        Ball.between(np.array([-np.inf]), np.array([1.0])),
    ):
        assert found.contains(np.array([np.nan])).all()
        assert found.contains(np.array([np.inf])).all()
    assert not Ball.exact(np.ones(1)).contains(np.array([np.nan])).any()


def test_intersections() -> None:
    """`cut` keeps what lies in both, and the ball itself where the other does not meet it."""
    x = Ball(np.zeros(2), np.full(2, 4.0))
    found = x.cut(np.array([1.0, 7.0]), np.array([2.0, 8.0]))
    assert found.contains(np.array([1.0, 0.0])).all()
    assert found.contains(np.array([2.0, 0.0])).all()
    assert not found.contains(np.array([0.5, 0.0]))[0]
    assert found.rad[1] == 4.0


@settings(deadline=None, max_examples=60)
@given(st.floats(-1e38, 1e38) | st.floats(-1e-36, 1e-36), st.sampled_from(sorted(FORMATS)))
def test_rounding_is_to_the_neighbours(x: float, name: str) -> None:
    """Nearest is one of `down` and `up`, which are numbers of the format on both sides; ties go to even."""
    to = FORMATS[name]
    value = np.array([x])
    low, high, near = down(value, to), up(value, to), nearest(value, to)
    assert low[0] <= x <= high[0]
    assert near[0] in (low[0], high[0])
    if np.isfinite([low[0], high[0]]).all():
        assert abs(near[0] - x) <= min(x - low[0], high[0] - x)
    drawn = stochastic(value, to, np.random.default_rng(0))
    assert drawn[0] in (low[0], high[0])
    assert nearest(near, to)[0] == near[0] or not np.isfinite(near[0])


def test_rounding_once() -> None:
    """1 + 2**-8 + 2**-40 rounds up in BF16; through FP32 it would be a tie, and go down."""
    assert nearest(np.array([1.0 + 2.0**-8 + 2.0**-40]), BF16)[0] == 1.0 + 2.0**-7
    assert nearest(np.array([1.0 + 2.0**-8]), BF16)[0] == 1.0
    assert np.isinf(nearest(np.array([BF16.largest * 1.01]), BF16)[0])
    words = np.random.default_rng(1).standard_normal(1000)
    assert (nearest(words, FP32) == words.astype(np.float32)).all()


@pytest.mark.parametrize("function", ["exp", "exp2", "tanh", "log"])
def test_numpy_functions_are_as_good_as_charged(function: str) -> None:
    """NUMPY is far above what numpy's float64 functions err by."""
    rng = np.random.default_rng(2)
    x = rng.uniform(-60.0, 60.0, 200) if function != "log" else np.exp2(rng.uniform(-130.0, 130.0, 200))
    with mpmath.workprec(120):
        exact_function = {
            "exp": mpmath.exp,
            "exp2": lambda y: mpmath.power(2, y),
            "tanh": mpmath.tanh,
            "log": mpmath.log,
        }
        for each in x:
            exact = exact_function[function](mpmath.mpf(float(each)))
            assert abs(mpmath.mpf(float(getattr(np, function)(each))) - exact) <= NUMPY / 2 * abs(exact)


@pytest.mark.parametrize("device", sorted(MODELS))
def test_device_functions_enclose_their_envelopes(device: str) -> None:
    """Every function of a ball holds the exact value at any of its points, moved to either end of the envelope."""
    model = MODELS[device]
    machine, rng = Machine(model), np.random.default_rng(3)
    mid, rad = rng.uniform(-20.0, 20.0, 200), rng.choice([0.0, 1e-6, 0.5], 200)
    x = Ball(mid, rad)
    positive = Ball(np.abs(mid) + 1.0, np.minimum(rad, 0.5))
    cases = (
        (machine.exp2(x), np.exp2, x, model.exp2_relative, 0.0),
        (machine.exp(x), np.exp, x, model.exp_relative, 0.0),
        (machine.tanh(x), np.tanh, x, model.tanh_relative, model.tanh_absolute),
        (machine.log(positive), np.log, positive, model.log_relative, model.log_absolute),
        (machine.rsqrt(positive), lambda y: 1.0 / np.sqrt(y), positive, model.rsqrt_relative, 0.0),
        (machine.sigmoid(x), lambda y: 1.0 / (1.0 + np.exp(-y)), x, model.sigmoid_relative, 0.0),
    )
    for found, function, operand, relative, absolute in cases:
        for share in (-1.0, -0.3, 0.0, 1.0):
            value = function(operand.mid + share * operand.rad)
            for direction in (-1.0, 1.0):
                moved = value + direction * (relative * np.abs(value) + absolute) * (1.0 - 2.0**-20)
                assert found.contains(moved).all()


def test_subnormal_results_may_be_zero() -> None:
    """What may be below the normal range contains zero and itself; what may overflow is not known."""
    machine = Machine(CPU_INTERPRET)
    small = machine.mul(Ball.exact(np.array([2.0**-100])), Ball.exact(np.array([2.0**-40])))
    assert small.contains(np.array([0.0])).all()
    assert small.contains(np.array([2.0**-140])).all()
    large = machine.mul(Ball.exact(np.array([2.0**100])), Ball.exact(np.array([2.0**40])))
    assert large.contains(np.array([np.inf])).all()
    assert machine.exp2(Ball.exact(np.array([-2000.0]))).contains(np.array([0.0])).all()


@pytest.mark.parametrize("tight", [False, True])
def test_rounding_of_balls_to_bf16(tight: bool) -> None:
    """Every point of a ball, rounded, lies in the rounded ball; the points themselves do where it is not tight."""
    rng = np.random.default_rng(4)
    x = Ball(rng.standard_normal(500), rng.choice([0.0, 1e-6, 1e-2], 500))
    found = Machine(CPU_INTERPRET, tight).to_bf16(x)
    for share in (-1.0, -0.5, 0.0, 0.7, 1.0):
        point = x.mid + share * x.rad
        assert found.contains(nearest(point, BF16)).all()
        assert found.contains(point).all() or tight
    sharp = (x.rad <= 1e-6) & (found.rad == 0.0)
    assert bool(sharp.sum() > 300) is tight
