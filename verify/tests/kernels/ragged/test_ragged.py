"""Packed sequences: every length and offset, neighbours, padding, permutations, solo runs, compilations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import (
    FEATURES,
    PER_LAUNCH,
    SEQUENCES,
    TOKENS,
    arranged,
    assert_within_contract,
    batch,
    launches,
    run,
    sequence,
)

import flywheel
from flywheel.ragged import api

LENGTHS = [13, 0, 17, 150, 1, 3, 0, 2, 131, 40, 300]


def test_every_pair_of_lengths_from_1_to_17() -> None:
    """All 289 pairs side by side with guard rows: every element, the guards' too, within its bound."""
    batches = launches()
    assert sum(len(lengths) for lengths in batches) == 3 * 17 * 17
    for n, lengths in enumerate(batches):
        assert len(lengths) == 3 * PER_LAUNCH
        problem = batch(lengths, seed=n)
        assert_within_contract(problem, run(problem))


@pytest.mark.parametrize("offset", range(8))
def test_every_start_offset(offset: int) -> None:
    """Sequences of one to three blocks at every offset from the 8-row grid, short ones between them."""
    problem = batch([offset, 128, 3, 259, 130], seed=offset)
    assert_within_contract(problem, run(problem))


@pytest.mark.deep
def test_padding_and_empty_rows_are_zero() -> None:
    """Tokens that belong to no sequence give 0 with LSE -inf, also beyond the last group of 8 rows."""
    problem = batch(LENGTHS)
    result = flywheel.ragged_attention(
        *(jnp.asarray(x) for x in (problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k)),
        causal=True,
        scale=problem.scale,
        return_lse=True,
        return_max_logit=True,
        return_diagnostics=True,
        config=flywheel.RaggedConfig(128),
        interpret=True,
    )
    assert isinstance(result, flywheel.RaggedOutput)
    assert result.lse is not None
    rows = slice(sum(LENGTHS), None)
    assert not np.asarray(result.out, np.float32)[:, rows].any()
    assert (np.asarray(result.lse)[:, rows] == -np.inf).all()


@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.deep)])
def test_other_sequences_and_padding_never_reach_a_result(value: float) -> None:
    """NaN or infinity in one sequence and in the padding leave every other row bitwise as it was."""
    problem = batch(LENGTHS)
    rows, keys = sequence(problem, 3)
    poisoned = [np.array(x) for x in (problem.q, problem.k, problem.v)]
    for x, own in zip(poisoned, (rows, keys, keys), strict=True):
        x[:, own] = value
        x[:, sum(LENGTHS) :] = value
    q, k, v = poisoned
    before, after = run(problem), run(dataclasses.replace(problem, q=q, k=k, v=v))
    others = np.ones(sum(LENGTHS), bool)
    others[rows] = False
    assert np.array_equal(before.out[:, :, others], after.out[:, :, others])
    assert before.lse is not None
    assert after.lse is not None
    assert np.array_equal(before.lse[:, :, others], after.lse[:, :, others])


def test_permuting_sequences_permutes_results() -> None:
    """Another order of the sequences, all at other offsets: the same results within the bound."""
    problem = batch(LENGTHS)
    order = [10, 2, 8, 0, 5, 3, 7, 9, 4]
    permuted = arranged(problem, order)
    assert_within_contract(permuted, run(permuted))


@pytest.mark.deep
def test_a_sequence_alone() -> None:
    """Each of several sequences alone in the array, at the start of it, is within the bound."""
    problem = batch(LENGTHS)
    for n in (2, 3, 10):
        alone = arranged(problem, [n])
        assert_within_contract(alone, run(alone))


def test_other_lengths_need_no_compilation() -> None:
    """One compilation serves all lengths of a shape."""
    run(batch(LENGTHS))
    compiled = api._jitted._cache_size()
    for lengths in ([TOKENS], [1] * SEQUENCES, [0, 7, 600]):
        run(batch(lengths))
    assert api._jitted._cache_size() == compiled


@jax.jit
def call(cu: jax.Array) -> object:
    """The kernel with traced lengths."""
    problem = batch(LENGTHS)
    return flywheel.ragged_attention(
        *(jnp.asarray(x) for x in (problem.q, problem.k, problem.v)),
        cu,
        cu,
        causal=True,
        scale=problem.scale,
        return_lse=True,
        return_max_logit=True,
        return_diagnostics=True,
        config=flywheel.RaggedConfig(128),
        interpret=True,
    )


@pytest.mark.deep
@pytest.mark.parametrize(
    "raw",
    [
        [0, 50, 20, 90],
        [0, -5, 2000, 100],
        [7, 30, 60, 681],
        [2**31 - 1, -(2**31), 0, 5],
    ],
)
def test_traced_lengths_that_break_the_rules_are_inert(raw: list[int]) -> None:
    """Under `jit` bad bounds act as `flywheel.packing.clean` says: like the cleaned ones, bit for bit."""
    bad = np.full(SEQUENCES + 1, raw[-1], np.int64)
    bad[: len(raw)] = raw
    bad = bad.astype(np.int32)
    tidy = np.maximum.accumulate(np.clip(bad, 0, TOKENS))
    for a, b in zip(jax.tree.leaves(call(bad)), jax.tree.leaves(call(tidy)), strict=True):
        assert np.array_equal(a, b, equal_nan=True)


Q_LENGTHS, K_LENGTHS = [300, 40, 0, 1, 200, 9], [450, 7, 5, 260, 150, 0]


@pytest.mark.deep
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", FEATURES)
def test_features_with_other_lengths_of_keys(name: str, *, invariant: bool) -> None:
    """Every feature, with fewer and more keys than queries, none of either, and several blocks of both."""
    options = dict(FEATURES[name])
    how = {"softmax": options.pop("softmax")} if "softmax" in options else {}
    for lengths in ((Q_LENGTHS, K_LENGTHS), ([5, 130, 64], [13, 700, 65])):
        problem = batch(*lengths, tokens=(570, 880), sequences=6, **options)
        assert_within_contract(problem, run(problem, batch_invariant=invariant, **how))


@pytest.mark.deep
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (16, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_heads_and_widths(heads: tuple[int, int], head_dim: int) -> None:
    """MHA, GQA and MQA of every width, heads in one unit and in several."""
    problem = batch(
        [7, 130, 200, 5], [7, 130, 205, 300], tokens=(360, 650), sequences=4, heads=heads, head_dim=head_dim
    )
    assert_within_contract(problem, run(problem))


@pytest.mark.deep
@pytest.mark.parametrize("sizes", [(256, 128), (384, 256), (512, 512)])
def test_blocks_of_several_classes(sizes: tuple[int, int]) -> None:
    """Blocks with several sizes of bodies, each of them used."""
    lengths = [*range(20, sizes[0], 75), sizes[0] + 3, 2 * sizes[0] + 77]
    total = sum(lengths) + 9
    problem = batch(lengths, tokens=(total, total), sequences=len(lengths))
    assert_within_contract(problem, run(problem, block=sizes[0], short=sizes[1]))


@pytest.mark.deep
def test_replays_of_jumps_and_large_values() -> None:
    """A jump of scores beyond the limit, or of values, replays the block that has it, and stays within the bound."""
    problem = batch([150, 40, 300], seed=3)
    q, k, v = (np.array(x) for x in (problem.q, problem.k, problem.v))
    q[:, 100] = 64.0
    k[:, 90] = 64.0
    v[:, 170] = 3e38
    jumping = dataclasses.replace(problem, q=q, k=k, v=v)
    result = run(jumping)
    assert_within_contract(jumping, result)
    assert result.replays is not None
    assert result.replays.any()
    assert not result.replays.all()


@pytest.mark.deep
@pytest.mark.parametrize("options", [{}, {"window": (40, None)}, {"causal": False}])
@pytest.mark.parametrize("invariant", [False, True])
def test_without_races_in_poisoned_memory(options: dict[str, object], *, invariant: bool) -> None:
    """The simulating interpreter: copies of traced sizes, no race, no use of memory that nothing was written to."""
    problem = batch([13, 0, 150, 3, 140], [13, 5, 150, 70, 141], tokens=(310, 385), sequences=5, **options)
    assert_within_contract(problem, run(problem, interpret="tpu", batch_invariant=invariant))


@pytest.mark.deep
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_counts_within_the_sequence(layout: str) -> None:
    """A base alone gives each token the position of its aligned key; the result is that of rotated queries."""
    problem = batch([13, 150, 20], [20, 150, 40], tokens=(190, 220), sequences=3)
    lengths = zip(np.diff(problem.cu_seqlens_q), np.diff(problem.cu_seqlens_k), strict=True)
    positions = np.concatenate([np.arange(k - q, k) for q, k in lengths] + [np.zeros(7, int)]).astype(np.int32)
    operands = [jnp.asarray(x) for x in (problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k)]
    outs = [
        np.asarray(
            flywheel.ragged_attention(
                *operands, causal=True, rotary=rotary, config=flywheel.RaggedConfig(128), interpret=True
            ),
            np.float32,
        )
        for rotary in (
            flywheel.Rotary(base=10000.0, layout=layout),  # type: ignore[arg-type]
            flywheel.Rotary(positions=jnp.asarray(positions), base=10000.0, layout=layout),  # type: ignore[arg-type]
        )
    ]
    assert np.array_equal(outs[0][:, :183], outs[1][:, :183])
    tables = flywheel.rotary_tables(jnp.asarray(positions), 64, 10000.0)
    from flywheel.attention.rotary import expand_tables, rotate  # noqa: PLC0415  the dense kernel's own maths

    cos, sin = expand_tables(tables, layout)  # type: ignore[arg-type]
    rotated = np.stack([np.asarray(rotate(head, cos[0], sin[0], layout)) for head in operands[0]])
    turned = dataclasses.replace(problem, q=rotated)
    plain = run(turned)
    assert np.array_equal(np.asarray(plain.out[0], np.float32), outs[0][:, :183])
