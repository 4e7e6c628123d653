"""The search spaces of Gated DeltaNet: the hazards that the inverse, the gates and the state hunts must reach."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.gdn.inverse_case import InverseCase
from fuzz.gdn.layer_case import LayerCase
from fuzz.hunts import hunts
from verify.devices import BF16_UNIT_ROUNDOFF
from verify.gdn.float64_stages import convolution, rule_inputs
from verify.gdn.layout import convolved_rows
from verify.gdn.problem import PADDED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fuzz.case import Case
    from verify.gdn.problem import GdnProblem

GROUP = 8
"""Rows that a copy of the kernel moves together."""

CHUNK, TILE = 64, 128
LEAST_EXP = -88.0
"""Below it, exp is no normal FP32 number; beyond its negative, exp overflows."""

SMALLEST_NORMAL, LARGEST = 2.0**-126, 2.0**127
EPSILON = 1e-6
MOST_DRAWS = 40
"""Batches of draws: far more than any hazard has needed."""


def drawn(hunt: str, number: int, count: int = 30, buckets: Sequence[str] = ()) -> list[Case]:
    """What Hypothesis draws first, without shrinking or a database."""
    found: list[Case] = []
    space = hunts()[hunt]

    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @seed(number)
    @given(space.cases(space.chosen(buckets)))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def missing(hunt: str, wanted: set[str], hazards: Callable[[Case], set[str]], buckets: Sequence[str] = ()) -> set[str]:
    """The hazards that no draw from these buckets (none named: all) has, once many have been tried."""
    left = set(wanted)
    for number in range(MOST_DRAWS):
        for case in drawn(hunt, number, buckets=buckets):
            left -= hazards(case)
        if not left:
            break
    return left


INVERSE_HAZARDS = {
    "one key, write strength 1: exact", "one key, constant write strength below 1", "one key, varied write strengths",
    "keys that differ by a thousandth", "keys that differ by a tenth", "signs that alternate", "a period of a few keys",
    "a low rank", "write strengths up to 2", "write strength 2 everywhere", "weak decay", "a reset at every token",
    "decays that vary", "operands as pairs", "BF16 operands",
}  # fmt: skip


def inverse_hazards(case: Case) -> set[str]:
    """What is special about a matrix."""
    inputs = case.inputs
    assert isinstance(inputs, InverseCase)
    keys, beta, decays = inputs.key_words().astype(np.float64), inputs.beta(), inputs.decays()
    period = inputs.period
    one, constant = bool((keys == keys[0]).all()), bool((beta == beta[0]).all())
    apart = float(np.abs(keys - keys[0]).max())
    # Rounding to BF16 moves a matrix of low rank by at most u in the Frobenius norm, relative, and so each of its
    # singular values by no more than that (Weyl): those below it may be 0.
    rank = int(np.linalg.matrix_rank(keys, tol=BF16_UNIT_ROUNDOFF * float(np.linalg.norm(keys))))
    signs = {
        "one key, write strength 1: exact": one and constant and beta[0] == 1.0,
        "one key, constant write strength below 1": one and constant and 0.0 < beta[0] < 1.0,
        "one key, varied write strengths": one and not constant,
        "keys that differ by a thousandth": 0.0 < apart < 2.0**-7,
        "keys that differ by a tenth": 2.0**-5 < apart < 2.0**-2,
        "signs that alternate": not one and bool((keys[::2] == keys[0]).all() and (keys[1::2] == -keys[0]).all()),
        "a period of a few keys": period in (2, 3, 4) and bool((keys[period:] == keys[:-period]).all()),
        "a low rank": not one and rank < min(keys.shape) and inputs.family == "low-rank",
        "write strengths up to 2": 1.0 < float(beta.max()) <= 2.0,
        "write strength 2 everywhere": bool((beta == 2.0).all()),
        "weak decay": bool(((decays > 0.99) & (decays < 1.0)).all()),
        "a reset at every token": not decays.any(),
        "decays that vary": len(np.unique(decays)) > 1,
        "operands as pairs": case.asked("precision") == "bf16x3",
        "BF16 operands": case.asked("precision") == "bf16",
    }  # fmt: skip
    return {name for name, here in signs.items() if here}


def test_inverse_space_reaches_each_hazard() -> None:
    """Repeated, near-duplicate, alternating, periodic and low-rank keys; strengths, decays and precisions."""
    assert not missing("inverse", INVERSE_HAZARDS, inverse_hazards)


STATE_HAZARDS = {
    "shorter than the convolution", "empty, its state handed on", "empty, its slot kept", "starts off the 8-row grid",
    "two sequences in one group of 8 rows", "over two tiles", "a tail of up to 15 rows", "written nowhere",
    "reads one slot, writes another", "an initial state that does not count", "an initial state that counts",
    "NaN in what is not read", "NaN in the padding", "no padding", "NaN in a neighbour's tokens",
    "NaN in a neighbour's conv state", "NaN in a neighbour's state", "two taps", "four taps", "eight taps, a bias",
    "operands as pairs", "grouped heads",
}  # fmt: skip


def state_hazards(case: Case) -> set[str]:
    """What is special about how a call is packed, and about its slots."""
    inputs = case.inputs
    assert isinstance(inputs, LayerCase)
    problem: GdnProblem = case.problem
    bounds, lengths = problem.sequences.boundaries, problem.sequences.lengths
    pairs = list(zip(inputs.reads, inputs.writes, lengths.tolist(), strict=True))
    counted = list(zip(inputs.initial, inputs.reads, strict=True))
    tokens = int(bounds[-1])
    read = {slot for on, slot in counted if on}
    unread = [slot for slot in range(len(problem.state)) if slot not in read]
    inner = [int(n) for n in bounds[1:-1] if 0 < n < tokens]
    signs = {
        "shorter than the convolution": bool(((lengths > 0) & (lengths < problem.width - 1)).any()),
        "empty, its state handed on": any(not n and r != w != PADDED for r, w, n in pairs),
        "empty, its slot kept": any(not n and r == w for r, w, n in pairs),
        "starts off the 8-row grid": any(n % GROUP for n in inner),
        "two sequences in one group of 8 rows": any(
            a // GROUP == b // GROUP and a % GROUP and b > a for a, b in itertools.pairwise([*inner, tokens - 1])
        ),
        "over two tiles": bool((lengths > TILE).any()),
        "a tail of up to 15 rows": bool((lengths % 16 != 0).any()),
        "reads one slot, writes another": any(n and r != w != PADDED for r, w, n in pairs),
        "written nowhere": any(n and w == PADDED for _, w, n in pairs),
        "an initial state that does not count": any(not on for on, _ in counted),
        "an initial state that counts": any(on for on, _ in counted),
        "NaN in what is not read": any(np.isnan(problem.state[slot]).all() for slot in unread),
        "NaN in the padding": tokens < problem.tokens and bool(np.isnan(problem.qkv[tokens:].astype(np.float32)).all()),
        "no padding": tokens == problem.tokens,
        "two taps": problem.width == 2,
        "four taps": problem.width == 4,
        "eight taps, a bias": problem.width == 8 and problem.bias is not None,
        "operands as pairs": case.asked("precision") == "bf16x3",
        "grouped heads": problem.heads[0] < problem.heads[1],
    }
    if inputs.spoilt >= 0 and lengths[inputs.spoilt] and (lengths > 0).sum() > 1:
        signs[f"NaN in a neighbour's {inputs.spoilt_by}"] = spoilt_in_the_bits(problem, inputs)
    return {name for name, here in signs.items() if here}


def spoilt_in_the_bits(problem: GdnProblem, inputs: LayerCase) -> bool:
    """Whether the NaN that a case speaks of is there, and reaches its own sequence."""
    slot = problem.sequences.initial_slot(inputs.spoilt)
    if inputs.spoilt_by == "tokens":
        return bool(np.isnan(problem.qkv[problem.sequences.span(inputs.spoilt)].astype(np.float32)).all())
    held = {"state": problem.state, "conv state": problem.conv_state}[inputs.spoilt_by]
    return slot is not None and bool(np.isnan(held[slot].astype(np.float32)).all())


def test_state_space_reaches_each_hazard() -> None:
    """Short, empty and unaligned sequences, slots of every kind, poison in the padding, in slots and in neighbours."""
    assert not missing("state", STATE_HAZARDS, state_hazards)


BARE_HAZARDS = {"zero keys, no epsilon", "squares that underflow, no epsilon", "no activation"}
DOUBLED_HAZARDS = {"write strength above 1", "operands as pairs"}
GATE_HAZARDS = {
    "exp(a_log) overflows, decay 1", "exp(a_log) overflows, hard reset", "no decay at all", "no decay at some tokens",
    "a hard reset", "a huge decay", "a chunk decays below exp's range", "one token decays below exp's range",
    "write strength 0 to FP32", "write strength 1", "identical keys", "epsilon outweighs the squares",
    "squares close to overflow", "silu cancels", "silu at -18 and below",
}  # fmt: skip


def gate_hazards(case: Case) -> set[str]:
    """What is special about the gates and norms of a call's first sequence, from what the delta rule reads."""
    problem: GdnProblem = case.problem
    if not problem.sequences.lengths[0]:
        return set()
    rule = rule_inputs(problem, 0)
    g, beta = rule.g.value[:, 0], rule.beta.value[:, 0]
    rows = convolution(convolved_rows(problem, 0), problem).value
    lanes = problem.heads[0] * problem.heads[2]
    keys = rows[:, lanes : 2 * lanes]
    if problem.activation == "silu":
        with np.errstate(over="ignore"):
            keys = keys / (1.0 + np.exp(-keys))
    squares = (keys * keys).sum(axis=1)
    chunks = [g[start : start + CHUNK].sum() for start in range(0, len(g), CHUNK)]
    with np.errstate(over="ignore"):
        overflows = bool(np.isinf(np.exp(problem.a_log)).any()) or float(problem.a_log.max()) >= -LEAST_EXP
    signs = {
        "exp(a_log) overflows, decay 1": overflows and bool((g > -(2.0**-24)).all()),
        "exp(a_log) overflows, hard reset": overflows and bool((g < LEAST_EXP).any()),
        "no decay at all": len(g) > 1 and not g.any(),
        "no decay at some tokens": bool((g == 0.0).any() and (g < 0.0).any()),
        "a hard reset": bool(np.isneginf(g).any()),
        "a huge decay": bool(((g < -600.0) & np.isfinite(g)).any()),
        "a chunk decays below exp's range": any(LEAST_EXP > total > -np.inf for total in chunks)
        and bool((g > LEAST_EXP).all()),
        "one token decays below exp's range": bool((g < LEAST_EXP).any() and (g > -1.0).any()),
        "write strength 0 to FP32": bool((beta < 2.0**-19).any()),
        "write strength 1": bool((beta == 1.0).any()),
        "write strength above 1": bool((beta > 1.5).any()),
        "identical keys": len(rule.k.value) > 8 and bool((np.abs(rule.k.value[8:] - rule.k.value[8]) < 2.0**-8).all()),
        "zero keys, no epsilon": problem.norm_eps == 0.0 and bool((squares == 0.0).any()),
        "epsilon outweighs the squares": problem.norm_eps == EPSILON and bool((squares < EPSILON / 16).any()),
        "squares that underflow, no epsilon": problem.norm_eps == 0.0
        and bool(((squares > 0.0) & (squares < SMALLEST_NORMAL)).any()),
        "squares close to overflow": bool(((squares > LARGEST * 2.0**-8) & (squares <= LARGEST)).any()),
        "silu cancels": problem.activation == "silu" and bool(((rows < -10.0) & (rows > -16.0)).any()),
        "silu at -18 and below": problem.activation == "silu" and bool((rows < -18.0).any()),
        "no activation": problem.activation == "none",
        "operands as pairs": case.asked("precision") == "bf16x3",
    }
    return {name for name, here in signs.items() if here}


def test_gate_space_reaches_each_hazard() -> None:
    """Gates at their ends, keys that meet the norm's and the activation's ends, strengths up to 2."""
    assert not missing("gates", GATE_HAZARDS, gate_hazards, ("one-128",))
    assert not missing("gates", BARE_HAZARDS, gate_hazards, ("bare-128",))
    assert not missing("gates", DOUBLED_HAZARDS, gate_hazards, ("doubled-128",))


@pytest.mark.parametrize("hunt", ["gates", "state"])
def test_a_bucket_compiles_once(hunt: str) -> None:
    """Everything that selects a compiled kernel is the bucket's: padding keeps to the sizes that it is filled up to."""
    found: dict[str, set[object]] = {}
    space = hunts()[hunt]
    for case in drawn(hunt, 1, 20):
        inputs, problem = case.inputs, case.problem
        assert isinstance(inputs, LayerCase)
        shape = (inputs.heads, inputs.width, inputs.doubled)
        bucket = next(one for one in space.buckets.values() if (one.heads, one.width, one.doubled) == shape)
        filled = -(-problem.tokens // TILE)
        found.setdefault(bucket.name, set()).add(
            (filled, inputs.biased, inputs.norm, inputs.activation, case.asked("precision"))
        )
    assert {name: len(kinds) for name, kinds in found.items()} == dict.fromkeys(space.buckets, 1)
