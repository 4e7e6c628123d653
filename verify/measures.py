"""Error measures between a kernel's result and a reference, none of which a NaN or an infinity can slip through.

A pair matches in class when both are finite, or both are the same infinity, or (where the contract says NaN) both are
NaN; zeros of either sign match.  Any other pair is a mismatch: every measure shows it as NaN (one side is NaN) or inf,
and ranks it above every finite error, NaN first.

Ulp distances are ordinal: the representable numbers of the format are numbered, the distance is the difference of the
numbers, and a reference between two of them has a fractional number (so a correctly rounded result is at most 0.5
away).  Subnormals are not counted: 0 and 2^-126 are one ulp apart, as on a device that flushes subnormals.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from verify.bias import Bias, bias
from verify.growth import Growth, growth

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64, Shaped

BF16 = np.dtype(ml_dtypes.bfloat16)
FP32 = np.dtype(np.float32)
SIGNIFICANT_BITS = {BF16: 8, FP32: 24}
FORMAT_NAMES = {BF16: "BF16", FP32: "FP32"}
WORDS = {BF16: np.dtype(np.uint16), FP32: np.dtype(np.uint32)}
SMALLEST_NORMAL = 2.0**-126
FLOAT64_BITS = 53


class ComparisonError(ValueError):
    """Two arrays that cannot be compared: other shapes, or nothing in them."""


@dataclasses.dataclass(frozen=True)
class Worst:
    """Where a measure is largest.

    Attributes:
        value: the measure there; NaN or inf if the classes of got and want differ there.
        index: position in the compared arrays.
        got: the kernel's value.
        want: the reference value.
        got_bits: the kernel's word, such as "0x3f80".
        want_bits: the word of the number nearest to `want` in the kernel's format.
    """

    value: float
    index: tuple[int, ...]
    got: float
    want: float
    got_bits: str
    want_bits: str

    def __str__(self) -> str:
        where = ", ".join(str(i) for i in self.index)
        return f"[{where}]: got {self.got:.9g} ({self.got_bits}), want {self.want:.17g} (nearest {self.want_bits})"


@dataclasses.dataclass(frozen=True)
class Measures:
    """Largest errors over all compared elements.

    Attributes:
        format: "BF16" or "FP32", the format of `got`.
        count: how many elements were compared, at least 1.
        mismatches: how many differ in class.
        mismatch: the first of them; None if there is none.
        absolute: |got - want|.
        relative: |got - want| / |want|, inf where want is 0 and got is not.
        ulp: ordinal distance in the format of `got`.
        share: |got - want| / bound, None if no bound was given.
        bias: systematic error (None if no compared pair is finite, or it was not asked for).
        growth: how errors depend on the token (None for arrays without tokens, or it was not asked for).
    """

    format: str
    count: int
    mismatches: int
    mismatch: Worst | None
    absolute: Worst
    relative: Worst
    ulp: Worst
    share: Worst | None
    bias: Bias | None
    growth: Growth | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Errors:
    """Elementwise errors of the compared elements, from which the measures are taken.

    Attributes:
        got: the kernel's words, flat.
        wide: the same as float64.
        want: the reference, flat.
        where: flat indices into the arrays of shape `shape`; None if all were compared.
        shape: shape of the compared arrays.
        odd: flat positions (into `got`) at which got or want is not finite.
        penalty: for `odd`, what a measure shows: 0 (match), inf or NaN.
        absolute: |got - want|, with the penalty at `odd`.
    """

    got: Shaped[np.ndarray, " n"]
    wide: Float64[np.ndarray, " n"]
    want: Float64[np.ndarray, " n"]
    where: np.ndarray | None
    shape: tuple[int, ...]
    odd: np.ndarray
    penalty: Float64[np.ndarray, " odd"]
    absolute: Float64[np.ndarray, " n"]

    @property
    def mismatch(self) -> Bool[np.ndarray, " odd"]:
        """Which of `odd` differ in class."""
        return self.penalty != 0

    def index(self, position: int) -> tuple[int, ...]:
        """Index into the compared arrays of a flat position."""
        flat = position if self.where is None else int(self.where[position])
        index: list[int] = []
        for size in reversed(self.shape):
            flat, i = divmod(flat, size)
            index.append(i)
        return tuple(reversed(index))

    def worst(self, values: Float64[np.ndarray, " n"]) -> Worst:
        """The largest of `values`, NaN before inf before finite, the first one if several."""
        return self.at(int(values.argmax()), values)

    def at(self, position: int, values: Float64[np.ndarray, " n"]) -> Worst:
        """What stands at a flat position."""
        pair = self._pairs.get(position)
        if pair is None:
            want = float(self.want[position])
            words = bits(self.got[position]), bits(nearest(want, self.got.dtype))
            pair = self._pairs[position] = (self.index(position), float(self.wide[position]), want, *words)
        return Worst(float(values[position]), *pair)

    @functools.cached_property
    def _pairs(self) -> dict[int, tuple[tuple[int, ...], float, float, str, str]]:
        """Index, values and words of positions that were asked for: several measures have their worst at one."""
        return {}

    def spread(self, values: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """`values` with the penalties put in."""
        if self.odd.size:
            values[self.odd] = self.penalty
        return values


def widen(x: np.ndarray) -> Float64[np.ndarray, "*shape"]:
    """BF16 or FP32 as float64, exactly."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return x.astype(np.float64)


def bits(word: np.generic) -> str:
    """The word of one BF16 or FP32 number in hexadecimal."""
    return f"0x{int.from_bytes(word.tobytes(), sys.byteorder):0{2 * word.dtype.itemsize}x}"


def nearest(x: float, dtype: np.dtype) -> np.generic:
    """The number of the format nearest to x, ties to even; subnormal results become zero, too large ones infinite."""
    if not math.isfinite(x) or x == 0.0:
        return dtype.type(x)
    fraction, exponent = math.frexp(x)
    digits = SIGNIFICANT_BITS[dtype]
    rounded = math.ldexp(float(np.rint(math.ldexp(fraction, digits))), exponent - digits)
    if abs(rounded) < SMALLEST_NORMAL:
        return dtype.type(math.copysign(0.0, x))
    if abs(rounded) >= 2.0**128:
        return dtype.type(math.copysign(math.inf, x))
    return dtype.type(rounded)


def errors(
    got: Shaped[np.ndarray, "*shape"],
    want: Float64[np.ndarray, "*shape"],
    *,
    nan_matches: bool = False,
    where: Bool[np.ndarray, "*shape"] | None = None,
) -> Errors:
    """Elementwise errors of a BF16 or FP32 result against a float64 reference.

    Args:
        got: the kernel's result.
        want: the reference.
        nan_matches: the contract says that a NaN of `want` has to come out as NaN; otherwise NaN against NaN is a
            mismatch.
        where: which elements to compare; None compares all.

    Raises:
        TypeError: got is neither BF16 nor FP32.
        ComparisonError: the shapes differ, or there is nothing to compare.
    """
    got, want = np.asarray(got), np.asarray(want, dtype=np.float64)
    if got.dtype not in SIGNIFICANT_BITS:
        message = f"got must be BF16 or FP32, got {got.dtype}"
        raise TypeError(message)
    if got.shape != want.shape:
        message = f"shapes differ: got {got.shape}, want {want.shape}"
        raise ComparisonError(message)
    chosen = None if where is None or where.all() else np.flatnonzero(where)
    flat_got = np.ascontiguousarray(got).reshape(-1)
    flat_want = want.reshape(-1)
    if chosen is not None:
        flat_got, flat_want = flat_got[chosen], flat_want[chosen]
    if flat_got.size == 0:
        message = f"nothing was compared: {got.size} elements of shape {got.shape}"
        raise ComparisonError(message if chosen is None else f"{message}, none of them chosen")
    wide = widen(flat_got)
    with np.errstate(invalid="ignore"):
        absolute = np.abs(wide - flat_want)
    odd = np.flatnonzero(~np.isfinite(absolute))
    penalty = _penalties(wide[odd], flat_want[odd], nan_matches=nan_matches)
    absolute[odd] = penalty
    return Errors(flat_got, wide, flat_want, chosen, got.shape, odd, penalty, absolute)


def _penalties(got: np.ndarray, want: np.ndarray, *, nan_matches: bool) -> np.ndarray:
    nan_got, nan_want = np.isnan(got), np.isnan(want)
    matches = got == want
    if nan_matches:
        matches |= nan_got & nan_want
    return np.where(matches, 0.0, np.where(nan_got | nan_want, np.nan, np.inf))


def measure(
    found: Errors,
    bound: Float64[np.ndarray, "*shape"] | None = None,
    *,
    lanes: bool = True,
    tokens: int | None = None,
    trends: bool = True,
) -> Measures:
    """All measures of elementwise errors.

    Args:
        found: the errors.
        bound: what they may be, of the shape of the compared arrays.
        lanes: the last axis holds lanes of one row, which share roundings; otherwise every element stands alone.
        tokens: the axis of tokens, along which errors may grow; None if there is none.
        trends: also take bias and growth, on which no verdict depends.

    Raises:
        ComparisonError: the bound has another shape.
        ValueError: the bound is negative or NaN somewhere among the compared elements, or there is no such axis.
    """
    limit = None if bound is None else compared_bound(found, bound)
    share = None if limit is None else shares(found, limit)
    return Measures(
        format=FORMAT_NAMES[found.got.dtype],
        count=found.got.size,
        mismatches=int(np.count_nonzero(found.mismatch)),
        mismatch=found.at(int(found.odd[found.mismatch.argmax()]), found.absolute) if found.mismatch.any() else None,
        absolute=found.worst(found.absolute),
        relative=found.worst(_ratio(found, np.abs(found.want))),
        ulp=found.worst(ulp_distances(found)),
        share=None if share is None else found.worst(share),
        bias=_bias(found, limit, lanes=lanes) if trends else None,
        growth=_growth(found, share, tokens) if trends and tokens is not None else None,
    )


def _growth(found: Errors, share: np.ndarray | None, tokens: int) -> Growth:
    if share is not None:
        return growth(found, share, axis=tokens, normalised_by="bound")
    of_ulp = found.spread(found.absolute / half_ulps(found.want, SIGNIFICANT_BITS[found.got.dtype]))
    return growth(found, of_ulp, axis=tokens, normalised_by="half an ulp")


def compared_bound(found: Errors, bound: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, " n"]:
    """The bound at the compared elements, checked."""
    bound = np.asarray(bound, dtype=np.float64)
    if bound.shape != found.shape:
        message = f"shapes differ: got {found.shape}, bound {bound.shape}"
        raise ComparisonError(message)
    limit = bound.reshape(-1) if found.where is None else bound.reshape(-1)[found.where]
    lawful = limit >= 0
    if not lawful.all():
        position = int(lawful.argmin())
        message = f"a bound must be a number >= 0, got {limit[position]} at {found.index(position)}"
        raise ValueError(message)
    return limit


def shares(found: Errors, limit: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """|got - want| / bound; 0 / 0 is 0, and an error against a bound of 0 is inf."""
    return _ratio(found, limit)


def _ratio(found: Errors, denominator: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = found.absolute / denominator
    np.copyto(ratio, 0.0, where=found.absolute == 0)
    return found.spread(ratio)


def ulp_distances(found: Errors) -> Float64[np.ndarray, " n"]:
    """Ordinal distances in ulp of the format of `got`; see the module docstring."""
    digits = SIGNIFICANT_BITS[found.got.dtype]
    with np.errstate(invalid="ignore"):
        steps = _ordinals(found.wide, digits)
        steps -= _ordinals(found.want, digits)
        np.abs(steps, out=steps)
    return found.spread(steps * 2.0 ** (digits - FLOAT64_BITS))


def _ordinals(x: np.ndarray, digits: int) -> np.ndarray:
    """Ordinals in units of 2^(digits - 53) ulp: float64 words order like integers, 2^(53 - digits) to an ulp."""
    ulp = 1 << (FLOAT64_BITS - digits)
    size = np.abs(x)
    small = size < SMALLEST_NORMAL
    few = (size[small] * (ulp / SMALLEST_NORMAL)).astype(np.int64) if small.any() else None
    ordinals = size.view(np.int64)
    ordinals -= int(np.float64(SMALLEST_NORMAL).view(np.int64)) - ulp
    if few is not None:
        ordinals[small] = few
    sign = x.view(np.int64) >> 63  # -1 for a negative number: -n is (n ^ -1) + 1, without a branch
    ordinals ^= sign
    ordinals -= sign
    return ordinals


def _bias(found: Errors, limit: np.ndarray | None, *, lanes: bool) -> Bias | None:
    scale = half_ulps(found.want, SIGNIFICANT_BITS[found.got.dtype]) if limit is None else limit
    kept = _usable(found, limit)
    if kept is not None and not kept.size:
        return None
    width = found.shape[-1] if lanes and len(found.shape) > 1 else 1
    rows = _rows_of(found.got.size, width) if found.where is None else found.where // width
    if kept is None:
        normalised = found.wide - found.want
        normalised /= scale
    else:
        rows, scale = rows[kept], scale[kept]
        normalised = (found.wide[kept] - found.want[kept]) / scale
    largest = int(np.abs(normalised).argmax())
    at = largest if kept is None else int(kept[largest])
    worst = dataclasses.replace(found.at(at, found.absolute), value=float(normalised[largest]))
    statistics = bias(normalised, rows, normalised_by="half an ulp" if limit is None else "bound")
    return dataclasses.replace(statistics, worst=worst)


def _usable(found: Errors, limit: np.ndarray | None) -> np.ndarray | None:
    """Positions of finite pairs whose bound, if there is one, is finite and not 0; None for all."""
    if not found.odd.size and (limit is None or (limit.min() > 0 and limit.max() < math.inf)):
        return None
    usable = np.ones(found.got.size, dtype=bool)
    usable[found.odd] = False
    if limit is not None:
        usable &= (limit > 0) & np.isfinite(limit)
    return None if usable.all() else np.flatnonzero(usable)


@functools.lru_cache(maxsize=8)
def _rows_of(count: int, width: int) -> np.ndarray:
    """The row of each of `count` elements; judgements of one shape ask again and again."""
    rows = np.arange(count) // width
    rows.flags.writeable = False
    return rows


def half_ulps(x: Float64[np.ndarray, " n"], digits: int) -> Float64[np.ndarray, " n"]:
    """Half the spacing of the format's numbers around x (of its normal numbers, near zero)."""
    _, exponent = np.frexp(np.maximum(np.abs(x), SMALLEST_NORMAL))
    return np.ldexp(0.5, exponent - digits)
