"""Error measures: nothing that is not finite slips through, and ulp distances are those of the format."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from verify.measures import BF16, FP32, ComparisonError, Measures, bits, errors, measure, nearest, ulp_distances, widen

pytestmark = pytest.mark.smoke

NAN, INF = math.nan, math.inf


def measured(
    got: list[float], want: list[float], bound: float | None = None, *, dtype: np.dtype = FP32, **options: bool
) -> Measures:
    """Measures of short lists."""
    found = errors(np.array(got, dtype=dtype), np.array(want), **options)
    return measure(found, None if bound is None else np.full(len(want), bound))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("got", "want", "shown"),
    [
        (NAN, 1.0, NAN),
        (1.0, NAN, NAN),
        (NAN, NAN, NAN),
        (INF, INF, 0.0),
        (-INF, -INF, 0.0),
        (-INF, INF, INF),
        (1e30, INF, INF),
        (INF, 1e30, INF),
        (NAN, INF, NAN),
        (0.0, -0.0, 0.0),
    ],
)
def test_mismatch_of_class_shows_in_every_measure(got: float, want: float, shown: float, dtype: np.dtype) -> None:
    """G1: beside a large finite error, every measure shows NaN or inf for a mismatch, never the finite error."""
    found = measured([got, 3.0], [want, 2.0], 0.25, dtype=dtype)
    for worst in (found.absolute, found.relative, found.ulp, found.share):
        if shown == 0.0:
            assert worst.index == (1,)
            assert math.isfinite(worst.value)
        else:
            assert worst.index == (0,)
            assert worst.value == shown or math.isnan(worst.value) == math.isnan(shown)
    assert found.mismatches == (0 if shown == 0.0 else 1)


def test_nan_ranks_above_infinity_above_finite() -> None:
    """The worst element is a NaN if there is one, else an infinity."""
    assert measured([1.0, INF, NAN], [2.0, 1.0, 1.0]).absolute.index == (2,)
    assert measured([1.0, INF, 9e9], [2.0, 1.0, 1.0]).absolute.index == (1,)


def test_nan_matches_where_the_contract_says_so() -> None:
    """With nan_matches a NaN against NaN is right, and against anything else still wrong."""
    found = measured([NAN, NAN, 1.0], [NAN, 1.0, 1.0], nan_matches=True)
    assert found.mismatches == 1
    assert found.absolute.index == (1,)


def test_an_infinite_bound_does_not_excuse_a_mismatch() -> None:
    """The share of an infinite bound is 0 for finite pairs and NaN or inf for a mismatch."""
    assert measured([5.0], [1.0], INF).share.value == 0.0
    assert measured([INF], [1.0], INF).share.value == INF
    assert math.isnan(measured([NAN], [1.0], INF).share.value)


def test_a_bound_of_zero() -> None:
    """Exact results use nothing of a bound of 0; any error exceeds it infinitely."""
    assert measured([1.0], [1.0], 0.0).share.value == 0.0
    assert measured([1.5], [1.0], 0.0).share.value == INF


@pytest.mark.parametrize("bound", [NAN, -1.0])
def test_unlawful_bounds_are_refused(bound: float) -> None:
    """A negative or NaN bound is named with its place."""
    with pytest.raises(ValueError, match=r"a bound must be a number >= 0, got (nan|-1\.0) at \(0,\)"):
        measured([1.0], [1.0], bound)


def test_nothing_compared() -> None:
    """Comparing nothing is an error: empty arrays, or no element chosen."""
    with pytest.raises(ComparisonError, match=r"nothing was compared: 0 elements of shape \(0, 4\)"):
        errors(np.zeros((0, 4), FP32), np.zeros((0, 4)))
    with pytest.raises(ComparisonError, match=r"nothing was compared: 3 elements .* none of them chosen"):
        errors(np.zeros(3, FP32), np.zeros(3), where=np.zeros(3, bool))


def test_shapes_must_agree() -> None:
    """Shapes that would broadcast are refused, with both named; so is a bound of another shape."""
    with pytest.raises(ComparisonError, match=r"shapes differ: got \(3,\), want \(1, 3\)"):
        errors(np.zeros(3, FP32), np.zeros((1, 3)))
    with pytest.raises(ComparisonError, match=r"shapes differ: got \(3,\), bound \(1,\)"):
        measure(errors(np.zeros(3, FP32), np.zeros(3)), np.zeros(1))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_other_formats_are_refused(dtype: type) -> None:
    """Only BF16 and FP32 results are judged."""
    with pytest.raises(TypeError, match=f"got must be BF16 or FP32, got {np.dtype(dtype)}"):
        errors(np.zeros(3, dtype), np.zeros(3))


def test_worst_element_is_told_in_full() -> None:
    """Index, values, and the words of got and of the nearest number to want."""
    found = errors(np.array([[1.0, 2.0], [1.0078125, 4.0]], dtype=BF16), np.array([[1.0, 2.0], [1.0, 4.0]]))
    worst = measure(found).absolute
    assert worst.index == (1, 0)
    assert (worst.got, worst.want) == (1.0078125, 1.0)
    assert (worst.got_bits, worst.want_bits) == ("0x3f81", "0x3f80")
    assert str(worst) == "[1, 0]: got 1.0078125 (0x3f81), want 1 (nearest 0x3f80)"


def test_chosen_elements_keep_their_index() -> None:
    """With `where`, indices are those of the whole array, and the rest is not looked at."""
    got = np.array([[NAN, 2.0], [3.0, 4.0]], dtype=FP32)
    found = errors(got, np.array([[1.0, 2.0], [3.5, 4.0]]), where=np.array([[False, True], [True, True]]))
    measures = measure(found, np.array([[NAN, 1.0], [1.0, 1.0]]))
    assert measures.count == 3
    assert measures.mismatches == 0
    assert measures.absolute.index == (1, 0)
    assert measures.share.value == 0.5


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_ulp_distance_counts_representable_numbers(dtype: np.dtype) -> None:
    """Between any two normal numbers or zeros, of any signs, the distance is how many steps lie between them."""
    rng = np.random.default_rng(0)
    bits_per_step = {BF16: 7, FP32: 23}[dtype]
    words = rng.integers(0, (255 << bits_per_step) - (1 << bits_per_step), size=(200, 2))  # 0 is zero, 1 is 2^-126
    signs = rng.choice([-1, 1], size=(200, 2))
    numbers = np.where(words == 0, 0, words + (1 << bits_per_step) - 1)
    word = {BF16: np.uint16, FP32: np.uint32}[dtype]
    values = widen(numbers.astype(word).view(dtype)) * signs
    found = errors(values[:, 0].astype(dtype), values[:, 1])
    assert np.array_equal(ulp_distances(found), np.abs(words[:, 0] * signs[:, 0] - words[:, 1] * signs[:, 1]))


@pytest.mark.parametrize(
    ("got", "want", "ulps"),
    [
        (1.0, 1.0 + 2.0**-8, 0.5),  # half way to the next BF16
        (1.0, 1.0 - 2.0**-9, 0.5),  # below a power of two the steps are half as long
        (1.0, 2.0, 128.0),
        (0.0, 2.0**-126, 1.0),
        (0.0, 2.0**-127, 0.5),
        (-(2.0**-126), 2.0**-126, 2.0),
        (3.3895313892515355e38, 3.3895313892515355e38, 0.0),
    ],
)
def test_ulp_distance_is_fractional(got: float, want: float, ulps: float) -> None:
    """A reference between two BF16 numbers has a fractional distance; subnormals are not counted."""
    assert measured([got], [want], dtype=BF16).ulp.value == pytest.approx(ulps, abs=1e-9)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_correctly_rounded_result_is_within_half_an_ulp(dtype: np.dtype) -> None:
    """Rounding to nearest is at most 0.5 ulp away, and gets there."""
    rng = np.random.default_rng(1)
    want = rng.standard_normal(4000) * 2.0 ** rng.integers(-100, 100, 4000)
    distances = ulp_distances(
        errors(want.astype(np.float32).astype(dtype) if dtype == BF16 else want.astype(dtype), want)
    )
    assert 0.49 < distances.max() <= 0.5 + 1e-4


def test_nearest_rounds_once() -> None:
    """The nearest BF16 is found directly, not through FP32, which would round twice; subnormals become zero."""
    twice = 1.0 + 2.0**-8 + 2.0**-40  # just above the tie, which FP32 cannot see
    assert bits(nearest(twice, BF16)) == "0x3f81"
    assert bits(nearest(1.0 + 2.0**-8, BF16)) == "0x3f80"
    assert bits(nearest(2.0**-127, FP32)) == "0x00000000"
    assert bits(nearest(3.4e38, BF16)) == "0x7f80"
    assert bits(nearest(-1e300, FP32)) == "0xff800000"
    assert bits(nearest(NAN, BF16)) in {"0x7fc0", "0xffc0"}


def test_widen_is_exact_for_every_bf16_word() -> None:
    """All 65536 words become the float64 that they stand for, NaN included."""
    words = np.arange(65536, dtype=np.uint16).view(BF16)
    with np.errstate(invalid="ignore"):
        expected = words.astype(np.float32).astype(np.float64)
    assert np.array_equal(widen(words), expected, equal_nan=True)
    assert np.dtype(ml_dtypes.bfloat16) == BF16


def test_every_measure_names_an_element_with_its_bits() -> None:
    """Class, absolute, relative, ulp, share, bias and growth: index, both values and both words."""
    want = np.ones((1, 1, 8, 4))
    got = want.astype(np.float32)
    got[0, 0, 5, 1], got[0, 0, 2, 3], got[0, 0, 6, 0] = 0.75, np.nan, np.inf
    found = measure(errors(got, want), np.ones_like(want), tokens=2)
    assert found.mismatches == 2
    assert found.bias is not None
    assert found.growth is not None
    places = {name: getattr(found, name) for name in ("mismatch", "absolute", "relative", "ulp", "share")}
    for name, place in places.items():
        assert place.index == (0, 0, 2, 3), name
        assert (place.got_bits, place.want_bits) == ("0x7fc00000", "0x3f800000"), name
    assert found.bias.worst is not None
    assert (found.bias.worst.index, found.bias.worst.value) == ((0, 0, 5, 1), -0.25)
    assert (found.bias.worst.got_bits, found.bias.worst.want) == ("0x3f400000", 1.0)
    assert [r.worst.index for r in found.growth.ranges][-2:] == [(0, 0, 2, 3), (0, 0, 6, 0)]
    assert measure(errors(want.astype(np.float32), want)).mismatch is None
