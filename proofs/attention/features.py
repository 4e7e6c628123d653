"""What options add to a row: the soft cap, sinks, and the maximum logit."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from flywheel.attention import budget, checks, tile
from proofs.attention.rows import Key, Row, draw, flush
from proofs.attention.theorem import convex_of, first_order_of
from proofs.constants import envelope
from proofs.exact import FP32, ball, ball_precision, power_of_two
from proofs.lemma import Assumption, Method, lemma, require
from verify import devices
from verify.attention import contract

if TYPE_CHECKING:
    from flint import arb

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"
_TILES = "verify/tests/kernels/attention/test_tile.py"
_HEAD_DIM = 128
_SLACK = 1 + power_of_two(-40)
"""What the contract's own evaluation in float64 may lose: EVALUATION_SLACK grants far more."""


def _held(u: Fraction) -> Fraction:
    """Relative error of a constant that was rounded to binary64 twice and to FP32 once."""
    return (1 + power_of_two(-52)) * (1 + u) - 1


@lemma(
    statement="a capped score is within cap log2(e) (moved + relative (|tanh| + moved) + 1.01 tanh_absolute) of the "
    "exact one, moved = min(apart min(1, 4 exp(-2 (|x| - apart))), 2), and finite however large the dot product is",
    rests_on=(
        "budget.BIAS",
        "budget.FP32_MAX",
        "checks._LARGEST",
        "checks._SMALLEST_NORMAL",
        "contract.DOMAIN_LIMIT",
        "devices.tanh_relative",
        "devices.tanh_absolute",
        "devices.unit_roundoff",
        "devices.dot_unit_roundoff",
        "devices.smallest_normal",
    ),
    methods=(Method.BALLS, Method.EXACT),
    assumptions=(
        Assumption("the cap's constants are FP32 numbers with room", "flywheel.attention.checks:check_softcap"),
        Assumption("tanh of an infinite argument is 1", f"{_TILES}::test_soft_cap_bounds_the_logits"),
        Assumption("tanh errs by its envelope", f"{_TESTS}::test_capped_scores_keep_their_bound"),
    ),
)
def soft_cap() -> str:
    """The contract's section 9, soft cap.

    The argument x = s / cap is a dot product times one constant, like a score (`score_error`): off by `apart`.  tanh
    has the slope 1 / cosh**2 <= min(1, 4 exp(-2 |x|)) between exact and computed argument, and 1 bounds it: `moved`.
    The device's tanh errs by its envelope; the constant cap log2(e) was rounded, and the product with it rounds.  Coq
    has this for every argument (soft_cap.v), with the mean value theorem.  Here the contract's own `_scores` is
    compared with it in balls, over caps, scales and sizes of the dot product.

    |tanh| <= 1, so that a score is at most cap log2(e) (1 + tanh_relative + tanh_absolute)(1 + 4 u): finite if
    cap log2(e) <= 2**127, which is what is refused beyond.  A dot product times scale / cap may overflow: its tanh is
    1, and the exact tangent is 1 up to exp(-2**127).
    """
    smallest, largest = Fraction(checks._SMALLEST_NORMAL), Fraction(checks._LARGEST)  # noqa: SLF001  not a copy of it
    u, tangent = envelope("unit_roundoff"), 1 + envelope("tanh_relative") + envelope("tanh_absolute")
    require(smallest >= FP32.smallest_normal, f"a cap of {float(smallest):.3g} is flushed")
    require(
        largest * tangent * (1 + 4 * u) * (1 + u) + budget.BIAS <= FP32.largest,
        f"a score capped at {float(largest):.6g} may overflow",
    )
    require(Fraction(contract.DOMAIN_LIMIT) >= largest, "the contract's domain leaves out caps that the kernel accepts")
    compared = 0
    with ball_precision():
        for model in devices.MODELS.values():
            for cap, scale, reach in itertools.product(
                (2.0**-20, 1.0, 15.0, 2.0**60), (2.0**-3, 1.7), (1e-6, 0.3, 3.0, 17.0)
            ):
                _capped_is_covered(model, cap, scale, reach)
                compared += 1
    return (
        f"{compared} charges on {len(devices.MODELS)} device models; capped scores up to {float(largest * tangent):.4g}"
    )


def _capped_is_covered(model: devices.DeviceModel, cap: float, scale: float, reach: float) -> None:
    """A dot product whose argument x is about `reach`, its terms four times as large."""
    dot = reach * cap / scale
    magnitude = 4.0 * dot
    rule = contract._Rule(scale, cap, None, model, devices.BF16_UNIT_ROUNDOFF)  # noqa: SLF001  the contract's own charge
    logits = np.array([[dot * scale]])
    charged = contract._scores(logits, np.array([[magnitude]]), _HEAD_DIM, rule, None).sigma[0, 0]  # noqa: SLF001
    u, omega = Fraction(model.unit_roundoff), Fraction(model.smallest_normal)
    held = _held(u)
    factor, growth = abs(Fraction(scale)) / Fraction(cap), (1 + Fraction(model.dot_unit_roundoff)) ** (_HEAD_DIM - 1)
    relative = growth * (1 + held) * (1 + u) - 1
    apart = factor * (relative * Fraction(magnitude) + (1 + held) * (1 + u) * growth * 2 * _HEAD_DIM * omega) + omega
    x = ball(Fraction(float(logits[0, 0])) / Fraction(cap))
    beyond = abs(x) - ball(apart)
    slope = 4 * (-2 * beyond).exp() if beyond > 0 else ball(4)
    moved = _least(ball(apart) * _least(ball(1), slope), ball(2))
    t, absolute = x.tanh(), ball(model.tanh_absolute)
    device = (1 + ball(model.tanh_relative)) * ball((1 + held) * (1 + u)) - 1
    of_tangent = moved + device * (abs(t) + moved) + ball((1 + held) * (1 + u)) * absolute
    needed = ball(cap) / ball(2).log() * of_tangent + ball(omega)
    require(
        ball(float(charged)) * ball(_SLACK) >= needed,
        f"a score capped at {cap:g} errs by {float(needed.mid()):.6g} near x = {reach:g} on {model.name}, "
        f"{charged:.6g} is charged",
    )


def _least(a: arb, b: arb) -> arb:
    """The smaller ball, where it is known to be."""
    return min(b, a)


@lemma(
    statement="a sink is a key of value 0: with it in the denominator the contract's bounds hold; the check sees its "
    "weight, and in a replay the running maximum starts at its ceiling",
    rests_on=(
        "budget.BIAS",
        "budget.LANES",
        "budget.LANE_LIMIT",
        "budget.MAX_KEYS",
        "budget.SUM_FLOOR",
        "contract.DOMAIN_LIMIT",
        "devices.BF16_UNIT_ROUNDOFF",
        "devices.exp2_relative",
        "devices.reciprocal_relative",
        "devices.smallest_normal",
        "devices.unit_roundoff",
        "tile.LOG2_E",
    ),
    methods=(Method.EXACT, Method.BALLS, Method.INSTANCES),
    assumptions=(
        Assumption("denominators beyond the limits are refused", f"{_TESTS}::test_rows_below_the_floor_are_unsound"),
        Assumption("a sink far above the anchor fails the check", f"{_TESTS}::test_sinks_are_seen_by_the_check"),
    ),
)
def sinks() -> str:
    """The contract's section 9, sinks.

    Add to the row a key of value 0 whose weight p is not rounded to BF16 (its product is 0 in any case): it conforms to
    what `attention_bound` and `convex_bound` ask of keys, o is a sum with one more 0 in it, and the exact result has
    the sink in its denominator.  So the final theorem holds for the row with it; the mean is one of the visible
    values *and 0*.  Coq derives this (sinks.v); here rows with sinks from far below to far above their weights are
    tried in exact arithmetic.

    Its score is sink log2(e), a constant that is rounded and a product that is: the contract's sigma covers both.
    l + p >= p in any rounding (`check_never_misses`): a sink far above the anchor makes l infinite or too large, which
    the final check refuses.  In a replay the running maximum is at least the sink's ceiling, so that its weight is at
    most 2**-BIAS, at least 2**-(BIAS + 1) if it is the largest (`floor_is_reached`), and l stays within the limits.
    """
    numbers = random.Random(11)  # noqa: S311  not for secrets
    worst, tried = Fraction(0), 0
    for above, _ in itertools.product((-80, -20, -3, 0, 3, 40, 100), range(4)):
        row = _with_sink(draw(numbers, count=9, spread=6, skewed=True), numbers, above)
        for error, allowed in (first_order_of(row), convex_of(row)):
            require(error <= allowed, f"a row with a sink errs by {float(error):.6g}, more than {float(allowed):.6g}")
            worst = max(worst, error / allowed)
        tried += 1
    with ball_precision():
        for model in devices.MODELS.values():
            _sink_score_is_covered(model)
    most = 2 * (budget.MAX_KEYS + 1) * power_of_two(1 - budget.BIAS)
    require(most <= budget.LANES * Fraction(budget.LANE_LIMIT), f"a replayed denominator with a sink reaches {most}")
    _seen_by_the_check()
    return f"{tried} rows; the worst error is {float(worst):.3f} of the bound"


def _with_sink(row: Row, numbers: random.Random, above: int) -> Row:
    """The row with a sink `above` log2 units above its largest weight, whose own weight errs upwards."""
    w = max(key.w for key in row.keys) * power_of_two(above)
    rho = Fraction(numbers.choice((0, 2**-18, 2**-6)))
    p = FP32.nearest(w * (1 + rho))
    rho = abs(p - w) / w  # the rounding to FP32 with it
    sink = Key(w, Fraction(0), rho, p, p, Fraction(0))
    return Row((*row.keys, sink), flush(FP32.nearest(row.l + p)), row.o, row.flushes + 2)


def _sink_score_is_covered(model: devices.DeviceModel) -> None:
    u, omega = Fraction(model.unit_roundoff), ball(model.smallest_normal)
    none = np.zeros((1, 0))
    for sink in (1e-30, 0.7, -3.5, 88.0, 1e30):
        scores = contract._Scores(none, none, none).with_sink(sink, model)  # noqa: SLF001  the contract's own charge
        size = abs(ball(sink)) / ball(2).log()
        held = Fraction(float(np.float32(tile.LOG2_E)))
        off = abs(ball(held) * ball(2).log() - 1)
        needed = size * ((1 + off) * ball(1 + u) - 1) + omega
        require(
            ball(float(scores.sigma[0, 0])) * ball(_SLACK) >= needed,
            f"the score of a sink of {sink:g} errs by more than is charged on {model.name}",
        )
    largest = ball(contract.DOMAIN_LIMIT) * ball((1 + u) ** 3)
    require(largest + budget.BIAS <= ball(FP32.largest), "the score of a sink at DOMAIN_LIMIT may overflow")


def _seen_by_the_check() -> None:
    """The kernel's own functions, for sinks below, at and far above the shift."""
    shift = jnp.zeros((1, 1), jnp.float32)
    for sink, unsound in ((-20.0, False), (0.0, False), (84.0, False), (87.0, True), (1e6, True), (math.inf, True)):
        l = jnp.float32(budget.SUM_FLOOR) + tile.sink_weight(jnp.float32(sink), shift, late_bias=False)  # noqa: E741
        found = bool(tile.denominator_unsound(l)[0, 0] > 0.0)
        require(found == unsound, f"a sink of {sink} nats above the shift is {'refused' if found else 'accepted'}")
    room = 1 + float(envelope("exp2_relative"))
    for sink in (-1e6, -0.3, 0.0, 5.5, 1e4, 1e30):
        score = jnp.float32(sink) * tile.LOG2_E
        weight = float(tile.sink_weight(jnp.float32(sink), jnp.ceil(score)[None, None], late_bias=True)[0, 0])
        low, high = 2.0 ** -(budget.BIAS + 1) / room, 2.0**-budget.BIAS * room
        require(low <= weight <= high, f"in a replay a sink of {sink} has the weight {weight}")


@lemma(
    statement="the maximum logit is exactly the largest computed score, whatever the order, times ln 2: off by at most "
    "max(z + e) - max z, and two roundings",
    rests_on=("devices.unit_roundoff", "devices.smallest_normal", "tile.LN2"),
    methods=(Method.EXACT, Method.BALLS, Method.INSTANCES),
    assumptions=(Assumption("a NaN score is kept", f"{_TESTS}::test_maxima_keep_nan"),),
)
def maximum_logit() -> str:
    """The contract's section 9, maximum logit.

    A maximum rounds nothing, so that it is one of the computed scores and the largest of them in any order: of 8
    partial maxima, of fragments, of heads (the kernel's functions are run on shuffled scores and compared).  Let k
    have the largest exact logit z and j the largest computed one: ln 2 s_j >= ln 2 s_k >= z_k - e_k, and ln 2 s_j <=
    z_j + e_j, so that both differences are at most max(z + e) - max z.  Then a constant ln 2 and a product.  Coq:
    maximum_logit.v.
    """
    rng = np.random.default_rng(17)
    s = rng.normal(size=(64, 32)).astype(np.float32) * np.float32(1e3)
    expected = s.max(axis=0, keepdims=True)
    for _ in range(4):
        rng.shuffle(s, axis=0)
        maxima = jnp.maximum(tile.partial_maxima(jnp.asarray(s[:24])), tile.partial_maxima(jnp.asarray(s[24:])))
        found = np.asarray(tile.largest_or_nan(maxima, axis=0))
        require(bool((found == expected).all()), "the largest score depends on the order")
    with ball_precision():
        ln2 = Fraction(float(np.float32(tile.LN2)))
        off = abs(ball(ln2) / ball(2).log() - 1)
        for model in devices.MODELS.values():
            require(off <= ball(model.unit_roundoff), "ln 2 is held with more than one rounding")
            _maximum_is_covered(model, rng, off)
    return f"4 orders of 64 scores for 32 queries; {len(devices.MODELS)} device models"


def _maximum_is_covered(model: devices.DeviceModel, rng: np.random.Generator, held: arb) -> None:
    logits, sigma = rng.normal(size=(20, 12)) * 50.0, np.abs(rng.normal(size=(20, 12))) * 1e-4
    scores = contract._Scores(logits, sigma, np.zeros_like(logits))  # noqa: SLF001  the contract's own charge
    charged = contract._max_logit_bound(scores, model)  # noqa: SLF001
    ln2 = ball(2).log()
    for row, (zs, sigmas) in enumerate(zip(logits.tolist(), sigma.tolist(), strict=True)):
        exact = ball(max(zs))
        apart = max((ball(z) + ln2 * ball(e) for z, e in zip(zs, sigmas, strict=True)), key=lambda b: b.mid()) - exact
        needed = apart + ((1 + held) * (1 + ball(model.unit_roundoff)) - 1) * (abs(exact) + apart)
        needed += ball(model.smallest_normal)
        require(
            ball(float(charged[row])) * ball(_SLACK) >= needed,
            f"a maximum logit errs by more than is charged on {model.name}",
        )
