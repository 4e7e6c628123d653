"""The contract of the whole chain: the emulated kernel stays within it, in both modes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from verify.devices import CPU_INTERPRET
from verify.gdn import oracle_float64
from verify.gdn.cases import DECAYS, GdnCase, every_family
from verify.gdn.contract import contract_bound
from verify.gdn.contract_recurrent import recurrent_bound
from verify.gdn.inverse_steps import InverseSteps
from verify.gdn.power import powerless
from verify.gdn.problem import GdnProblem, Problem
from verify.gdn.steps import (
    BF16_STEPS,
    KNOWN_STEPS,
    RESIDUAL_STEPS,
    SPLIT_STEPS,
    ChunkSteps,
    decays,
    run,
    run_recurrent,
    silu,
)

VARIANTS = {
    "bf16": BF16_STEPS,
    "bf16x3": SPLIT_STEPS,
    "bf16, known operands": KNOWN_STEPS,
    "bf16, known operands, fp32 out": dataclasses.replace(KNOWN_STEPS, out="fp32"),
    "bf16 inverse x3": ChunkSteps(InverseSteps("bf16x3")),
    "sigmoid, rounded copies, fp32 out": ChunkSteps(
        InverseSteps("bf16x3", "multiply"), "bf16x3", silu="sigmoid", convolution="bf16", out="fp32"
    ),
    "residual first": RESIDUAL_STEPS,
    "residual first, bf16, fp32 out": dataclasses.replace(BF16_STEPS, updates="residual", out="fp32"),
    "gates in pieces, snapped": dataclasses.replace(SPLIT_STEPS, decay="pieces", snap=8),
    "cumulative gates, snapped": dataclasses.replace(SPLIT_STEPS, decay="cumulative", snap=8),
}


def check(problem: Problem, steps: ChunkSteps, name: str) -> None:
    """Every output and state of the emulated kernel lies within its bound."""
    reference = oracle_float64.gdn_chunked(problem)
    bound, found = contract_bound(problem, steps, CPU_INTERPRET), run(problem, steps)
    inside = bound.inside_out[:, :, None] & np.ones_like(bound.out, dtype=bool)
    error = np.abs(found.out.astype(np.float64) - reference.out)
    assert (error <= bound.out + reference.out_error)[inside].all(), name
    error = np.abs(found.state.astype(np.float64) - reference.state)
    inside = bound.inside_state[:, :, None, None] & np.ones_like(bound.state, dtype=bool)
    assert (error <= bound.state + reference.state_error)[inside].all(), name


@pytest.mark.parametrize(
    "variant", ["bf16", "bf16x3", "bf16, known operands, fp32 out", "gates in pieces, snapped", "residual first"]
)
def test_contract_holds(variant: str) -> None:
    """A few of all families, two sequences with a short tail; small heads."""
    check_sample(variant, 167)


@pytest.mark.deep
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_contract_holds_on_more(variant: str) -> None:
    """The same on many more."""
    check_sample(variant, 5)


def check_sample(variant: str, stride: int) -> None:
    """Every `stride`-th family, as delta rule and as layer."""
    for number, family in enumerate(every_family()):
        if number % stride:
            continue
        case = dataclasses.replace(family, lengths=(70, 3), heads=(1, 1, 8, 4))
        if variant.startswith("cumulative") and case.decay not in ("0", "mild", "partly 0"):
            continue
        check(case.layer(negative=case.beta in ("2", "1 to 2")), VARIANTS[variant], case.name)
        check(case.rule(), VARIANTS[variant], case.name)


@pytest.mark.deep
@pytest.mark.parametrize("variant", ["bf16", "bf16x3", "bf16, known operands"])
def test_contract_holds_on_every_family(variant: str) -> None:
    """Every family, with 128 x 128 states."""
    for number, family in enumerate(every_family(seed=7)):
        case = dataclasses.replace(family, lengths=(130, 5), heads=(1, 1, 128, 128))
        problem: Problem = case.layer(negative=case.beta in ("2", "1 to 2")) if number % 2 else case.rule()
        check(problem, VARIANTS[variant], case.name)


def check_recurrent(stride: int) -> None:
    """The FP32 recurrence stays within its contract on every `stride`-th family, decay per channel included."""
    for number, family in enumerate(every_family()):
        if number % stride:
            continue
        case = dataclasses.replace(family, lengths=(20, 0, 1), heads=(1, 2, 8, 4), per_channel=number % 3 == 0)
        problems: tuple[Problem, ...] = (case.rule(), case.layer(negative=case.beta in ("2", "1 to 2")))
        for problem in problems:
            reference = oracle_float64.gdn(problem)
            for steps in (BF16_STEPS, VARIANTS["sigmoid, rounded copies, fp32 out"]):
                bound, found = recurrent_bound(problem, steps, CPU_INTERPRET), run_recurrent(problem, steps)
                assert bound.inside_out.all()
                for name in ("out", "state"):
                    error = np.abs(getattr(found, name).astype(np.float64) - getattr(reference, name))
                    room = getattr(bound, name) + getattr(reference, f"{name}_error")
                    assert (error <= room).all(), (case.name, name)


def test_recurrent_contract_holds() -> None:
    """A few of all families."""
    check_recurrent(41)


@pytest.mark.deep
def test_recurrent_contract_holds_on_every_family() -> None:
    """All of them."""
    check_recurrent(1)


def test_recurrent_contract_is_tight() -> None:
    """Decode keeps FP32's accuracy: the state's bound is below BF16's unit roundoff, on the worst keys too."""
    problem = GdnCase("identical", "1", "0", seed=2, lengths=(16,), heads=(1, 1, 128, 16)).layer()
    reference = oracle_float64.gdn(problem)
    bound = recurrent_bound(problem, BF16_STEPS, CPU_INTERPRET)
    assert bound.state.max() <= 2.0**-8 * np.abs(reference.state).max()


@pytest.mark.parametrize("decay", list(DECAYS))
def test_bounds_are_finite_for_every_decay(decay: str) -> None:
    """Hard resets and the largest |g| included, with hi/lo products."""
    problem = GdnCase("random", "up to 1", decay, seed=2, lengths=(80,), heads=(1, 1, 16, 8)).layer()
    bound = contract_bound(problem, SPLIT_STEPS, CPU_INTERPRET)
    assert np.isfinite(bound.out).all()
    assert np.isfinite(bound.state).all()
    assert bound.inside_out.all()


def test_hi_lo_is_tight_on_random_keys() -> None:
    """With hi/lo products, the output's own rounding to BF16 uses most of the bound on random keys."""
    problem = GdnCase("random", "up to 1", "mild", seed=1, lengths=(64,), heads=(1, 1, 128, 64)).layer()
    reference = oracle_float64.gdn_chunked(problem)
    bound = contract_bound(problem, SPLIT_STEPS, CPU_INTERPRET)
    share = np.abs(run(problem, SPLIT_STEPS).out.astype(np.float64) - reference.out) / bound.out
    assert 0.5 < share.max() <= 1.0


def test_bf16_has_power_without_decay() -> None:
    """Three chunks of random keys without decay: with known operands no trivial answer is accepted."""
    problem = GdnCase("random", "up to 1", "0", seed=1, lengths=(192,), heads=(1, 1, 64, 4)).layer()
    reference = oracle_float64.gdn_chunked(problem)
    bounds = [contract_bound(problem, steps, CPU_INTERPRET) for steps in (BF16_STEPS, KNOWN_STEPS)]
    assert not powerless(problem, reference, bounds[1])
    assert bounds[1].state.max() < bounds[0].state.max()


def test_one_huge_gate_spoils_nothing() -> None:
    """g = -1e30 once: the bound of the later tokens is what it is with a hard reset there."""
    case = GdnCase("random", "up to 1", "mild", seed=5, lengths=(64,), heads=(1, 1, 16, 8))
    problem = case.rule()
    assert problem.g is not None
    bounds = []
    for value in (-1e30, -np.inf):
        g = problem.g.copy()
        g[20] = value
        bounds.append(contract_bound(dataclasses.replace(problem, g=g), SPLIT_STEPS, CPU_INTERPRET))
    assert (bounds[0].out[21:] <= bounds[1].out[21:] * (1.0 + 2.0**-10)).all()


def test_differences_of_cumulative_sums_do_break_it() -> None:
    """A kernel that takes differences of cumulative sums loses the tokens after a huge gate: outside the contract."""
    case = GdnCase("random", "up to 1", "mild", seed=5, lengths=(64,), heads=(1, 1, 16, 8))
    problem = case.rule()
    assert problem.g is not None
    g = problem.g.copy()
    g[20] = -1e6
    problem = dataclasses.replace(problem, g=g)
    reference = oracle_float64.gdn_chunked(problem)
    bound = contract_bound(problem, SPLIT_STEPS, CPU_INTERPRET)
    found = run(problem, dataclasses.replace(SPLIT_STEPS, decay="cumulative"))
    assert (np.abs(found.out.astype(np.float64) - reference.out) > bound.out + reference.out_error).any()


def test_sums_of_segments() -> None:
    """Each D_ij is the exponential of its own sum; a hard reset gives 0 across it and nothing elsewhere."""
    g = np.array([-0.5, -np.inf, -0.25, -0.125], np.float32)
    d, from_start, to_end = decays(g, "segments")
    assert d[0, 0] == 1.0
    assert d[2, 0] == 0.0
    assert abs(d[3, 1] - np.exp(np.float32(-0.375))) <= 2.0**-23
    assert from_start[0] == np.exp(np.float32(-0.5))
    assert (from_start[1:] == 0.0).all()
    assert (to_end == d[3]).all()


@pytest.mark.parametrize("form", ["tanh", "sigmoid"])
def test_silu_forms(form: str) -> None:
    """The tanh form errs absolutely where 1 + tanh cancels: right at -10 to 6e-4, worthless below -18."""
    y = np.array([-20.0, -10.0, 0.0, 3.0], np.float32)
    exact = y.astype(np.float64) / (1.0 + np.exp(-y.astype(np.float64)))
    relative = np.abs(silu(y, form) - exact)[[0, 1, 3]] / np.abs(exact[[0, 1, 3]])
    assert relative[2] < 2.0**-20
    assert (relative[0] > 0.5) == (form == "tanh")


KDA = {
    "bf16": BF16_STEPS,
    "bf16x3": SPLIT_STEPS,
    "bf16, known operands": KNOWN_STEPS,
    "pairs": dataclasses.replace(SPLIT_STEPS, channels="pairs", out="fp32"),
}


def check_channels(variant: str, stride: int, heads: tuple[int, int, int, int]) -> None:
    """Every `stride`-th family with a decay per key channel."""
    for number, family in enumerate(every_family(seed=3)):
        if number % stride:
            continue
        case = dataclasses.replace(family, lengths=(70, 0, 17), heads=heads, per_channel=True)
        check(case.layer(negative=case.beta in ("2", "1 to 2")), KDA[variant], case.name)
        check(case.rule(), KDA[variant], case.name)


@pytest.mark.parametrize("variant", ["bf16", "pairs"])
def test_contract_holds_with_a_decay_per_channel(variant: str) -> None:
    """KDA: a few of all families."""
    check_channels(variant, 167, (1, 1, 8, 4))


@pytest.mark.deep
@pytest.mark.parametrize("variant", list(KDA))
def test_contract_holds_with_a_decay_per_channel_on_more(variant: str) -> None:
    """KDA: many families, and states of 64 x 32."""
    check_channels(variant, 5, (1, 2, 8, 4))
    check_channels(variant, 61, (1, 1, 64, 32))


def test_equal_channels_are_one_decay() -> None:
    """A decay per channel that is the same in all of them: nearly the head's own bound, and the same function."""
    case = GdnCase("random", "up to 1", "mild", seed=4, lengths=(70,), heads=(1, 1, 16, 4))
    head = case.rule()
    assert head.g is not None
    channels = dataclasses.replace(head, g=np.repeat(head.g[:, :, None], 16, axis=2))
    whole, split = (contract_bound(problem, SPLIT_STEPS, CPU_INTERPRET) for problem in (head, channels))
    assert (split.out <= 2.0 * whole.out).all()
    check(channels, SPLIT_STEPS, case.name)


def test_bound_of_channels_is_finite_where_factored_exponents_overflow() -> None:
    """Strong decay: exp(-G) is not finite in FP32, the contract's bound is, and its algorithm stays within it."""
    problem = GdnCase(
        "random", "up to 1", "strong", seed=4, lengths=(64,), heads=(1, 1, 16, 4), per_channel=True
    ).rule()
    bound = contract_bound(problem, SPLIT_STEPS, CPU_INTERPRET)
    assert np.isfinite(bound.out).all()
    assert problem.g is not None
    total = np.cumsum(problem.g[:, 0], axis=0, dtype=np.float32)
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp(-total)).any()
    check(problem, SPLIT_STEPS, "strong")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("operands", "some"),
        ("precision", "fp8"),
        ("silu", "exp"),
        ("convolution", "fft"),
        ("decay", "x"),
        ("out", "fp16"),
        ("updates", "last"),
    ],
)
def test_unknown_steps_are_refused(field: str, value: str) -> None:
    """By name, value and rule."""
    with pytest.raises(ValueError, match=f"{field} must be one of .*, got '{value}'"):
        ChunkSteps(**{field: value})  # type: ignore[arg-type]


def test_the_residual_form_has_one_decay_per_head() -> None:
    """It multiplies V by decays: with one per channel of the key, emulation and contract refuse it."""
    problem = GdnCase("random", "1", "mild", seed=1, lengths=(3,), heads=(1, 1, 8, 4), per_channel=True).rule()
    for refusing in (
        lambda: run(problem, RESIDUAL_STEPS),
        lambda: contract_bound(problem, RESIDUAL_STEPS, CPU_INTERPRET),
    ):
        with pytest.raises(ValueError, match="updates must be 'products' where decays are per channel, got 'residual'"):
            refusing()


def test_outputs_of_the_residual_form_are_those_of_bf16_products() -> None:
    """They err by more than products of pairs may, and the bound says so."""
    problem = GdnCase("random", "up to 1", "mild", seed=3, lengths=(64,), heads=(1, 1, 32, 8)).rule()
    reference = oracle_float64.gdn_chunked(problem)
    single = dataclasses.replace(RESIDUAL_STEPS, out="fp32")
    pairs = dataclasses.replace(SPLIT_STEPS, out="fp32")
    bounds = {steps: contract_bound(problem, steps, CPU_INTERPRET) for steps in (single, pairs)}
    error = np.abs(run(problem, single).out - reference.out)
    assert error.max() > bounds[pairs].out.max()
    assert (error <= bounds[single].out + reference.out_error).all()


@pytest.mark.parametrize("tile", [0, 32, 100])
def test_tiles_are_whole_chunks(tile: int) -> None:
    """By name, value and rule."""
    with pytest.raises(ValueError, match=f"tile must be a multiple of 64, got {tile}"):
        ChunkSteps(tile=tile)


def test_outside_the_domain() -> None:
    """A sum of squares that overflows FP32 is outside, and so are its chunk (or tile) and all after it in its head."""
    case = GdnCase("random", "up to 1", "mild", seed=3, lengths=(140,), heads=(1, 1, 4, 2))
    problem = case.layer()
    qkv = problem.qkv.copy()
    qkv[68, :4] = 1e20
    problem = dataclasses.replace(problem, qkv=qkv)
    wide = contract_bound(problem, dataclasses.replace(SPLIT_STEPS, tile=128), CPU_INTERPRET)
    assert not wide.inside_out.any()
    bound = contract_bound(problem, SPLIT_STEPS, CPU_INTERPRET)
    assert bound.inside_out[:64].all()
    assert not bound.inside_out[64:].any()
    assert not bound.inside_state.any()
    assert isinstance(problem, GdnProblem)
