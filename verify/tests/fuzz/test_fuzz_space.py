"""The search space: what it must be able to express, and what it must never produce."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from flywheel.attention import block, schedule, spec
from flywheel.attention.tiling import AttentionConfig, resolve
from fuzz.attention.buckets import ANCHOR_KEYS, BUCKETS, MASK_BUCKETS, REPLAY_BUCKETS, Bucket
from fuzz.attention.space import SIZES, SUBNORMALS, Plant, Tokens, anchor_cases, one_token, plant_edits, sizes
from verify.attention.adversarial import FLYWHEEL_LIMIT, LARGEST_BF16, bf16_parts
from verify.attention.cases import AttentionCase, Edit
from verify.attention.contract import contract_bound
from verify.attention.problem import AttentionProblem, widen
from verify.backend import device_model

LANES = 128
SUBNORMAL_BASE = -120
"""Exponents of V below which base values are few, or flushed."""

MOST_KEYS = 1024
"""Of cases whose scores are looked at: the longest shape takes most of the time and shows nothing new."""
ONE_ULP_BELOW = float(np.nextafter(np.float32(FLYWHEEL_LIMIT), np.float32(0)))
ONE_ULP_ABOVE = float(np.nextafter(np.float32(FLYWHEEL_LIMIT), np.float32(np.inf)))


def drawn(strategy: st.SearchStrategy, count: int, number: int = 0) -> list:
    """What Hypothesis draws first, without shrinking or a database."""
    found = []

    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @seed(number)
    @given(strategy)
    def collect(value: object) -> None:
        found.append(value)

    collect()
    return found


@functools.cache
def sample() -> tuple[tuple[AttentionCase, AttentionProblem], ...]:
    """Cases over all buckets, and more of the one with the most blocks."""
    # Several short runs: within one, Hypothesis repeats parts of earlier draws.
    everywhere = [case for number in range(2) for case in drawn(anchor_cases(), 50, number)]
    blocks = [case for number in range(2) for case in drawn(anchor_cases((BUCKETS["512x512-d64"],)), 50, number)]
    return tuple((case, case.build()) for case in everywhere + blocks)


def jumps(problem: AttentionProblem, head: int) -> np.ndarray:
    """Scores of one head above the row's anchor (log2 units), -inf where masked or where the row is empty."""
    q, k = widen(problem.q[0, head]), widen(problem.k[0, problem.kv_head(head)])
    mask = problem.mask()
    s = np.where(mask, (q @ k.T) * (problem.scale * np.log2(np.e)), -np.inf)
    anchor = s[:, :ANCHOR_KEYS].max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.where(mask, s - anchor, -np.inf)


def block_hazards(case: AttentionCase, above: np.ndarray) -> set[str]:
    """Where jumps lie, for the bucket of four by four blocks."""
    block = case.config[1]
    tops = [above[:, start : start + block].max(axis=1) for start in range(0, above.shape[1], block)]
    high = np.stack(tops) > FLYWHEEL_LIMIT
    rows = np.arange(len(above))
    signs = {
        "everything far below an anchor in block 0": np.stack(tops[1:]).max(axis=0)[block:] < -FLYWHEEL_LIMIT,
        "beyond the limit in three consecutive blocks": high[1:].sum(axis=0) >= 3,
        "beyond the limit on the diagonal": above[rows, rows] > FLYWHEEL_LIMIT,
        "beyond the limit at the last key": above[:, -1] > FLYWHEEL_LIMIT,
    }
    found = {name for name, where in signs.items() if where.any()}
    for j, top in enumerate(tops[1:], start=1):
        if ((top > FLYWHEEL_LIMIT - 20) & (top <= FLYWHEEL_LIMIT)).any():
            found.add(f"just below the limit in block {j}")
        if ((top > FLYWHEEL_LIMIT) & (top < FLYWHEEL_LIMIT + 20)).any():
            found.add(f"just above the limit in block {j}")
        if (top > 1000).any():
            found.add(f"far above the limit in block {j}")
        hit = int((top > FLYWHEEL_LIMIT).sum())
        if hit == 1:
            found.add("one row beyond the limit")
        if 1 < hit < len(top) // 2:
            found.add("some rows beyond the limit")
    return found


def hazards(case: AttentionCase, problem: AttentionProblem) -> set[str]:
    """What is special about a case, from its bits."""
    found = value_hazards(problem)
    for head in range(min(problem.heads, 2) if problem.kv_len <= MOST_KEYS else 0):
        found |= score_hazards(case, jumps(problem, head))
    words = problem.k[0, 0].view(np.uint16)
    pairs = (words[1:] != words[:-1]).sum(axis=1)
    if (pairs == 0).any() and words.any():
        found.add("equal neighbouring keys")
    if (pairs == 1).any():
        found.add("keys that differ in one lane")
    return found


def score_hazards(case: AttentionCase, above: np.ndarray) -> set[str]:
    """What is special about the scores of one head."""
    found: set[str] = set()
    for name, size in (("limit", FLYWHEEL_LIMIT), ("limit - 1 ulp", ONE_ULP_BELOW), ("limit + 1 ulp", ONE_ULP_ABOVE)):
        if (above.astype(np.float32) == size).any():
            found.add(f"exactly the {name}")
    seen = above > -np.inf
    lowest, highest = np.where(seen, above, np.inf).min(axis=1), above.max(axis=1)
    several = seen.sum(axis=1) > 1
    if (several & (lowest == highest)).any() and not above[seen].any():
        found.add("equal logits")
    if (lowest < -(2.0**100)).any():
        found.add("hugely negative logits")
    if ((lowest < -(2.0**60)) & (highest > 2.0**60)).any():
        found.add("huge opposite scores")
    if (~seen).all(axis=1).any():
        found.add("rows without a key")
    if case.shape[:6] == BUCKETS["512x512-d64"].shape:
        found |= block_hazards(case, above)
    return found


def value_hazards(problem: AttentionProblem) -> set[str]:
    """What is special about V."""
    found: set[str] = set()
    largest = np.abs(widen(problem.v)).max()
    if largest > 2.0**118:
        found.add("|v| > 2^118")
    if largest == float.fromhex(LARGEST_BF16):
        found.add("the largest |v|")
    if 0 < largest < 2.0**-100:
        found.add("nothing but tiny v")
    words = problem.v.view(np.uint16)
    if ((words & 0x7F80 == 0) & (words & 0x7F != 0)).any():
        found.add("subnormal v")
    if (words == 0x8000).any():
        found.add("negative zeros")
    return found


EVERYWHERE = {
    "exactly the limit", "exactly the limit - 1 ulp", "exactly the limit + 1 ulp",
    "equal logits", "hugely negative logits", "huge opposite scores", "rows without a key",
    "|v| > 2^118", "the largest |v|", "nothing but tiny v", "subnormal v", "negative zeros",
    "equal neighbouring keys", "keys that differ in one lane",
}  # fmt: skip
AMONG_BLOCKS = {
    *(f"{where} the limit in block {j}" for j in range(1, 4) for where in ("just below", "just above", "far above")),
    "everything far below an anchor in block 0",
    "one row beyond the limit", "some rows beyond the limit", "beyond the limit in three consecutive blocks",
    "beyond the limit on the diagonal", "beyond the limit at the last key",
}  # fmt: skip


def test_every_hazard_is_reached() -> None:
    """A few hundred draws hold each hazard of the static anchor: places, sizes on both sides of the limit, values.

    Which draws depends on what else is imported (Hypothesis collects constants from modules); the rarest hazards may
    take some hundreds more.
    """
    missing = (EVERYWHERE | AMONG_BLOCKS) - set().union(*(hazards(*pair) for pair in sample()))
    for number in range(10, 70):
        if not missing:
            break
        blocks = (BUCKETS["512x512-d64"],) if missing & AMONG_BLOCKS else tuple(BUCKETS.values())
        more = drawn(anchor_cases(blocks), 25, number)
        missing -= set().union(*(hazards(case, case.build()) for case in more))
    assert not missing


def test_every_bucket_is_drawn() -> None:
    """Each shape occurs, with the block sizes, scale and mask that belong to it."""
    found = {(case.shape, case.causal, case.scale, case.config) for case, _ in sample()}
    assert found == {(b.shape, b.causal, b.scale, b.config) for b in BUCKETS.values()}


def test_cases_are_finite_and_inside_the_domain() -> None:
    """By construction: no draw is lost to a NaN, an infinity or a score beyond the contract's domain."""
    for case, problem in [pair for pair in sample() if pair[1].kv_len <= MOST_KEYS][:100:3]:
        assert all(np.isfinite(widen(x)).all() for x in (problem.q, problem.k, problem.v)), case.name
        assert contract_bound(problem, device_model()).inside_domain.all(), case.name


def test_words_survive_the_round_trip() -> None:
    """Every value is a BF16 number from the start: casts to FP32 and float64 and back give the same word."""
    for case, problem in sample():
        for x in (problem.q, problem.k, problem.v):
            for dtype in (np.float32, np.float64):
                assert np.array_equal(x.astype(dtype).astype(x.dtype).view(np.uint16), x.view(np.uint16)), case.name


@pytest.mark.parametrize("word", ["0x1.999999999999ap-4", "0x1.16c2000000000p-133", "0x1.ffc0000000000p+15"])
def test_what_bf16_cannot_hold_is_refused(word: str) -> None:
    """0.1, 1e-40 and 65504 are no BF16 numbers: an edit refuses them instead of rounding them behind one's back."""
    case = AttentionCase("x", (1, 1, 1, 8, 8, 64), edits=(Edit("v", "set", word),))
    with pytest.raises(ValueError, match="must be a BF16 number"):
        case.build()


def test_subnormals_follow_the_declared_policy() -> None:
    """Subnormal values are drawn, and the oracle's inputs have none: they are read as zero of the same sign."""
    assert "read as zero" in SUBNORMALS
    words = np.array([0x0001, 0x007F, 0x8001, 0x0080, 0x8080], dtype=np.uint16)
    values = widen(words.view(sample()[0][1].v.dtype))
    assert values.tolist() == [0.0, 0.0, 0.0, 2.0**-126, -(2.0**-126)]
    assert np.signbit(values).tolist() == [False, False, True, False, True]


def test_values_are_not_nearly_constant() -> None:
    """Base values repeat no more often than BF16 has to: over a hundred distinct words in V that nobody set on purpose.

    About half of the cases make V periodic or set all of it; a third is left as drawn at the least.
    """
    distinct = np.array([len(np.unique(problem.v.view(np.uint16))) for _, problem in sample()])
    drawn_as_is = np.array(
        [not any(e.tensor == "v" and e.op in ("mod", "set") for e in case.edits) for case, _ in sample()]
    )
    tiny = np.array([case.exponents[2] is not None and case.exponents[2] < SUBNORMAL_BASE for case, _ in sample()])
    assert (distinct[drawn_as_is & ~tiny] > 100).all()
    assert (distinct > 100).mean() > 1 / 3


def test_sizes_are_fp32_numbers_and_planted_exactly() -> None:
    """A planted score is the sum of three BF16 numbers, for every size that can be drawn."""
    for size in [*SIZES, *drawn(sizes(), 200)]:
        assert float(np.float32(size)) == size
        assert sum(float.fromhex(part) for part in bf16_parts(size)) == size


def test_planted_score_is_the_score() -> None:
    """At the scale ln 2 a quiet case holds the planted number itself, bit for bit, where it was planted."""
    bucket = BUCKETS["512x512-d64"]
    plant = Plant(((one_token(300), ONE_ULP_ABOVE),), Tokens(400, 402, 1, ""), None, None, "")
    case = AttentionCase(
        "planted", bucket.shape, scale=bucket.scale, exponents=(None, None, 0), edits=plant_edits([plant], bucket)
    )
    problem = case.build()
    scores = widen(problem.q[0, 0]) @ widen(problem.k[0, 0]).T
    assert scores[400:402, 300].tolist() == [ONE_ULP_ABOVE, ONE_ULP_ABOVE]
    scores[400:402, 300] = 0.0
    assert not scores.any()


@pytest.mark.parametrize("bucket", BUCKETS.values(), ids=BUCKETS)
def test_the_first_draw_is_benign(bucket: Bucket) -> None:
    """Shrinking ends at equal logits and ordinary values: the simplest case of a bucket has no edits at all."""
    simplest = drawn(anchor_cases((bucket,)), 1)[0]
    assert simplest.edits == ()
    assert simplest.exponents == (None, None, 0)


def test_the_hunts_know_the_kernels_anchor() -> None:
    """Coverage and climbing measure from the keys that the kernel takes its anchors from."""
    assert ANCHOR_KEYS == spec.ANCHOR_KEYS


def test_a_bucket_weaves_its_fragments() -> None:
    """One shape is so large that products of earlier fragments stand beside the softmax of later ones, in a last body.

    In smaller ones all products come at the end, and an error in what is finished when would not show.
    """
    bucket = BUCKETS["512x1280-d64-woven"]
    upper = bucket.kv_len - bucket.q_len
    found = schedule.Schedule(bucket.q_len, bucket.kv_len, schedule.Band(None, upper), *bucket.config)
    last = [body for body in found.bodies if body.last]
    assert any(len(found.fragments(body.kind)) > block.MOST_BEHIND + 1 for body in last)


@pytest.mark.parametrize(
    "bucket",
    [MASK_BUCKETS["window-overlapping-1024x1536-d64"], REPLAY_BUCKETS["1024x1536-d64-overlapping"]],
    ids=lambda bucket: bucket.name,
)
def test_buckets_whose_key_blocks_overlap(bucket: Bucket) -> None:
    """The kernel makes such blocks where it chooses their length; each query block then has one step."""
    assert bucket.window is not None
    left, _ = bucket.window
    offset = bucket.kv_len - bucket.q_len
    band = schedule.Band(offset - (left or 0), offset)
    found = resolve(AttentionConfig(bucket.config[0]), bucket.q_len, bucket.kv_len, band=band)
    assert found.overlap > 0
    blocks = (found.block_q, found.block_kv, found.fragment, found.overlap)
    steps = schedule.Schedule(bucket.q_len, bucket.kv_len, band, *blocks).steps
    assert [step.first and step.last for step in steps] == [True] * (bucket.q_len // bucket.config[0])
