"""The fused layer against the judge: outputs, states and convolution states, packed in every way."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from verify.gdn.cases import BETAS, DECAYS, KEYS, GdnCase
from verify.gdn.inverse_steps import PRECISIONS
from verify.gdn.open_cases import OPEN_CASES
from verify.gdn.problem import BF16, GdnProblem, Sequences
from verify.subjects.gdn import JudgedGdn, judge_gdn_subject
from verify.subjects.gdn_ours import BF16_MODE, SPLIT_MODE, lacking, run_flywheel_gdn
from verify.verdict import Verdict

if TYPE_CHECKING:
    from verify.gdn.judge import GdnResult

HEADS = (1, 2, 128, 128)
LENGTHS = (13, 0, 3, 1, 130, 20)
SUBJECTS = {"bf16": BF16_MODE, "bf16x3": SPLIT_MODE}


def problem(lengths: tuple[int, ...] = LENGTHS, seed: int = 1, **changes: Any) -> GdnProblem:
    """A layer call of one shape, so that the tests share compiled kernels."""
    case = GdnCase("near-duplicate", "up to 1", "mild", seed=seed, lengths=lengths, heads=HEADS)
    return dataclasses.replace(case.layer(), **changes)


def accepted(found: JudgedGdn) -> None:
    """Within the bound; a case that has no power must still lie within it."""
    assert found.judgement.verdict is Verdict.PASS, found.judgement.reason


def same(a: GdnResult, b: GdnResult) -> None:
    """Bit for bit."""
    assert a.conv_state is not None
    assert b.conv_state is not None
    assert a.out is not None
    assert b.out is not None
    for x, y in ((a.out, b.out), (a.conv_state, b.conv_state)):
        assert np.array_equal(x.view(np.uint16), y.view(np.uint16))
    assert np.array_equal(a.state.view(np.uint32), b.state.view(np.uint32))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("bf16x3", marks=pytest.mark.deep)])
def test_packed_sequences_within_the_bound(precision: str) -> None:
    """Six sequences, one empty, three in one 8-row group, one of three chunks: outputs and all states are right."""
    accepted(judge_gdn_subject(SUBJECTS[precision], problem()))


def test_other_lengths_need_no_other_kernel() -> None:
    """The same shapes with other lengths, slots apart for reading and writing, some without an initial state."""
    given = problem((40, 7, 1, 1, 90, 25), seed=3)
    sequences = Sequences(
        given.sequences.boundaries,
        np.array([0, 2, 1, 4, -1, 4]),
        np.array([0, 2, 1, -1, 3, 5]),
        np.array([True, True, False, True, True, True]),
    )
    accepted(judge_gdn_subject(BF16_MODE, dataclasses.replace(given, sequences=sequences)))


def poisoned(given: GdnProblem, tokens: slice, slots: list[int]) -> GdnProblem:
    """NaN and infinities in some tokens and in some slots."""
    changed = {name: getattr(given, name).copy() for name in ("qkv", "b", "a", "state", "conv_state")}
    for name in ("qkv", "b", "a"):
        changed[name][tokens] = np.nan
        changed[name][tokens.start] = np.inf
    for name in ("state", "conv_state"):
        changed[name][slots] = np.nan
    return dataclasses.replace(given, **changed)


def test_nan_of_a_neighbour_reaches_nobody() -> None:
    """A sequence of NaN in the middle of an 8-row group, with NaN in its slots: the others are bitwise as without."""
    clean = problem((13, 3, 2, 1, 130, 18))
    bad = poisoned(clean, clean.sequences.span(1), [1])
    a, b = (run_flywheel_gdn(p) for p in (clean, bad))
    assert a.out is not None
    assert b.out is not None
    own = np.ones(clean.tokens, dtype=bool)
    own[clean.sequences.span(1)] = False
    others = [n for n in range(6) if n != 1]
    assert np.array_equal(a.out[own], b.out[own])
    assert np.array_equal(a.state[others], b.state[others])


def test_stale_and_unnamed_slots() -> None:
    """NaN in a slot without initial state, and in one that nobody names, reaches nothing; the latter keeps its bits."""
    clean = problem((13, 3, 2, 1, 130, 18))
    flags = np.array([True, False, True, True, True, True])
    write = np.array([0, 1, 2, 3, 4, -1])
    sequences = dataclasses.replace(clean.sequences, has_initial=flags, write_slots=write, read_slots=write)
    clean = dataclasses.replace(clean, sequences=sequences)
    bad = dataclasses.replace(clean, state=clean.state.copy(), conv_state=clean.conv_state.copy())
    bad.state[[1, 5]], bad.conv_state[[1, 5]] = np.nan, np.nan
    a, b = (run_flywheel_gdn(p) for p in (clean, bad))
    assert a.out is not None
    assert b.out is not None
    assert np.array_equal(a.out, b.out)
    assert np.array_equal(a.state[:5], b.state[:5])
    assert np.array_equal(b.state[5].view(np.uint32), bad.state[5].view(np.uint32))
    assert b.conv_state is not None
    assert np.array_equal(b.conv_state[5].view(np.uint16), bad.conv_state[5].view(np.uint16))


def test_rows_of_no_sequence_are_zero() -> None:
    """Padding behind the last sequence is not read, and its outputs are 0."""
    given = problem((13, 3, 2, 1, 100, 18))
    padded = np.concatenate([given.qkv, np.full((30, given.qkv.shape[1]), np.nan, BF16)])
    gates = {name: np.concatenate([getattr(given, name), np.full((30, 2), np.nan, BF16)]) for name in ("a", "b")}
    found = run_flywheel_gdn(dataclasses.replace(given, qkv=padded, **gates))
    assert found.out is not None
    assert not found.out[given.tokens :].astype(np.float32).any()
    assert np.isfinite(found.out.astype(np.float32)).all()


@pytest.mark.deep
def test_permuted_sequences_permute_results() -> None:
    """The order of sequences does not matter, to the bit, where each starts at the same row of its 8-row group."""
    lengths = (16, 64, 8, 24, 40, 15)
    given = problem(lengths)
    order = [3, 0, 4, 2, 1, 5]
    spans = [given.sequences.span(n) for n in order]
    rows = np.concatenate([np.arange(s.start, s.stop) for s in spans])
    moved = dataclasses.replace(
        given,
        qkv=given.qkv[rows],
        a=given.a[rows],
        b=given.b[rows],
        sequences=Sequences(
            np.cumsum([0, *(lengths[n] for n in order)]),
            np.array(order),
            np.array(order),
            np.ones(6, dtype=bool),
        ),
    )
    a, b = run_flywheel_gdn(given), run_flywheel_gdn(moved)
    assert a.out is not None
    same(dataclasses.replace(a, out=a.out[rows]), b)


@pytest.mark.parametrize("cut", [3, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 2, 64, 100))])
def test_split_sequences_continue(cut: int) -> None:
    """A sequence in two calls, the second from the states that the first left, is within the bound of one call."""
    lengths = (167, 0, 0, 0, 0, 0)
    whole = problem(lengths)

    def part(rows: slice, state: np.ndarray, conv_state: np.ndarray) -> GdnResult:
        count = rows.stop - rows.start
        one = dataclasses.replace(
            whole,
            qkv=np.concatenate([whole.qkv[rows], np.zeros((167 - count, whole.qkv.shape[1]), BF16)]),
            a=np.concatenate([whole.a[rows], np.zeros((167 - count, 2), BF16)]),
            b=np.concatenate([whole.b[rows], np.zeros((167 - count, 2), BF16)]),
            sequences=dataclasses.replace(whole.sequences, boundaries=np.array([0, *[count] * 6])),
            state=state,
            conv_state=conv_state,
        )
        return run_flywheel_gdn(one)

    first = part(slice(0, cut), whole.state, whole.conv_state)
    assert first.conv_state is not None
    second = part(slice(cut, 167), first.state, first.conv_state)
    assert first.out is not None
    assert second.out is not None
    together = np.concatenate([first.out[:cut], second.out[: 167 - cut]])
    reference = dataclasses.replace(BF16_MODE, call=lambda _: dataclasses.replace(second, out=together))
    accepted(judge_gdn_subject(reference, whole))


@pytest.mark.deep
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_token_axes_of_any_length(tokens: int) -> None:
    """A token axis that is no multiple of 8 is padded inside."""
    given = problem((tokens, 0, 0, 0, 0, 0))
    found = run_flywheel_gdn(given, exact_shapes=True)
    assert found.out is not None
    filled = run_flywheel_gdn(given)
    same(found, filled)


DEEP_CASES = [name for name, case in OPEN_CASES.items() if case.build_layer() is not None]


@pytest.mark.deep
@pytest.mark.parametrize("interpret", ["fast", "tpu"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_open_cases(precision: str, interpret: str) -> None:
    """Every collected way to go wrong that a layer kernel can be asked about: closed forms and the oracles' answers.

    In both interpret modes: the TPU interpreter also looks for races and poisons memory.
    """
    judged = 0
    subject = dataclasses.replace(
        SUBJECTS[precision],
        call=lambda given: run_flywheel_gdn(given, precision=precision, interpret=interpret),
    )
    for name in DEEP_CASES:
        given = OPEN_CASES[name].build_layer()
        assert given is not None
        if lacking(given) is not None or not (2 <= given.width <= 8):
            continue
        found = judge_gdn_subject(subject, given)
        assert found.judgement.verdict in {Verdict.PASS, Verdict.OUTSIDE_DOMAIN}, (name, found.judgement.reason)
        judged += found.judgement.verdict is Verdict.PASS
    assert judged >= 20


@pytest.mark.deep
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_family(precision: str) -> None:
    """Keys, write strengths and decays in every combination."""
    for seed, (keys, beta, decay) in enumerate((k, b, d) for k in KEYS for b in BETAS for d in DECAYS):
        lengths = (13, 0, 3, 1, 130, 20)
        negative = beta in {"1 to 2", "2"}
        case = GdnCase(keys, beta, decay, seed=seed, lengths=lengths, heads=HEADS)
        found = judge_gdn_subject(SUBJECTS[precision], case.layer(negative=negative))
        assert found.judgement.verdict is Verdict.PASS, (case.name, found.judgement.reason)


@pytest.mark.deep
@pytest.mark.parametrize("precision", PRECISIONS)
def test_growth_over_4096_tokens(precision: str) -> None:
    """The state stays within its bound over 64 chunks, without decay and with."""
    for decay in ("0", "mild", "partly 0"):
        case = GdnCase("random", "up to 1", decay, seed=5, lengths=(4096,), heads=(1, 1, 128, 128))
        found = judge_gdn_subject(SUBJECTS[precision], case.layer())
        assert found.judgement.verdict is Verdict.PASS, (decay, found.judgement.reason)


@pytest.mark.deep
@pytest.mark.parametrize("heads", [(2, 2, 128, 128), (2, 6, 128, 128), (6, 18, 128, 128), (16, 32, 128, 128)])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_heads_and_widths(heads: tuple[int, int, int, int], width: int) -> None:
    """One, two and more groups of heads, and the convolution's widths."""
    case = GdnCase("random", "up to 1", "mild", seed=2, lengths=(13, 0, 3, 1, 130, 20), heads=heads)
    accepted(judge_gdn_subject(BF16_MODE, case.layer(width=width, biased=True)))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [((2, 2, 128, 128), (5,)), ((3, 9, 128, 128), (130, 20)), ((12, 36, 128, 128), (3, 130))],
)
def test_halves_of_heads(heads: tuple[int, int, int, int], lengths: tuple[int, ...]) -> None:
    """Pairs in halves of heads: equal ones and not, calls of one step and of more, of one group and of three."""
    case = GdnCase("random", "up to 1", "mild", seed=2, lengths=lengths, heads=heads)
    accepted(judge_gdn_subject(SPLIT_MODE, case.layer()))


@pytest.mark.deep
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("heads", [(1, 2, 128, 128), (2, 6, 128, 128), (6, 18, 128, 128)])
def test_with_races_and_poisoned_memory(precision: str, heads: tuple[int, int, int, int]) -> None:
    """Pallas' TPU interpreter finds no race and no read before a copy has arrived; uninitialised memory is NaN."""
    case = GdnCase("random", "up to 1", "mild", seed=2, lengths=(13, 0, 3, 1, 130, 20), heads=heads)
    subject = dataclasses.replace(
        SUBJECTS[precision],
        call=lambda given: run_flywheel_gdn(given, precision=precision, interpret="tpu"),
    )
    accepted(judge_gdn_subject(subject, case.layer()))
