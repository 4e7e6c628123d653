"""The float64 rotary oracle stays within its own bound at every position, and refuses what it does not cover."""

from __future__ import annotations

import dataclasses
import math

import mpmath
import numpy as np
import pytest
from flint import arb

from verify.attention.oracle_float64 import UNIT
from verify.attention.problem import BF16
from verify.rotary import oracle_arb, oracle_float64, oracle_mpmath
from verify.rotary.problem import LARGEST_POSITION, RotaryProblem

COVER_BATCHES, DEEP_BATCHES, BATCH = 4, 60, 50
BASES = (1.0, 2.0, 500.0, 1e4, 1e5, 1e6, 1e7, 3e38)


def adversarial_problem(seed: int) -> RotaryProblem:
    """A small rotation: positions near the ends, powers of two and multiples of pi; inputs of every size."""
    rng = np.random.default_rng(seed)
    tokens, head_dim = int(rng.integers(1, 5)), int(rng.choice([2, 6, 8, 20]))
    near_turns = np.rint(np.pi * rng.integers(1, 300_000, tokens)).astype(np.int64)
    kinds = (
        rng.integers(0, LARGEST_POSITION + 1, tokens),
        LARGEST_POSITION - rng.integers(0, 3, tokens),
        np.clip(2 ** rng.integers(0, 20, tokens) + rng.integers(-1, 2, tokens), 0, None),
        np.minimum(near_turns, LARGEST_POSITION),
        np.zeros(tokens, dtype=np.int64),
    )
    positions = kinds[int(rng.choice(len(kinds), p=[0.3, 0.2, 0.2, 0.2, 0.1]))]
    x = rng.standard_normal((1, 2, tokens, head_dim))
    if rng.integers(2):
        x = np.sign(x) * 2.0 ** rng.integers(-126, 127, size=x.shape)
    elif rng.integers(2):
        x = np.ones_like(x)
    return RotaryProblem(
        x=x.astype(BF16 if rng.integers(2) else np.float32),
        positions=positions,
        base=float(rng.choice(BASES)),
        layout="half" if rng.integers(2) else "interleaved",
        rotary_dim=None if rng.integers(2) else 2 * int(rng.integers(0, head_dim // 2 + 1)),
        inverse=bool(rng.integers(2)),
    )


def violations(case: RotaryProblem) -> list[str]:
    """Elements that ball arithmetic does not certify to be within the float64 oracle's bound."""
    found, x = oracle_float64.rotate(case), case.numbers()
    lanes = [np.arange(case.head_dim)[side] for side in case.lanes()]
    bad = []
    for at in np.ndindex(case.batch, case.tokens, case.pairs):
        batch, token, pair = at
        for head, balls in enumerate(oracle_arb.pair_balls(case, x, at)):
            for side, ball in zip(lanes, balls, strict=True):
                index = (batch, head, token, side[pair])
                distance = abs(ball - arb(float(found.out[index])))
                if not distance <= arb(float(found.error[index])):
                    bad.append(f"{index}")
    return bad


@pytest.mark.cover
@pytest.mark.parametrize("batch", range(COVER_BATCHES))
def test_bound_holds_on_adversarial_problems(batch: int) -> None:
    """Hundreds of rotations: not one element leaves its bound."""
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        assert violations(adversarial_problem(seed)) == [], f"seed {seed}"


@pytest.mark.deep
@pytest.mark.parametrize("batch", range(COVER_BATCHES, COVER_BATCHES + DEEP_BATCHES))
def test_bound_holds_on_thousands_of_problems(batch: int) -> None:
    """Thousands more."""
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        assert violations(adversarial_problem(seed)) == [], f"seed {seed}"


@pytest.mark.deep
@pytest.mark.parametrize("base", [1e4, 1e5, 1e7])
def test_bound_holds_over_the_whole_range(base: float) -> None:
    """Every 1021st position up to 2^20, all 64 pairs."""
    positions = np.arange(0, LARGEST_POSITION + 1, 1021)
    table = oracle_float64.phases(base, 128, positions)
    for token, pair in np.ndindex(len(positions), 64):
        cos, sin = oracle_arb.cos_sin(base, 128, int(positions[token]), pair)
        assert abs(cos - arb(float(table.cos[token, pair]))) <= arb(float(table.cos_error[token, pair]))
        assert abs(sin - arb(float(table.sin[token, pair]))) <= arb(float(table.sin_error[token, pair]))


@pytest.mark.parametrize("name", ["PHASE_RELATIVE", "TRIG_ERROR"])
def test_the_cases_would_show_a_bound_that_forgets_a_term(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without the phase's error, or that of cosine and sine (and no slack beside it), elements leave their bound."""
    monkeypatch.setattr(oracle_float64, "UNIT", 0.0)
    monkeypatch.setattr(oracle_float64, name, 0.0)
    if name == "TRIG_ERROR":
        monkeypatch.setattr(oracle_float64, "PHASE_RELATIVE", 0.1 * UNIT)
    assert any(violations(adversarial_problem(seed)) for seed in range(60))


def test_bound_does_not_grow_with_the_position() -> None:
    """At 2^20 the error is still a few ulp of the pair, whatever the base: phases are reduced exactly."""
    for base in (1e4, 1e5, 1e7):
        case = RotaryProblem(np.ones((1, 1, 3, 128), dtype=np.float32), np.array([3, 2**20 - 1, 2**20]), base)
        assert oracle_float64.rotate(case).error.max() < 16 * UNIT * 2


def test_frequency_parts_are_exact() -> None:
    """The parts of each frequency add up to it within 2^-110; the first two are short enough for exact products."""
    high, middle, low = oracle_float64.turns(1e7, 128)
    assert np.all(high == np.ldexp(np.rint(np.ldexp(high, 32)), -32))
    assert np.all(middle == np.ldexp(np.rint(np.ldexp(middle, 64)), -64))
    assert np.all((middle >= 0) & (middle < 2.0**-32) & (low >= 0) & (low < 2.0**-63))
    with mpmath.workdps(60):
        for pair in range(64):
            exact = mpmath.power(10, mpmath.mpf(-14 * pair) / 128) / (2 * mpmath.pi)
            assert abs(exact - mpmath.fsum(float(x[pair]) for x in (high, middle, low))) < mpmath.mpf(2) ** -110


def test_numpy_trigonometry_is_within_the_assumed_ulps() -> None:
    """float64 cos and sin on [-3.2, 3.2] keep to TRIG_ULPS in arrays of odd length and stride; exact at 0."""
    rng = np.random.default_rng(8)
    points = np.concatenate([rng.uniform(-3.2, 3.2, 3001), np.pi / 2 + rng.standard_normal(300) * 1e-9])
    points = np.concatenate([points, 2.0 ** rng.uniform(-60, 1, 800)])
    with mpmath.workdps(40):
        for stride in (1, 3):
            x = points[::stride]
            for function, exact in ((np.cos, mpmath.cos), (np.sin, mpmath.sin)):
                pairs = zip(x.tolist(), function(x).tolist(), strict=True)
                worst = max(abs(exact(a) - b) / math.ulp(b) for a, b in pairs)
                assert worst <= oracle_float64.TRIG_ULPS
    for length in (1, 7, 8, 65):
        assert np.all(np.cos(np.zeros(length)) == 1.0)
        assert np.all(np.sin(np.zeros(length)) == 0.0)


def test_backward_undoes_forward() -> None:
    """Rotating by the negative phase undoes the rotation, within the bounds (both are exact rotations)."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 1, 5, 16)).astype(np.float32)
    case = RotaryProblem(x, np.array([1, 2, 1000, 2**19, 2**20]))
    once = oracle_float64.rotate(case)
    again = oracle_float64.rotate(dataclasses.replace(case, x=once.out.astype(np.float32), inverse=True))
    moved = np.abs(once.out - once.out.astype(np.float32).astype(np.float64))
    assert np.all(np.abs(again.out - x) <= again.error + 2 * (moved.max() + once.error.max()))


def test_no_tokens() -> None:
    """A sequence without tokens gives an empty result in every tier."""
    case = RotaryProblem(np.zeros((1, 2, 0, 8), dtype=np.float32), np.zeros(0, dtype=np.int32))
    for oracle in (oracle_float64, oracle_arb, oracle_mpmath):
        assert oracle.rotate(case).out.shape == (1, 2, 0, 8)


BAD = {
    r"x must be bfloat16 or float32 .*got float64 of rank 4": {"x": np.zeros((1, 1, 2, 8))},
    r"positions must be integers, got float32": {"positions": np.zeros(2, dtype=np.float32)},
    r"positions must have shape \(2,\) or \(1, 2\), got \(3,\)": {"positions": np.zeros(3, dtype=np.int32)},
    r"positions must lie in 0 .. 1048576, got -1 .. 5": {"positions": np.array([-1, 5])},
    r"positions must lie in 0 .. 1048576, got 0 .. 1048577": {"positions": np.array([0, 2**20 + 1])},
    r"base must be finite and at least 1, got 0.5": {"base": 0.5},
    r"layout must be one of \('half', 'interleaved'\), got 'neox'": {"layout": "neox"},
    r"rotary_dim must be even and at most head_dim = 8, got 10": {"rotary_dim": 10},
    r"rotary_dim must be even and at most head_dim = 8, got 5": {"rotary_dim": 5},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_problems_are_refused(message: str) -> None:
    """Each wrong argument is named, with its value and the rule."""
    good = RotaryProblem(np.zeros((1, 1, 2, 8), dtype=np.float32), np.zeros(2, dtype=np.int32))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **BAD[message])
