"""Problems refuse what makes no sense, by name, value and rule; and say what a non-finite input may touch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gdn_problems import small_case, violations

from verify.gdn import oracle_arb, oracle_float64, oracle_mpmath
from verify.gdn.cases import BETAS, DECAYS, KEYS, GdnCase
from verify.gdn.layout import unpromised
from verify.gdn.problem import BF16, GdnProblem, Sequences, final_conv_state, widen


def test_sequences_are_checked() -> None:
    """Boundaries, slots, flags and accepted counts."""
    two = np.array([0, 1])
    flags = np.ones(2, dtype=bool)
    for bounds in ([1, 2, 3], [0, 2, 1], [[0, 1, 2]]):
        with pytest.raises(ValueError, match="boundaries must be cumulative lengths from 0"):
            Sequences(np.array(bounds), two, two, flags)
    with pytest.raises(ValueError, match="read_slots must have one entry for each of 2 sequences"):
        Sequences(np.array([0, 1, 2]), two[:1], two, flags)
    with pytest.raises(ValueError, match=r"write_slots must differ from each other, got \[1, 1\]"):
        Sequences(np.array([0, 1, 2]), two, np.array([1, 1]), flags)
    with pytest.raises(ValueError, match=r"accepted must lie in 0..length of each sequence, got \[1, 2\]"):
        Sequences(np.array([0, 1, 2]), two, two, flags, np.array([1, 2]))
    Sequences(np.array([0, 1, 2]), two, np.array([-1, -1]), flags)  # two padded entries


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("q", np.zeros((8, 1, 4)), "q must be BF16 or FP32 of rank 3"),
        ("k", np.zeros((8, 1, 5), np.float32), "q, k, v must agree in tokens"),
        ("beta", np.zeros((8, 3), np.float32), r"beta must be BF16 or FP32 \[8, 2\]"),
        ("g", np.zeros((8, 1), np.float32), r"g must be BF16 or FP32 \[8, 2\]"),
        ("state", np.zeros((2, 2, 4, 4), np.float32), r"state must be BF16 or FP32 \[2, 2, 4, 3\]"),
        ("scale", float("nan"), "scale must be finite, got nan"),
        ("sequences", Sequences.packed([9]), "boundaries must end within 8 tokens"),
        ("sequences", Sequences.packed([1, 1, 1]), "read_slots must be -1 or below 2"),
    ],
)
def test_rules_are_checked(field: str, value: object, message: str) -> None:
    """Every argument of the delta rule's problem."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(small_case().rule(), **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("taps", np.zeros((4, 3), np.float32), r"taps must be BF16 or FP32 \[4, 14\]"),
        ("bias", np.zeros(3, np.float32), r"bias must be BF16 or FP32 \[14\]"),
        ("a", np.zeros((8, 3), np.float32), r"a must be BF16 or FP32 \[8, 2\]"),
        ("conv_state", np.zeros((2, 3, 14), np.float32), "conv_state must have the dtype of qkv, bfloat16"),
        ("activation", "relu", "activation must be one of silu, none, got 'relu'"),
        ("norm_eps", -1.0, "norm_eps must be None, or finite and not negative, got -1.0"),
        ("beta_scale", float("inf"), "beta_scale must be finite, got inf"),
        ("heads", (2, 3, 4, 3), "n_v must be a multiple of n_kq, got 3 and 2"),
    ],
)
def test_layers_are_checked(field: str, value: object, message: str) -> None:
    """Every argument of a layer's problem."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(small_case().layer(), **{field: value})  # type: ignore[arg-type]


def test_subnormal_inputs_are_zero() -> None:
    """As on a device that flushes them."""
    words = np.array([2.0**-130, -(2.0**-127), 2.0**-126, 1.0], np.float32)
    assert widen(words).tolist() == [0.0, 0.0, 2.0**-126, 1.0]
    assert widen(words.astype(BF16)).tolist() == [0.0, 0.0, 2.0**-126, 1.0]


@pytest.mark.parametrize("array", ["q", "k", "v", "beta", "g", "state"])
def test_nan_touches_what_it_may_and_nothing_else(array: str) -> None:
    """One NaN in each input: the same outputs and states become NaN in every tier, all others stay what they were."""
    problem = small_case().rule()
    poisoned = np.array(getattr(problem, array))
    poisoned[(1, 0)] = np.nan
    changed = dataclasses.replace(problem, **{array: poisoned})
    clean, odd = oracle_float64.gdn(problem), oracle_float64.gdn(changed)
    out, state = unpromised(changed)
    assert (np.isnan(odd.out) == out).all()
    assert (odd.out[~out] == clean.out[~out]).all()
    assert (odd.state[~state] == clean.state[~state]).all()
    assert out.any()
    # Sequence 0 holds tokens 0..2; slot 1 belongs to sequence 1.
    assert not out[3:].any() if array != "state" else not out[:3].any()
    assert violations(odd, oracle_arb.gdn(changed)) == 0
    assert violations(odd, oracle_mpmath.gdn(changed)) == 0


def test_a_hard_reset_is_no_taint() -> None:
    """g = -inf, and gate logits of +-inf, are ordinary inputs."""
    problem = small_case(decay="resets").rule()
    assert problem.g is not None
    assert np.isneginf(problem.g).any()
    assert not unpromised(problem)[0].any()
    layer = small_case().layer()
    a = layer.a.copy()
    a[2], a[4] = np.inf, -np.inf
    assert not unpromised(dataclasses.replace(layer, a=a))[0].any()


def test_nan_in_a_projection_reaches_width_tokens() -> None:
    """The convolution carries it to the next width - 1 tokens of its own sequence."""
    problem = small_case(lengths=(9, 3)).layer()
    qkv = problem.qkv.copy()
    qkv[2, 0] = np.nan  # a channel of q
    out, state = unpromised(dataclasses.replace(problem, qkv=qkv))
    assert np.flatnonzero(out.any(axis=(1, 2))).tolist() == [2, 3, 4, 5]
    assert not state.any()


def test_final_convolution_states() -> None:
    """The last width - 1 of state and accepted tokens; short sequences keep a part of the old state."""
    problem = small_case(lengths=(2, 5)).layer()
    after = final_conv_state(problem)
    assert (after[0] == np.concatenate([problem.conv_state[0, 2:], problem.qkv[:2]])).all()
    assert (after[1] == problem.qkv[4:7]).all()
    fresh = dataclasses.replace(problem.sequences, has_initial=np.zeros(2, dtype=bool))
    after = final_conv_state(dataclasses.replace(problem, sequences=fresh))
    assert (after[0, :1].astype(np.float64) == 0.0).all()


def test_cases_are_what_they_say() -> None:
    """A case is its names and seed: the same twice; unit keys have norms of at most 1.0079 in BF16."""
    case = GdnCase("norms-above-one", "1", "0", seed=1, lengths=(50,), heads=(1, 1, 64, 4))
    first, second = case.rule(), case.rule()
    assert (first.k == second.k).all()
    norms = np.linalg.norm(first.k[:, 0].astype(np.float64), axis=1)
    assert norms.max() > 1.0
    assert (norms**2).max() <= 1.0079
    assert len(KEYS) * len(BETAS) * len(DECAYS) == 336
    assert isinstance(case.layer(), GdnProblem)
