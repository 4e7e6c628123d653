"""Elementwise functions of Gated DeltaNet: l2norm, sigmoid, softplus, silu, gates."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from flint import arb, fmpq

from proofs.constants import envelope
from proofs.exact import BF16, FP32, ball, ball_precision, power_of_two
from proofs.lemma import Method, lemma, require

_HEAD_DIMS = (64, 128, 256)


def _fraction(x: arb) -> Fraction:
    """The midpoint of a ball, exactly."""
    man, exp = x.mid().man_exp()
    return Fraction(int(man)) * power_of_two(int(exp))


def _nearest_fp32(x: arb) -> Fraction:
    """The FP32 number nearest to what the ball contains.

    Raises:
        LemmaRefuted: the ball is too wide to tell.
    """
    middle, radius = _fraction(x), _fraction(x.rad())
    low, high = FP32.nearest(middle - radius), FP32.nearest(middle + radius)
    require(low == high, f"a ball around {float(middle)} is too wide to be rounded")
    return low


def _bf16_words(lowest: int, highest: int) -> list[Fraction]:
    """Every positive BF16 number with an exponent in lowest .. highest."""
    return [(128 + m) * power_of_two(e - 7) for e in range(lowest, highest + 1) for m in range(128)]


def silu_error(x: Fraction) -> Fraction:
    """Relative error of 0.5 x (1 + tanh(x / 2)) in FP32 at a BF16 x, every operation correctly rounded."""
    half = fmpq(x.numerator, 2 * x.denominator)
    tangent = arb(half).tanh()
    s = FP32.nearest(1 + _nearest_fp32(tangent))
    computed = FP32.nearest(x / 2 * s)
    exact = ball(x) / (1 + (-ball(x)).exp())
    return abs(_fraction((ball(computed) - exact) / exact))


@lemma(
    statement="silu as 0.5 x (1 + tanh(x / 2)) errs by at most |x| / 2 (tanh + 8 u) absolutely; relatively it is worse "
    "than BF16's unit below about -12 and loses everything below -18",
    rests_on=("devices.tanh_relative", "devices.tanh_absolute", "devices.unit_roundoff"),
    methods=(Method.EXHAUSTIVE, Method.BALLS),
)
def silu_by_tanh() -> str:
    """Where the one-tanh form may be used.

    1 + tanh(x / 2) = 2 sigmoid(x) cancels for negative x: the tangent's error, at least half an FP32 ulp near -1,
    remains, absolutely harmless (Gappa has the bound, silu_by_tanh.g) and relatively fatal.  Tried: every BF16 number
    in [-256, -2**-9] with correctly rounded operations, against balls; a device's tanh does worse.  Below -18 the
    computed tangent is -1 and the result 0.  At x = -inf the form gives -inf * 0 = NaN, where silu is -0: the kernel
    that uses it has to select, and to say which relative error it promises for negative x.
    """
    with ball_precision():
        errors = {-x: silu_error(-x) for x in _bf16_words(-9, 7)}
    require(all(error == 1 for x, error in errors.items() if x < -18), "silu below -18 is not lost entirely")
    at_10, at_16 = errors[Fraction(-10)], errors[Fraction(-16)]
    require(Fraction(1, 10000) < at_10 < Fraction(1, 1000), f"the relative error at -10 is {float(at_10):.3g}")
    require(Fraction(1, 20) < at_16 < Fraction(1, 5), f"the relative error at -16 is {float(at_16):.3g}")
    last_good = max(x for x, error in errors.items() if error > BF16.unit_roundoff)
    require(-13 < last_good < -9, f"the first result worse than BF16's unit is at {float(last_good)}")
    with np.errstate(invalid="ignore"):
        at_infinity = np.float32(-np.inf) * np.float32(0.5) * (np.float32(1) + np.float32(-1))
    require(bool(np.isnan(at_infinity)), "x = -inf no longer gives NaN")
    return (
        f"{len(errors)} words: {float(at_10):.1e} at -10, {float(at_16):.2f} at -16, above 2**-8 from "
        f"{float(last_good)}, "
        "1 below -18; NaN at -inf"
    )


@lemma(
    statement="sigmoid as 1 / (1 + exp(-x)) errs relatively by at most (exp + reciprocal + 2 u)(1 + 2**-10) for |x| "
    "<= 69",
    rests_on=("devices.exp_relative", "devices.reciprocal_relative", "devices.unit_roundoff"),
    methods=(Method.BALLS,),
)
def sigmoid_error() -> str:
    """No cancellation: 1 + E(1 + e) = (1 + E)(1 + e E / (1 + E)), and E / (1 + E) < 1.

    One addition rounds, then the reciprocal errs: (1 + r) / ((1 - e)(1 - u)) - 1 and its counterpart below.  Gappa
    bounds the same for E = exp(-x) in [2**-100, 2**100] (sigmoid_error.g).
    """
    with ball_precision():
        e, r, u = (ball(envelope(f)) for f in ("exp_relative", "reciprocal_relative", "unit_roundoff"))
        charged = (e + r + 2 * u) * ball(1 + power_of_two(-10))
        require((1 + r) / ((1 - e) * (1 - u)) - 1 <= charged, "the error upwards is not covered")
        require(1 - (1 - r) / ((1 + e) * (1 + u)) <= charged, "the error downwards is not covered")
        require((100 * arb(2).log()) > 69, "2**100 is below e**69")
        return f"at most {float(charged.mid()):.3g}, worst device"


@lemma(
    statement="softplus as max(x, 0) + log1p(exp(-|x|)) errs by at most exp + log + log_absolute + u |result|, "
    "absolutely",
    rests_on=("devices.exp_relative", "devices.log_relative", "devices.log_absolute", "devices.unit_roundoff"),
    methods=(Method.BALLS,),
)
def softplus_error() -> str:
    """A relative error e of E = exp(-|x|) <= 1 moves log1p(E) by at most e.

    |log1p(E (1 + e)) - log1p(E)| <= |e| E / (1 + E (1 - |e|)) <= |e|, as E <= 1 and |e| < 1/2.  log1p(E) is below ln 2
    < 1, so that its relative error counts at most once; the sum rounds.  The form never overflows, where
    log(1 + exp(x)) does at x = 88.8.  Gappa bounds the same (softplus_error.g).
    """
    with ball_precision():
        e = ball(envelope("exp_relative"))
        require(e < ball(Fraction(1, 2)), "exp errs by half")
        for exponential in (Fraction(1), Fraction(1, 2), power_of_two(-20)):
            big = ball(exponential)
            moved = (1 + big * (1 + e)).log() - (1 + big).log()
            require(moved <= e, f"log1p moves by more than exp's error at E = {float(exponential)}")
        require(arb(2).log() < 1, "ln 2 is not below 1")
        threshold = ball(FP32.largest).log()
        require(ball(Fraction(888, 10)) > threshold, "exp(88.8) no longer overflows")
        charged = e + ball(envelope("log_relative")) + ball(envelope("log_absolute"))
        return f"at most {float(charged.mid()):.3g} and a rounding, worst device; log(1 + exp(x)) overflows from 88.8"


@lemma(
    statement="l2norm as x rsqrt(sum x**2 + eps) errs relatively by at most ((d + 1) u / 2 + rsqrt + 2 u)(1 + 2**-10); "
    "without eps 0 gives NaN, and from |x| = sqrt(FP32_MAX / d) on it silently gives 0",
    rests_on=("devices.rsqrt_relative", "devices.unit_roundoff"),
    methods=(Method.BALLS, Method.EXACT),
)
def l2_normalisation() -> str:
    """Squares of BF16 numbers are exact; their sum and eps round d times at most, and a root halves a relative error.

    Outside: all squares flushed or zero and no eps: 0 * rsqrt(0) = 0 * inf = NaN.  A sum that overflows: x rsqrt(inf) =
    0, of length 0 and not 1.  eps inside the root or outside it, or a maximum with it, are three different functions:
    at |x|**2 = eps they differ by factors of up to sqrt(2).  Gappa bounds the relative error (l2_normalisation.g).
    """
    with ball_precision():
        u, r = ball(envelope("unit_roundoff")), ball(envelope("rsqrt_relative"))
        for d in _HEAD_DIMS:
            charged = ((d + 1) * u / 2 + r + 2 * u) * ball(1 + power_of_two(-10))
            low, high = ((d * ball(1 + s * envelope("unit_roundoff")).log()).exp() for s in (-1, 1))
            require((1 + r) * (1 + u) / low.sqrt() - 1 <= charged, f"the error upwards is not covered at d = {d}")
            require(1 - (1 - r) * (1 - u) / high.sqrt() <= charged, f"the error downwards is not covered at d = {d}")
    with np.errstate(all="ignore"):
        zero, infinite = np.float32(0), np.float32(np.inf)
        require(bool(np.isnan(zero * (1 / np.sqrt(zero)))), "0 without eps no longer gives NaN")
        require(float(np.float32(1e20) * (1 / np.sqrt(infinite))) == 0.0, "an overflowing sum no longer gives 0")
    overflow = next(x for x in _bf16_words(59, 64) if 128 * x * x > FP32.largest)
    inside, outside = 1 / np.sqrt(2.0), 0.5
    require(inside / outside > 1.4, "where eps stands makes no difference")
    return f"d = {_HEAD_DIMS}; 128 equal values overflow from {float(overflow):.3g} on"


@lemma(
    statement="decays formed as exp(g_i - g_j), i >= j, never overflow and err relatively by their gates' absolute "
    "error; "
    "above the diagonal or factored as exp(g_i) exp(-g_j) they overflow; cumulative gates must be local to a chunk",
    rests_on=("devices.exp_relative", "devices.unit_roundoff"),
    methods=(Method.BALLS, Method.EXACT),
)
def gate_differences() -> str:
    """Cumulative log gates g fall: g_i - g_j <= 0 for i >= j, so that exp is in (0, 1].

    - Rounding: with |g| <= G in the chunk each sum of up to 64 gates errs by at most 64 u G, a difference by 129 u G,
      so exp by e**(129 u G) - 1 relatively, beside its own error.
    - Above the diagonal the difference is positive: with a chunk's decay beyond 88.8 nats (1.39 per token) exp
      overflows, and 0 * inf = NaN: mask the difference, not the result.
    - Factored, exp(-g_j) overflows at the same decay.
    - Summed from the start of the sequence, G is 2**19 after 512K tokens of -1: spacing 2**-4 there, so that a
      difference may be off by 2**-4 and a decay by 6.4 %.
    - One gate of -2**30 makes every later difference in its chunk a multiple of 2**6: clamp gates first; a decay below
      e**-104 is 0 in FP32 anyway.
    """
    with ball_precision():
        u, local = ball(envelope("unit_roundoff")), 64 * ball(2)
        relative = (129 * u * local).exp() - 1 + ball(envelope("exp_relative"))
        require(relative < ball(Fraction(1, 100)), "a chunk's decays err by more than 1 %")
        require((64 * ball(Fraction(139, 100))).exp() > ball(FP32.largest), "64 gates of -1.39 no longer overflow")
        spacing = power_of_two(19 - 23)
        require(FP32.nearest(power_of_two(19) + spacing / 2) - power_of_two(19) in {0, spacing}, "spacing at 2**19")
        require(ball(spacing).exp() - 1 > ball(Fraction(6, 100)), "half a million tokens cost less than 6 %")
        require(ball(-104).exp() < ball(power_of_two(-150)), "e**-104 is not flushed")
        absorbed = FP32.nearest(-power_of_two(30) - 20)
        require(absorbed == -power_of_two(30), "a gate of -20 after one of -2**30 is not absorbed")
        return f"gates of -2: decays of a chunk err by {float(relative.mid()):.2g} relatively, worst device"
