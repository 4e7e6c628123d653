"""The kernel against its numerical contract, on every named family."""

from __future__ import annotations

import pytest
from replay_model import expected_replays

from flywheel.attention.tiling import AttentionConfig, resolve
from verify.attention import adversarial
from verify.attention.cases import AttentionCase
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
    problem = examined.problem
    tiling = resolve(
        AttentionConfig(*(size or None for size in case.config)), problem.q_len, problem.kv_len, online=False
    )
    expected = expected_replays(problem, tiling.block_q, tiling.block_kv)
    assert not (expected.must & (replays == 0)).any(), "a block that had to be replayed was not"
    assert not (expected.must_not & (replays > 0)).any(), "a block was replayed without need"


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
