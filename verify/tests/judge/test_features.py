"""Windows, soft cap, sinks, segments, ragged and paged batches: known cases, mistakes, contract, case files."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from verify.attention import contract, health, oracle_float64, ragged
from verify.attention.cases import AttentionCase, CaseError, digest
from verify.attention.contract import contract_bound
from verify.attention.judge import judge
from verify.attention.known_features import feature_answers
from verify.attention.paged import PagedProblem, paginate
from verify.attention.problem import BF16, AttentionProblem
from verify.attention.ragged import RaggedProblem
from verify.attention.reference import OracleUnsound
from verify.devices import CPU_INTERPRET, MODELS
from verify.tests.judge.feature_problems import MISTAKES, feature_problem, plain
from verify.tests.judge.problems import normal_problem, problem
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.attention.reference import Reference

    Oracle = Callable[[AttentionProblem], Reference]

TIERS = health.tiers()
FINITE = [
    known for known in feature_answers() if all(np.isfinite(getattr(known.answer, n)).any() for n in ("out", "lse"))
]
FINITE = [known for known in FINITE if np.isfinite(known.problem.k.astype(np.float64)).all()]


@pytest.fixture(params=list(TIERS))
def oracle(request: pytest.FixtureRequest) -> Oracle:
    """Every tier in turn."""
    return TIERS[request.param]


def agree(found: Reference, **want: object) -> None:
    """The reference holds closed forms (given to a few ulp) within its own, small, error."""
    for name, x in want.items():
        got, error, value = getattr(found, name), getattr(found, f"{name}_error"), np.asarray(x, dtype=np.float64)
        finite = np.isfinite(np.broadcast_to(value, got.shape))
        value = np.broadcast_to(value, got.shape)
        assert np.array_equal(got[~finite], value[~finite], equal_nan=True), name
        assert np.all(np.abs(got[finite] - value[finite]) <= error[finite] + 2.0**-50 * np.abs(value[finite])), name
        assert np.all(error[finite] <= 1e-11 * (1.0 + np.abs(value[finite]))), name


def scores_problem(scores: list[float], values: list[float], q_len: int = 1, heads: int = 1) -> AttentionProblem:
    """Rows whose logits are the scores."""
    keys, vals = (np.reshape(x, (1, 1, -1, 1)) for x in (scores, values))
    return problem(np.ones((1, heads, q_len, 1)), keys, vals, causal=False)


def test_window_of_128(oracle: Oracle) -> None:
    """A3 (a): rows 300 of 384 sees keys 173 .. 300 only; key 5, at +80 with value 1e4, is out of its window."""
    scores, values = np.zeros(384), np.arange(384.0) % 16
    scores[5], values[5] = 80.0, 9984.0
    case = dataclasses.replace(scores_problem(list(scores), list(values)), causal=True, window=(127, 0))
    case = dataclasses.replace(case, q_positions=np.array([[300]]))
    agree(oracle(case), out=7.5, lse=math.log(128), max_logit=0.0)


def test_first_fragment_of_the_window_masked_by_a_segment(oracle: Oracle) -> None:
    """A3 (b): a window's first keys belong to another segment, and a later key at +100 decides."""
    scores, values = np.zeros(256), np.arange(256.0) % 16
    scores[200] = 100.0
    values[200] = 77.0
    case = dataclasses.replace(
        scores_problem(list(scores), list(values)),
        window=(127, 0),
        q_segments=np.array([[1]]),
        k_segments=(np.arange(256) >= 160).astype(np.int32)[None],
    )
    agree(oracle(case), out=77.0, lse=100.0, max_logit=100.0)


def test_windows_that_hide_nothing(oracle: Oracle) -> None:
    """A3 (c): windows of T, of T + 1 and none are the same as full causal attention."""
    case = normal_problem(8, heads=1, kv_heads=1, q_len=9, kv_len=9, head_dim=4)
    whole = oracle(case)
    for left in (8, 9, None):
        found = oracle(dataclasses.replace(case, window=(left, 0)))
        assert np.array_equal(found.out, whole.out)
        assert np.array_equal(found.lse, whole.lse)


def test_soft_cap_at_large_logits(oracle: Oracle) -> None:
    """B4: cap 50 on scores 4500, 4600, -9000 gives 50, 50, -50: output 2, LSE 50 + ln 2, never NaN."""
    scores = [4512.0, 4608.0, -9024.0]  # what BF16 holds
    found = oracle(dataclasses.replace(scores_problem(scores, [1.0, 3.0, 1000.0]), softcap=50.0))
    agree(found, out=2.0, lse=50.6931471805599453, max_logit=50.0)


def test_constant_maximum(oracle: Oracle) -> None:
    """B3: scores 140, 139; four scores of -100; both with cap 20."""
    agree(oracle(scores_problem([140.0, 139.0], [1.0, 0.0])), out=0.7310585786300049, lse=140.31326168751822)
    agree(oracle(scores_problem([-100.0] * 4, [1.0, 2.0, 3.0, 6.0])), out=3.0, lse=-100.0 + math.log(4.0))
    capped = [20.0 * math.tanh(x / 20.0) for x in (140.0, 139.0)]
    share = 1.0 / (1.0 + math.exp(capped[1] - capped[0]))
    found = oracle(dataclasses.replace(scores_problem([140.0, 139.0], [1.0, 0.0]), softcap=20.0))
    agree(found, out=share, max_logit=capped[0])


def test_sinks_by_head(oracle: Oracle) -> None:
    """B6: sinks ln 16 and ln 48 against 16 keys at 0 with value 1 leave 0.5 and 0.25 in every row."""
    sinks = np.log([16.0, 48.0]).astype(np.float32)
    found = oracle(dataclasses.replace(scores_problem([0.0] * 16, [1.0] * 16, q_len=3, heads=2), sinks=sinks))
    share = [16.0 / (16.0 + math.exp(float(sink))) for sink in sinks]
    agree(found, out=np.reshape(share, (1, 2, 1, 1)), lse=np.reshape([math.log(16.0 / x) for x in share], (1, 2, 1)))
    assert np.abs(found.out[0, :, :, 0] - [[0.5], [0.25]]).max() < 1e-7
    agree(found, max_logit=0.0)


@pytest.mark.parametrize(("position", "ones"), [(33000, 791), (32766, 1024), (32768, 1023), (65535, 0), (65537, 0)])
def test_positions_beyond_16_bits(position: int, ones: int) -> None:
    """E1: a window of 1024 keys at positions beyond 2^15: keys up to 32767 hold 1, later ones 3; 1490/1024 at 33000."""
    values = np.where(np.arange(65538) <= 32767, 1.0, 3.0)
    case = dataclasses.replace(
        scores_problem([0.0] * 65538, list(values)), causal=True, window=(1023, 0), q_positions=np.array([[position]])
    )
    agree(oracle_float64.attention(case), out=(ones + 3.0 * (1024 - ones)) / 1024, lse=math.log(1024))


def uniform_ragged(
    cu_q: list[int], cu_k: list[int], values: np.ndarray, *, causal: bool, tokens: int = 0
) -> RaggedProblem:
    """Equal logits; q_tokens beyond the last sequence are NaN."""
    q = np.ones((1, max(cu_q[-1], tokens), 1))
    q[:, cu_q[-1] :] = math.nan
    k = np.zeros((1, len(values), 1))
    arrays = [x.astype(BF16) for x in (q, k, np.reshape(values, (1, -1, 1)))]
    return RaggedProblem(*arrays, np.array(cu_q), np.array(cu_k), causal=causal, scale=1.0)


def test_zero_length_sequences(oracle: Oracle) -> None:
    """E2: sequences of (0, 5), (3, 4), (0, 0), (4, 0) tokens: rows 0-2 are 1, rows 3-6 are 0 with LSE -inf."""
    case = uniform_ragged([0, 0, 3, 3, 7], [0, 5, 9, 9, 9], np.ones(9), causal=False)
    found = case.scatter(oracle(case.dense()))
    agree(found, out=np.reshape([1.0] * 3 + [0.0] * 4, (1, 7, 1)), lse=[[math.log(4.0)] * 3 + [-math.inf] * 4])


def test_neighbouring_sequences(oracle: Oracle) -> None:
    """E7: two sequences of a and b tokens, values 1 and 2: each is itself, whatever the tail of the other."""
    for a, b in [(13, 17), *((a, 18 - a) for a in range(1, 18, 4))]:
        values = np.repeat([1.0, 2.0], [a, b])
        case = uniform_ragged([0, a, a + b], [0, a, a + b], values, causal=True, tokens=a + b + 5)
        agree(oracle(case.dense()), out=values[None, None, :, None])
        lse = np.log(np.concatenate([np.arange(1, a + 1), np.arange(1, b + 1)]))
        agree(oracle(case.dense()), lse=lse[None, None])


def test_ragged_and_paged_equal_solo_runs() -> None:
    """Every sequence of a ragged batch, with window, cap and sinks, equals a dense run of its own, and so do pages."""
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal(shape).astype(BF16) for shape in ((4, 20, 8), (2, 40, 8), (2, 40, 6))]
    features = {"window": (5, 0), "softcap": 3.0, "sinks": np.arange(4, dtype=np.float32)}
    cu_q, cu_k = np.array([0, 4, 4, 17, 19]), np.array([0, 9, 12, 25, 25])
    case = RaggedProblem(*arrays, cu_q, cu_k, causal=True, scale=0.5, **features)
    whole = case.scatter(oracle_float64.attention(case.dense()))
    for page_size in (1, 4, 16):
        paged = paginate(case, page_size, seed=3)
        assert np.isnan(paged.k_pages.astype(np.float64)).any()
        assert digest(paged.dense()) == digest(case.dense())
    for s in range(case.sequences):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        solo = AttentionProblem(
            arrays[0][None, :, rows], *(x[None, :, keys] for x in arrays[1:]), True, 0.5, **features
        )
        alone = oracle_float64.attention(solo)
        for name in ("out", "lse", "max_logit"):
            room = getattr(alone, f"{name}_error")[0] + getattr(whole, f"{name}_error")[:, rows]
            a, b = getattr(alone, name)[0], getattr(whole, name)[:, rows]
            finite = np.isfinite(b)
            assert np.array_equal(a[~finite], b[~finite])
            assert np.all(np.abs(a[finite] - b[finite]) <= room[finite]), (s, name)


def test_the_plain_implementation_is_right() -> None:
    """What the mistakes below are made in passes the health check without a mistake."""
    health.check_oracle("plain", plain, FINITE)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    """Each well-known mistake in a feature leaves a known answer."""
    with pytest.raises(OracleUnsound, match="wrong on"):
        health.check_oracle("wrong", functools.partial(plain, mistake=mistake), FINITE)


def test_tiers_disagree_with_a_mistaken_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in the ranges alone, which float64 asks, or in the mask alone, which the others ask, is noticed."""
    right = AttentionProblem._ranges

    def wide(self: AttentionProblem, batch: int) -> tuple[np.ndarray, np.ndarray]:
        start, stop = right(self, batch)
        return np.maximum(start - 1, 0), stop

    monkeypatch.setattr(AttentionProblem, "_ranges", wide)
    case = dataclasses.replace(normal_problem(3, q_len=6, kv_len=9), window=(2, 0))
    with pytest.raises(OracleUnsound, match="float64 against arb"):
        health.cross_check(case, TIERS)
    with pytest.raises(OracleUnsound, match="float64 on window"):
        health.check_oracles()


@pytest.mark.parametrize("name", ["segments", "aligned_keys"])
def test_a_mistake_in_the_ragged_mapping_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """cu_seqlens read off by one, for the segments or for the alignment, leaves the known answers of every tier."""
    right = getattr(ragged, name)

    def off_by_one(*cu: np.ndarray) -> np.ndarray:
        moved = [np.concatenate([x[:1], np.maximum(x[1:-1] - 1, 0), x[-1:]]) for x in cu]
        return right(*moved)

    monkeypatch.setattr(ragged, name, off_by_one)
    feature_answers.cache_clear()
    try:
        with pytest.raises(OracleUnsound, match="float64 on ragged"):
            health.check_oracles()
    finally:
        feature_answers.cache_clear()


def emulated(case: AttentionProblem, *, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A conforming kernel in numpy FP32: log2 units, P rounded to BF16, and sums in an order drawn at random."""
    rng = np.random.default_rng(seed)
    f32, log2_e = np.float32, np.float32(math.log2(math.e))
    shape = (case.batch, case.heads, case.q_len)
    out, lse, largest = np.zeros((*shape, case.v_dim), f32), np.full(shape, -np.inf, f32), np.full(shape, -np.inf, f32)
    for b, h, i in np.ndindex(*shape):
        keys = rng.permutation(case.seen(b, i))
        kv = case.kv_head(h)
        q, k, v = (x.astype(f32) for x in (case.q[b, h, i], case.k[b, kv, keys], case.v[b, kv, keys]))
        s = np.array([functools.reduce(lambda a, c: f32(a + c), q * key, f32(0)) for key in k], f32) * f32(case.scale)
        if case.softcap is not None:
            # The device's tanh at one end of its envelope or the other.
            worse = 1.0 + rng.choice([-0.9, 0.9], s.shape) * CPU_INTERPRET.tanh_relative
            s = f32(case.softcap) * (np.tanh(s / f32(case.softcap)) * worse).astype(f32)
        largest[b, h, i] = s.max(initial=-np.inf)
        t = s * log2_e
        sink = case.sink(h)
        null = None if sink is None else f32(sink) * log2_e
        top = max([*t.tolist(), *([] if null is None else [float(null)])], default=-math.inf)
        if top == -math.inf:
            continue
        p = np.exp2(t - f32(top))
        terms = [*p, *([] if null is None else [np.exp2(null - f32(top))])]
        total = functools.reduce(lambda a, c: f32(a + c), terms, f32(0))
        rounded = p.astype(BF16).astype(f32)
        mixed = functools.reduce(lambda a, c: (a + c).astype(f32), rounded[:, None] * v, np.zeros(case.v_dim, f32))
        out[b, h, i] = mixed / total
        lse[b, h, i] = f32(top) * f32(math.log(2.0)) + np.log(total)
    return out.astype(BF16), lse, largest


@pytest.mark.parametrize("name", ["window", "softcap", "sinks", "segments", "v_dim", "positions"])
def test_contract_holds_for_a_conforming_kernel(name: str) -> None:
    """An FP32 kernel with BF16 P stays within the contract on adversarial problems with each feature."""
    judged = 0
    for seed in range(60):
        case = feature_problem(seed, name)
        bound = contract_bound(case, CPU_INTERPRET)
        if (
            not bound.inside_domain.all()
            or max(np.abs(x.astype(np.float64)).max(initial=0.0) for x in (case.v,)) > 2.0**100
        ):
            continue  # the emulation has no replay path
        with np.errstate(all="ignore"):
            out, lse, largest = emulated(case, seed=seed)
        for got in (largest, largest.max(axis=-1)):
            judgement = judge(case, out, lse, bound, got_max_logit=got)
            assert judgement.verdict is Verdict.PASS, (seed, judgement.reason)
        judged += 1
    assert judged > 20


@pytest.mark.parametrize("mistake", MISTAKES)
def test_contract_rejects_mistakes(mistake: str) -> None:
    """A kernel with the mistake, well rounded, fails its contract on ordinary data; it names a likely cause."""
    features = {"window", *MISTAKES[mistake]}
    case = dataclasses.replace(normal_problem(5, heads=4, kv_heads=2, q_len=24, kv_len=40), scale=0.75)
    ids = np.arange(40)[None] // 5 % 2 * 65536
    options = {
        "window": {"window": (9, 0)},
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": np.array([1.0, 3.0, -1.0, 2.0], dtype=np.float32)},
        "q_segments": {"q_segments": ids[:, 16:], "k_segments": ids},
    }
    for feature in features:
        case = dataclasses.replace(case, **options[feature])
    wrong = plain(case, mistake)
    assert wrong.max_logit is not None
    out, lse, largest = wrong.out.astype(BF16), wrong.lse.astype(np.float32), wrong.max_logit.astype(np.float32)
    judgement = judge(case, out, lse, contract_bound(case, CPU_INTERPRET), got_max_logit=largest)
    assert judgement.verdict is Verdict.FAIL
    if mistake not in {"LSE without the sink", "maximum with the sink", "cap after the mask", "sink of the KV head"}:
        assert "agrees with" in judgement.reason or mistake in {"cap before the scale", "sink capped"}, judgement.reason


def test_contract_bound_is_useful_with_features() -> None:
    """On ordinary data the bounds stay near 2^-7 of the values, 2^-12 nats, on every device that has a tight tanh."""
    base = normal_problem(1, q_len=64, kv_len=64, head_dim=64)
    for changes in ({"window": (15, 0)}, {"softcap": 20.0}, {"sinks": np.ones(2, dtype=np.float32)}):
        case = dataclasses.replace(base, **changes)
        size = oracle_float64.attention(dataclasses.replace(case, v=np.abs(case.v))).out
        for name in ("cpu-interpret", "v6e"):
            bound = contract_bound(case, MODELS[name])
            assert (bound.out <= 2.0**-6 * size + 1e-30).all(), (changes, name)
            assert bound.lse.max() < 2.0**-12
            assert bound.max_logit.max() < 1e-4


def test_soft_cap_out_of_fp32_lies_outside_the_domain() -> None:
    """A cap that FP32 cannot hold, or a sink that overflows in log2 units, takes its rows out of the domain."""
    base = normal_problem(1, q_len=3, kv_len=4, head_dim=4)
    assert not contract_bound(dataclasses.replace(base, softcap=2.0**-140), CPU_INTERPRET).inside_domain.any()
    assert not contract_bound(dataclasses.replace(base, softcap=2.0**140), CPU_INTERPRET).inside_domain.any()
    sinks = np.array([3e38, 0.0], dtype=np.float32)
    assert contract_bound(dataclasses.replace(base, sinks=sinks), CPU_INTERPRET).inside_domain[0].any(
        axis=1
    ).tolist() == [False, True]


def test_an_undecided_maximum_is_settled() -> None:
    """A maximum whose distance is its bound to within float64's error is decided by ball arithmetic, rows and heads."""
    case = dataclasses.replace(normal_problem(2, heads=2, kv_heads=1, q_len=3, kv_len=5), scale=0.3)
    found = oracle_float64.attention(case)
    assert found.max_logit is not None
    bound = contract_bound(case, CPU_INTERPRET)
    got = found.max_logit.astype(np.float32)
    apart = np.abs(got - found.max_logit)
    for limit, verdict in ((apart + 1e-9, Verdict.PASS), (apart * 0.5, Verdict.FAIL)):
        tight = dataclasses.replace(bound, max_logit=limit)
        assert judge(case, found.out.astype(BF16), None, tight, got_max_logit=got).verdict is verdict
    # Heads are judged by the largest bound of their rows.
    of_heads = got.max(axis=-1)
    exact = np.abs(of_heads - found.head_max_logit)
    edge = np.broadcast_to(exact[..., None], got.shape)
    for limit in (apart, edge):
        tight = dataclasses.replace(bound, max_logit=limit)
        judgement = judge(case, found.out.astype(BF16), None, tight, got_max_logit=got if limit is apart else of_heads)
        assert any(note.startswith("max_logit: ") and "ball arithmetic" in note for note in judgement.notes)


def test_a_row_with_nothing_but_a_sink_beside_huge_keys() -> None:
    """A query of any size that sees no key is given the sink alone, whatever the keys that others see."""
    case = problem([[[[2.0**60], [0.0]]]], [[[[2.0**60]]]], [[[[3.0]]]], causal=True)
    found = oracle_float64.attention(dataclasses.replace(case, sinks=np.array([1.5], dtype=np.float32)))
    assert found.out[0, 0, 0, 0] == 0.0
    assert found.lse[0, 0, 0] == 1.5
    assert found.lse_error[0, 0, 0] < 2.0**-50


def test_rows_that_may_hold_the_largest_logit() -> None:
    """Rows within their errors of the largest are asked for it, others are not; beside a NaN nothing is known."""
    found = oracle_float64.attention(normal_problem(2, heads=2, kv_heads=1, q_len=4, kv_len=5))
    of_rows = np.array([[[1.0, 3.0, 3.0 + 2.0**-40, -np.inf], [1.0, np.nan, 2.0, 0.0]]])
    for doubt, rows in ((2.0**-42, [2]), (2.0**-41, [1, 2]), (2.0, [0, 1, 2])):
        some = dataclasses.replace(found, max_logit=of_rows, max_logit_error=np.full((1, 2, 4), doubt))
        assert some.contenders(0, 0) == rows
        assert some.contenders(0, 1) == [0, 1, 2, 3]


@pytest.mark.parametrize("overflowing", [True, False])
@pytest.mark.parametrize(("entry", "owed"), [(np.inf, "inf"), (np.nan, "nan")])
def test_the_class_of_a_heads_maximum_beside_a_row_outside_the_domain(
    entry: float, owed: str, *, overflowing: bool
) -> None:
    """A row whose scores overflow FP32 may be NaN, and so may the head's maximum be, where f's is +inf.

    Where f's maximum is NaN, or no row lies outside the domain, the class is owed.
    """
    q, k = np.ones((1, 1, 2, 2)), np.ones((1, 1, 2, 2))
    q[0, 0, 1, 0] = entry
    k[0, 0, 0, 1] = 2.0**127 if overflowing else 2.0
    case = problem(q, k, np.ones((1, 1, 2, 1)), causal=True, scale=2.0)
    found, bound = contract.reference_and_bound(case, CPU_INTERPRET)
    assert bound.inside_domain[0, 0, 0] == (not overflowing)
    assert str(found.head_max_logit[0, 0]) == owed
    for got in (np.inf, np.nan, 7.0):
        largest = np.array([[got]], dtype=np.float32)
        judgement = judge(case, found.out.astype(BF16), None, bound, reference=found, got_max_logit=largest)
        right = str(got) == owed or (overflowing and owed == "inf")
        assert (judgement.verdict is Verdict.FAIL) is not right, (got, judgement.reason)


def test_features_of_a_case_file() -> None:
    """A case with features survives JSON, builds the same bits, and each feature is part of its digest."""
    case = AttentionCase(
        "all",
        (2, 4, 2, 6, 8, 4),
        v_dim=6,
        window=(3, None),
        softcap="0x1.4p+4",
        sinks=("0x1p+0", "-inf", "0x0p+0", "-0x1p+3"),
        q_segments=((1, 4), (2, 2)),
        k_segments=((1, 5), (2, 3)),
        causal=False,
    )
    assert AttentionCase.from_json(case.to_json()) == case
    names = ("v_dim", "window", "softcap", "sinks")
    others = [dataclasses.replace(case, **{name: None}) for name in names] + [
        dataclasses.replace(case, q_segments=None, k_segments=None)
    ]
    assert len({digest(x.build()) for x in [case, *others]}) == 1 + len(others)
    packed = AttentionCase("r", (1, 4, 2, 9, 12, 4), cu_seqlens_q=(0, 3, 8), cu_seqlens_k=(0, 5, 11), page_size=4)
    again = AttentionCase.from_json(packed.to_json())
    paged = again.paged()
    assert again == packed
    assert paged is not None
    assert digest(paged.dense()) == digest(packed.build())
    assert "window" not in packed.to_json()


def test_digest_of_a_plain_case_is_what_it_was() -> None:
    """Case files written before there were features still name the bits they build."""
    case = AttentionCase("plain", (1, 2, 1, 3, 4, 4), seed=3)
    assert digest(case.build()) == PLAIN_DIGEST


PLAIN_DIGEST = "d57daf389739c37d553ae104c897f8d39e3f2ed04b7ecfcaa1d385878617ca04"

BAD = [
    ({"window": (1, -1)}, r"window must be \(left, right\), each None or an integer >= 0, got \(1, -1\)"),
    ({"window": 4}, r"window must be \(left, right\), each None or an integer >= 0, got 4"),
    ({"softcap": 0.0}, "softcap must be positive and finite, got 0.0"),
    ({"softcap": math.nan}, "softcap must be positive and finite, got nan"),
    ({"sinks": np.zeros(3, np.float32)}, r"sinks must be FP32 \[heads\] = \[2\], got float32 \[3\]"),
    ({"sinks": np.zeros(2)}, r"sinks must be FP32 \[heads\] = \[2\], got float64 \[2\]"),
    ({"q_segments": np.zeros((1, 3), int)}, "q_segments and k_segments must be given together, got one of them"),
    (
        {"q_segments": np.zeros((1, 4), int), "k_segments": np.zeros((1, 4), int)},
        r"q_segments must be integers \[1, 3\], got int64 \[1, 4\]",
    ),
    ({"q_positions": np.zeros((1, 3))}, r"q_positions must be integers \[1, 3\], got float64 \[1, 3\]"),
]


@pytest.mark.parametrize(("changes", "text"), BAD)
def test_bad_features_are_refused(changes: dict[str, object], text: str) -> None:
    """The error names the argument, the value and the rule."""
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(normal_problem(1, q_len=3, kv_len=4), **changes)


def test_bad_ragged_and_paged_inputs_are_refused() -> None:
    """Cumulative lengths that fall, start late or pass the tokens; tables and lengths that name no page."""
    good = uniform_ragged([0, 2, 3], [0, 2, 3], np.ones(3), causal=True)
    for name, cu in (("cu_seqlens_q", [0, 4, 3]), ("cu_seqlens_k", [1, 2, 3]), ("cu_seqlens_q", [0, 2, 9])):
        with pytest.raises(ValueError, match=rf"{name} must start at 0, never fall, and end at most at 3 tokens, got"):
            dataclasses.replace(good, **{name: np.array(cu)})
    with pytest.raises(ValueError, match="must name as many sequences, got 1 and 2"):
        dataclasses.replace(good, cu_seqlens_q=np.array([0, 3]))
    paged = paginate(good, 2, seed=0)
    with pytest.raises(ValueError, match=r"lengths\[1\] must be in 0\.\.2"):
        dataclasses.replace(paged, lengths=np.array([2, 3]))
    with pytest.raises(ValueError, match=r"page_table\[0\] must name pages in 0\.\.2, got \[3\]"):
        dataclasses.replace(paged, page_table=np.array([[3], [1]]))
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        paginate(good, 0, seed=0)
    assert isinstance(paged, PagedProblem)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"q_segments": ((0, 5),), "k_segments": ((0, 4),)},
            r"q_segments must cover 3 tokens, got runs \[\(0, 5\)\] of 5",
        ),
        ({"page_size": 4}, "a ragged case needs cu_seqlens_q and cu_seqlens_k, and a paged one too"),
        ({"sinks": ("0x1.0000001p+0",) * 2}, "a sink must be an FP32 number, got 0x1.0000001p"),
    ],
)
def test_bad_case_features_are_refused(changes: dict[str, object], text: str) -> None:
    """A case file that cannot be meant is an error that says why."""
    with pytest.raises(CaseError, match=text):
        dataclasses.replace(AttentionCase("bad", (1, 2, 1, 3, 4, 4)), **changes).build()


def test_power_asks_about_the_features() -> None:
    """A soft cap that the bound cannot see makes the case powerless to show that there is one."""
    case = dataclasses.replace(normal_problem(5, q_len=8, kv_len=8), softcap=5000.0)
    found = oracle_float64.attention(case)
    judgement = judge(case, found.out.astype(BF16), None, contract_bound(case, CPU_INTERPRET), power=True)
    assert judgement.verdict is Verdict.NO_POWER
    assert "no soft cap" in judgement.reason
