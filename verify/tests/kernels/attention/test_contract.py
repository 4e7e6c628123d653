"""The kernel against its numerical contract, on every named family."""

from __future__ import annotations

from typing import Any

import pytest
from replay_model import expected_replays

from flywheel.attention.schedule import Band
from flywheel.attention.tiling import AttentionConfig, resolve
from verify.attention import adversarial
from verify.attention.cases import AttentionCase, Edit
from verify.attention.examine import examine_problem
from verify.memory import forget_kernels
from verify.verdict import Verdict

FAMILIES = adversarial.families()
# Adversarial cases first: they share one compilation, and notice a broken kernel soonest. Of the ordinary ones, a
# compilation each, every second runs by default.
CASES = [
    pytest.param(case, id=f"{family}:{case.name}", marks=pytest.mark.deep if family == "ordinary" and n % 2 else ())
    for family in sorted(FAMILIES, key=lambda name: name == "ordinary")
    for n, case in enumerate(FAMILIES[family])
]
REPLAY_CASES = [
    case for family in ("adversarial", "non-finite") for case in FAMILIES[family] if case.config == adversarial.CONFIG
]


@pytest.mark.parametrize("case", CASES)
def test_result_within_contract(case: AttentionCase) -> None:
    """Every element lies within its bound, NaN and infinities are where they belong, and replays happen when they must.

    They must if a check certainly fails, and must not if all certainly pass.
    """
    examined = examine_problem(case.build(), config=case.config)
    assert examined.judgement.verdict is Verdict.PASS, examined.judgement.reason
    replays = examined.result.replays
    assert replays is not None
    expected = expected_replays(examined.problem, *blocks(case))
    assert not (expected.must & (replays == 0)).any(), "a block that had to be replayed was not"
    assert not (expected.must_not & (replays > 0)).any(), "a block was replayed without need"


def blocks(case: AttentionCase) -> tuple[int, int]:
    """Queries per block, and keys between whose ends sums are checked: all, where one block has all that count."""
    problem = case.build()
    left, right = problem.window or (None, None)
    offset, right = problem.kv_len - problem.q_len, 0 if problem.causal else right
    band = Band(None if left is None else offset - left, None if right is None else offset + right)
    config = AttentionConfig(*(size or None for size in case.config))
    segments = problem.q_segments is not None
    tiling = resolve(config, problem.q_len, problem.kv_len, band=band, segments=segments)
    return tiling.block_q, problem.kv_len if tiling.overlap else tiling.block_kv


def overlapping(name: str, window: tuple[int, int], shape: tuple[int, int, int, int, int, int], **more: Any) -> Any:
    """A case with key blocks that overlap."""
    return AttentionCase(name, shape, config=(512, 0, 0), window=window, **more)


SMALL = (1, 2, 1, 1024, 2048, 64)
"""Two query blocks, both away from the first keys."""

JUMPED = (300, 0)
"""A window in which anchors come from few of the keys, so that a jump makes query blocks replay."""

OVERLAPPING = [
    overlapping("first-keys", (300, 0), (1, 2, 1, 1024, 1024 + 512, 64)),
    overlapping("two-keys", (1, 0), SMALL),
    overlapping("a-cell-less-one", (254, 0), SMALL),
    overlapping("a-cell", (255, 0), SMALL),
    overlapping("off-the-grid", (400, 77), SMALL, causal=False),
    overlapping("no-first-keys-seen", (900, 0), (1, 4, 2, 512, 2048, 128)),
    overlapping("more-queries", (300, 40), (1, 1, 1, 2048, 1536, 64), causal=False),
    overlapping("soft-cap", (255, 0), SMALL, softcap=(70.0).hex()),
    overlapping("low-soft-cap-and-sinks", (200, 0), SMALL, softcap=(9.0).hex(), sinks=((0.5).hex(), (2.0).hex())),
    *(
        overlapping(
            f"jump-{key}-of-{window[0]}",
            window,
            (1, 2, 1, 1024, 1536, 64),
            edits=(Edit("k", "scale", "10", start=key, stop=key + 1),),
        )
        for window in (JUMPED, (90, 0))
        for key in (500, 1100, 1500)
    ),
]
IN_DEFAULT = {"jump-1100-of-300"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in IN_DEFAULT else pytest.mark.deep)
        for case in OVERLAPPING
    ],
)
def test_windows_over_overlapping_blocks_within_contract(case: AttentionCase) -> None:
    """As `test_result_within_contract`: windows at the edges of cells, at both ends of the keys, and replays there."""
    assert blocks(case)[1] == case.shape[4], "key blocks that do not overlap"
    test_result_within_contract(case)
    if case.edits and case.window == JUMPED:
        replays = examine_problem(case.build(), config=case.config).result.replays
        assert replays is not None
        assert replays.any()


ONLINE_CASES = [
    pytest.param(case, id=case.name, marks=pytest.mark.deep if n % 2 else ())
    for n, case in enumerate(
        [case for family in FAMILIES for case in FAMILIES[family] if case.config == adversarial.CONFIG][::5]
    )
]


@pytest.mark.parametrize("case", ONLINE_CASES)
def test_online_within_contract(case: AttentionCase) -> None:
    """The rescaling softmax obeys the same bound, and replays for non-finite values alone."""
    problem = case.build()
    examined = examine_problem(problem, config=case.config, softmax="online")
    assert examined.judgement.verdict is Verdict.PASS, examined.judgement.reason
    assert examined.result.replays is not None
    certain = expected_replays(problem, *case.config[:2])
    assert not (examined.result.replays.astype(bool) & certain.must_not).any(), "a block was replayed without need"


def test_the_replay_model_decides_most_blocks() -> None:
    """The expectation that the replay test compares with is sharp: undecided blocks are few, and both answers occur."""
    expected = [expected_replays(case.build(), *case.config[:2]) for case in REPLAY_CASES[::5]]
    must = sum(int(e.must.sum()) for e in expected)
    must_not = sum(int(e.must_not.sum()) for e in expected)
    blocks = sum(e.must.size for e in expected)
    assert must > 0
    assert must_not > 0
    assert must + must_not >= 9 * blocks // 10


@pytest.mark.parametrize(
    ("head_dim", "causal"),
    [
        pytest.param(head_dim, causal, marks=() if causal == (n % 2 == 0) else pytest.mark.deep)
        for n, head_dim in enumerate((64, 128, 192, 256))
        for causal in (True, False)
    ],
)
def test_head_dims(head_dim: int, *, causal: bool) -> None:
    """Each supported head_dim, causal and full, with more than one block and a ragged tail."""
    shape = (2, 2, 1, 200, 330, head_dim)
    case = AttentionCase("head-dim", shape, causal=causal, seed=head_dim, config=(128, 128, 128))
    judgement = examine_problem(case.build(), config=case.config, power=True).judgement
    assert judgement.verdict is Verdict.PASS, judgement.reason


# Each length is a compilation of its own; test_schedule.py goes through the geometry of all of them, and the open cases
# through full attention off the block.
COVER_LENGTHS = (17, 63, 192)


@pytest.mark.parametrize("length", COVER_LENGTHS)
def test_lengths(length: int) -> None:
    """Causal lengths on and off every grid."""
    case = adversarial.lengths((length,))[0]
    assert case.causal
    judgement = examine_problem(case.build()).judgement
    assert judgement.verdict is Verdict.PASS, f"{case.name}: {judgement.reason}"


@pytest.mark.deep
def test_every_length_to_300() -> None:
    """Every length from 1 to 300, causal and full."""
    for case in adversarial.lengths(range(1, 301)):
        forget_kernels()
        judgement = examine_problem(case.build()).judgement
        assert judgement.verdict is Verdict.PASS, f"{case.name}: {judgement.reason}"


@pytest.mark.parametrize(
    "config",
    [
        (0, 0, 0),
        (256, 256, 128),
        (512, 512, 256),
        (128, 512, 256),
        pytest.param((256, 256, 256), marks=pytest.mark.deep),
        pytest.param((512, 128, 128), marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("name", ["jump-2000-nats-middle", "v-2^60-jump-60-nats", "nan-in-v-middle"])
def test_block_sizes(name: str, config: tuple[int, int, int]) -> None:
    """The contract does not depend on the block sizes: several fragments per block, and blocks of unequal sides."""
    problem = adversarial.by_name()[name].build()
    if config in {(128, 512, 256), (512, 128, 128)}:
        problem = AttentionCase("sides", (1, 2, 1, min(config[0], 512), 512, 64), seed=1).build()
    judgement = examine_problem(problem, config=config).judgement
    assert judgement.verdict is Verdict.PASS, judgement.reason


TPU_INTERPRETER_CASES = (
    "window-jump",
    "segments-window-sinks-softcap",
    *(
        pytest.param(name, marks=pytest.mark.deep)
        for name in (
            "v-2^118-jump-60-nats",
            "causal-300x129",
            "jump-2000-nats-middle",
            "nan-in-v-middle",
            "causal-384x128",
            "random-heads-6-2",
            "sink-jump",
            "segments-jump",
        )
    ),
)


@pytest.mark.parametrize("name", TPU_INTERPRETER_CASES)
def test_tpu_interpreter(name: str) -> None:
    """The interpreter that simulates DMA finds no race and no read out of bounds, and NaN-poisoned memory no way in."""
    case = adversarial.by_name()[name]
    judgement = examine_problem(case.build(), config=case.config, interpret="tpu").judgement
    assert judgement.verdict is Verdict.PASS, judgement.reason
