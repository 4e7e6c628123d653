"""The hunts for dense attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from fuzz.attention.buckets import (
    BUCKETS,
    FEATURE_BUCKETS,
    LONG_BUCKETS,
    MASK_BUCKETS,
    RELATION_BUCKETS,
    REPLAY_BUCKETS,
    SCHEDULE_BUCKETS,
    Bucket,
)
from fuzz.attention.space import RAGGED_BUCKETS, RaggedBucket, anchor_cases, constant_values, ragged_cases, replay_cases
from fuzz.case import Case
from fuzz.hunts import Hunt
from fuzz.kinds import KINDS
from fuzz.operations import ATTENTION, RAGGED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hypothesis.strategies import SearchStrategy

    from verify.attention.cases import AttentionCase

CONTRACT = "fuzz.attention.evaluate:evaluate"
MOVES = "fuzz.attention.moves:MOVES"

POISONS = ("nan", "inf", "-inf")
RELATIONS = ("permute", "split", "packing", "grouped", "constant", "scaled", "doubled", "window")
INVARIANCES = ("run twice", "in a batch", "heads alone")
DMA_TIMING, MEMORY, SEEDS = ("on_wait", "eager"), ("nan", "zero"), 3
SCHEDULES: Mapping[str, SearchStrategy[str | int]] = {
    "dma": st.sampled_from(DMA_TIMING),
    "memory": st.just("nan"),
    "seed": st.integers(0, 1),
}
"""Of kernels that take long to compile for each."""
PEERS = ("flywheel.attention[online]", "jax.nn.dot_product_attention")


def _asking(
    hunt: str,
    inputs: Callable[[Sequence[Any]], SearchStrategy[AttentionCase]],
    asks: Mapping[str, SearchStrategy[str | int]],
) -> Callable[[Sequence[Any]], SearchStrategy[Case]]:
    """Cases of a hunt: inputs from a space, and what is asked of them, name by name."""
    names = sorted(asks)
    values = st.tuples(*(asks[name] for name in names))

    def cases(buckets: Sequence[Any]) -> SearchStrategy[Case]:
        def case(found: AttentionCase, given: tuple[str | int, ...]) -> Case:
            return Case(hunt, found, tuple(zip(names, given, strict=True)))

        return st.builds(case, inputs(buckets), values)

    return cases


def _poison() -> dict[str, SearchStrategy[str | int]]:
    tokens = st.one_of(st.sampled_from((0, 127, 128, 129, 199, 255, 299)), st.integers(0, 511))
    return {
        "poison": st.sampled_from(POISONS),
        "tensor": st.sampled_from(("v", "k", "q")),
        "token": tokens,
        "tokens": st.sampled_from((1, 2, 16, 128)),
        "lane": st.sampled_from((-1, 0, 5, 63)),
        "head": st.integers(0, 3),
    }


def _simulated_cases(buckets: Sequence[RaggedBucket]) -> SearchStrategy[Case]:
    """Packed batches with a schedule; the padding may hold NaN."""
    return _asking("packed-schedule", ragged_cases, {"padding": st.sampled_from(("none", "nan")), **SCHEDULES})(buckets)


def _packed_cases(buckets: Sequence[RaggedBucket]) -> SearchStrategy[Case]:
    """Packed batches, poison, and how the kernel is called: that goes with the bucket, since it is compiled."""

    def cases(bucket: RaggedBucket) -> SearchStrategy[Case]:
        return _asking("ragged", ragged_cases, _packing(bucket.mode))([bucket])

    return st.sampled_from(list(buckets)).flatmap(cases)


def _packing(mode: str) -> dict[str, SearchStrategy[str | int]]:
    return {
        "padding": st.sampled_from(("none", *POISONS)),
        "spoilt": st.sampled_from((-1, -1, *range(6))),
        "tensor": st.sampled_from(("v", "k", "q")),
        "mode": st.just(mode),
    }


def _hunt(
    name: str,
    summary: str,
    buckets: Mapping[str, Bucket],
    inputs: Callable[[Sequence[Any]], SearchStrategy[AttentionCase]] = anchor_cases,
    evaluator: str = CONTRACT,
    *,
    slow: bool = False,
    asks: Mapping[str, SearchStrategy[str | int]] | None = None,
) -> Hunt:
    return Hunt(
        name, summary, ATTENTION, buckets, _asking(name, inputs, asks or {}), evaluator, MOVES, KINDS if slow else ()
    )


HUNTS = (
    _hunt(
        "anchor",
        "static-anchor softmax: jumps around every limit in every place, |v| up to the largest BF16, equal, huge and "
        "opposite logits, repeated and near-duplicate keys",
        BUCKETS,
    ),
    _hunt(
        "replays",
        "which query blocks are replayed, at which of their key blocks, in which order: first, last, diagonal, "
        "consecutive, one row or all, overflow again after a replay has begun",
        REPLAY_BUCKETS,
        replay_cases,
    ),
    _hunt(
        "masks",
        "windows, soft caps, sinks, segment ids and wider values: anchors that are chosen late, rows without a key, "
        "edges one off the block, sinks beyond the check's limit",
        FEATURE_BUCKETS | MASK_BUCKETS,
    ),
    _hunt(
        "contamination",
        "NaN and infinities where they must not matter: keys, values and queries that a row does not see",
        {name: FEATURE_BUCKETS[name] for name in ("window-384-d64", "band-300x200-d64", "segments-300-d64")}
        | {name: BUCKETS[name] for name in ("300x129-d64", "129x300-d64")},
        evaluator="fuzz.attention.contamination:evaluate",
        asks=_poison(),
    ),
    _hunt(
        "accumulation",
        "many fragments with non-dyadic values: V = c everywhere must give c, and errors must not grow with the keys",
        LONG_BUCKETS,
        constant_values,
    ),
    _hunt(
        "relations",
        "metamorphic: permuted keys, split keys, packing, grouped against repeated heads, a constant on all logits, V "
        "times a power of two, a doubled key against ln 2 on its logit, a window that hides nothing",
        RELATION_BUCKETS,
        evaluator="fuzz.attention.metamorphic:evaluate",
        asks={"relation": st.sampled_from(RELATIONS), "seed": st.integers(0, 2**16 - 1)},
    ),
    _hunt(
        "invariance",
        "bitwise: the same call twice, inside a batch, a head alone",
        {name: BUCKETS[name] for name in ("256x256-d128", "129x300-d64")}
        | {name: FEATURE_BUCKETS[name] for name in ("sinks-129x300-d64", "segments-300-d64")},
        evaluator="fuzz.attention.invariance:evaluate",
        asks={"relation": st.sampled_from(INVARIANCES)},
    ),
    _hunt(
        "schedule",
        "the TPU interpreter's schedule as dimensions: race detection, the time at which DMAs land, seeds, what fresh "
        "memory holds; the result must not change by a bit",
        SCHEDULE_BUCKETS,
        evaluator="fuzz.attention.schedule:evaluate",
        slow=True,
        asks={
            "dma": st.sampled_from(DMA_TIMING),
            "memory": st.sampled_from(MEMORY),
            "seed": st.integers(0, SEEDS - 1),
        },
    ),
    _hunt(
        "differential",
        "against other kernels: the rescaling softmax of our own, and XLA's attention",
        {name: BUCKETS[name] for name in ("256x256-d128", "256x384-d64-full", "129x300-d64")},
        evaluator="fuzz.attention.differential:evaluate",
        asks={"peer": st.sampled_from(PEERS)},
    ),
    Hunt(
        "ragged",
        "packed sequences: boundaries off the 8-row grid, tails of 1 to 17 rows, empty sequences, poison in the "
        "padding or in a neighbour, guard rows behind the last sequence, sinks, the batch-invariant mode",
        RAGGED,
        RAGGED_BUCKETS,
        _packed_cases,
        "fuzz.attention.ragged:evaluate",
        MOVES,
    ),
    Hunt(
        "packed-schedule",
        "packed sequences under the TPU interpreter's schedules: races between copies made by hand, when they land, "
        "memory that holds NaN; the result must not change by a bit",
        RAGGED,
        {name: RAGGED_BUCKETS[name] for name in ("packed-96-d64",)},
        _simulated_cases,
        "fuzz.attention.ragged:evaluate_schedule",
        MOVES,
        KINDS,
    ),
)
