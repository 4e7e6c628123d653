"""The search space of the static anchor: structure is drawn, and the arrays follow from it.

A case is a bucket, base exponents, planted scores, copied keys, and a shape of V.  Whatever is drawn is finite and
lies in the contract's domain: |scale| log2(e) sum |q k| <= 2**127 (sizes are limited so that all plants on one key
together stay below it).  Values are drawn as BF16 numbers, so that nothing is rounded when a case is built; subnormal
numbers are drawn too (see `SUBNORMALS`).

In every choice the benign value comes first, since Hypothesis shrinks towards it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from fuzz.attention.buckets import BUCKETS, LANES, Bucket
from verify.attention.adversarial import (
    ARTICLE_TAU_NATS,
    FLYWHEEL_LIMIT,
    JUMPS_NATS,
    LARGEST_BF16,
    LOG2_UNITS,
    SMALLEST_NORMAL_BF16,
    bf16_parts,
)
from verify.attention.cases import AttentionCase, Edit

if TYPE_CHECKING:
    from collections.abc import Sequence

SUBNORMALS = "read as zero, by the oracle and by the kernel alike"
"""The policy for the subnormal BF16 numbers that the space draws."""

MOST_PLANTS = 4
LANES_PER_PLANT = 3
LARGEST_SIZE_EXPONENT = 121
"""log2 of the largest planted score: four of them, divided by a log2 factor of 0.18, stay below 2**126."""

LARGEST_VALUE_EXPONENT = 126
"""Base values are at most 3.5 standard deviations, so that 2**126 of them stays below the largest BF16."""

BASES: tuple[tuple[int | None, int | None], ...] = (
    (None, None), (-1, -2), (0, 0), (2, 0), (None, 0), (4, 2), (0, None), (8, 4), (20, 20), (56, 56), (-120, 100),
    (-130, -130),
)  # fmt: skip
"""log2 of the standard deviation of q and k; None: zero, which makes logits equal, so that a planted score is exact."""

VALUE_EXPONENTS = (0, 12, 35, 60, 100, 117, 118, 119, 126, -60, -100, -126, -131)
VALUE_WORDS = (
    "0x1p+0", "0x0p+0", "-0x1p+0", "0x1.8p+0", LARGEST_BF16, "-" + LARGEST_BF16, "0x1p+118", "0x1p+119", "-0x1p+126",
    SMALLEST_NORMAL_BF16, "-" + SMALLEST_NORMAL_BF16, "0x1p-133", "-0x0p+0",
)  # fmt: skip
SINKS = (*(float(nats).hex() for nats in (0.0, 4.0, -30.0, 60.0, 103.0, -300.0, 300.0, 2000.0)), "-inf")
"""nats: around the weights, around the check's limit, and far beyond it with either sign."""

NEAR_WORDS = ("0x1p-7", "0x1p-14", "-0x1p-1", "0x1p+3")


def _around_the_limit() -> tuple[float, ...]:
    limit = np.float32(FLYWHEEL_LIMIT)
    one_ulp = (np.nextafter(limit, np.float32(0)), limit, np.nextafter(limit, np.float32(np.inf)))
    return tuple(float(x) for x in one_ulp)


SIZES = (
    1.0, 40.0, *_around_the_limit(),
    *(float(np.float32(nats / math.log(2.0))) for nats in (ARTICLE_TAU_NATS, *JUMPS_NATS)),
)  # fmt: skip
"""log2 units."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Some tokens, as a slice, and the words that a case's name has for them."""

    start: int
    stop: int | None
    step: int
    words: str


@dataclasses.dataclass(frozen=True)
class Plant:
    """Scores given to some keys, for some rows.

    Attributes:
        scores: (keys, log2 units) pairs.
        rows: the queries that see the scores.
        heads: query heads (None: all).
        kv_heads: KV heads (None: all).
        words: for the case's name.
    """

    scores: tuple[tuple[Tokens, float], ...]
    rows: Tokens
    heads: tuple[int, ...] | None
    kv_heads: tuple[int, ...] | None
    words: str


# Strategies are built once per bucket: building them costs more than drawing from them.
@functools.cache
def sizes() -> st.SearchStrategy[float]:
    """A planted score in log2 units, an FP32 number: around the limits, of ordinary size, and huge with either sign."""
    huge = st.builds(
        lambda sign, exponent: sign * 2.0**exponent,
        st.sampled_from((1.0, -1.0)),
        st.integers(9, LARGEST_SIZE_EXPONENT),
    )
    return st.one_of(
        st.sampled_from(SIZES),
        st.sampled_from(_around_the_limit()),
        st.integers(-400, 400).map(float),
        st.integers(-2048, 2048).map(lambda n: FLYWHEEL_LIMIT + n / 256),
        huge,
    )


@functools.cache
def key_positions(bucket: Bucket) -> st.SearchStrategy[int]:
    """A key: a corner of a fragment, a block or the diagonal, or any."""
    block, fragment = bucket.key_grid
    corners = [0, 3, LANES - 1, LANES, fragment - 1, fragment, bucket.kv_len // 2, bucket.kv_len - 1]
    corners += [start + offset for start in range(0, bucket.kv_len, block) for offset in (0, 17, block - 1)]
    corners += [bucket.last_key(row) for row in range(0, bucket.q_len, max(bucket.q_len // 4, 1))]
    known = dict.fromkeys(key for key in corners if key < bucket.kv_len)
    return st.one_of(st.sampled_from(list(known)), st.integers(0, bucket.kv_len - 1))


@functools.cache
def token_ranges(bucket: Bucket, axis: str) -> st.SearchStrategy[Tokens]:
    """All queries (axis q) or keys (axis k), one, a run, those from one on, or every n-th."""
    length = bucket.q_len if axis == "q" else bucket.kv_len
    start = st.integers(0, length - 1) if axis == "q" else key_positions(bucket)
    return st.one_of(
        st.just(Tokens(0, None, 1, "all")),
        start.map(one_token),
        st.builds(
            lambda first, count: Tokens(first, min(first + count, length), 1, f"{first}:{min(first + count, length)}"),
            start,
            st.sampled_from((2, 16, LANES, 2 * LANES)),
        ),
        start.map(lambda first: Tokens(first, None, 1, f"{first}:")),
        st.builds(
            lambda first, step: Tokens(first % step, None, step, f"{first % step}::{step}"),
            start,
            st.sampled_from((2, 3, 16, LANES)),
        ),
    )


def one_token(token: int) -> Tokens:
    """A token alone."""
    return Tokens(token, token + 1, 1, f"{token}")


GROWTH = {
    "same": lambda n: 1.0,  # noqa: ARG005  the score does not depend on the block
    "rising": lambda n: 1.0 + n,
    "falling": lambda n: -1.0 - n,
    "alternating": lambda n: (-1.0) ** n,
}


def _planted_keys(draw: st.DrawFn, bucket: Bucket, size: float) -> tuple[tuple[tuple[Tokens, float], ...], str]:
    """Which keys get the score: one, a range of them, or one key in each of several consecutive blocks."""
    block, fragment = bucket.key_grid
    stride = block if bucket.kv_len > block else fragment
    kind = draw(st.sampled_from(("one", "range", "blocks")))
    if kind == "one":
        key = draw(key_positions(bucket))
        return ((one_token(key), size),), f"{size!r} at key {key}"
    if kind == "range":
        tokens = draw(token_ranges(bucket, "k"))
        return ((tokens, size),), f"{size!r} at keys {tokens.words}"
    start = draw(key_positions(bucket))
    growth = draw(st.sampled_from(tuple(GROWTH)))
    hit = range(start, bucket.kv_len, stride)
    # A rising score must stay below the largest size as well.
    bounded = max(min(size, 2.0**118), -(2.0**118))
    scores = tuple((one_token(key), float(np.float32(bounded * GROWTH[growth](n)))) for n, key in enumerate(hit))
    return scores, f"{growth} {bounded!r} at keys {start}::{stride}"


@functools.cache
def _one_head(count: int) -> st.SearchStrategy[tuple[int, ...] | None]:
    return st.none() if count == 1 else st.one_of(st.none(), st.integers(0, count - 1).map(lambda head: (head,)))


def _plant(draw: st.DrawFn, bucket: Bucket) -> Plant:
    """One plant: a score, its keys, and the rows and heads that see it."""
    scores, words = _planted_keys(draw, bucket, draw(sizes()))
    rows = draw(token_ranges(bucket, "q"))
    heads, kv_heads = draw(_one_head(bucket.shape[1])), draw(_one_head(bucket.shape[2]))
    if rows.words != "all":
        words += f" rows {rows.words}"
    for name, chosen in (("head", heads), ("KV head", kv_heads)):
        if chosen is not None:
            words += f" {name} {chosen[0]}"
    return Plant(scores, rows, heads, kv_heads, words)


@functools.cache
def plants(bucket: Bucket) -> st.SearchStrategy[Plant]:
    """Plants for one bucket."""
    return st.composite(_plant)(bucket)


def plant_edits(planted: Sequence[Plant], bucket: Bucket) -> tuple[Edit, ...]:
    """Three lanes per plant: q holds 1 in its rows, k the three BF16 parts of its score."""
    if not planted:
        return ()
    lanes = (0, LANES_PER_PLANT * len(planted))
    edits = [Edit("k", "set", "0x0p+0", lanes=lanes), Edit("q", "set", "0x0p+0", lanes=lanes)]
    for n, plant in enumerate(planted):
        first = LANES_PER_PLANT * n
        rows = plant.rows
        edits.append(
            Edit(
                "q", "set", "0x1p+0", heads=plant.heads, start=rows.start, stop=rows.stop, step=rows.step,
                lanes=(first, first + LANES_PER_PLANT),
            )
        )  # fmt: skip
        for tokens, size in plant.scores:
            for lane, part in enumerate(bf16_parts(size / bucket.log2_factor)):
                if float.fromhex(part) != 0.0 or len(plant.scores) > 1:
                    edits.append(
                        Edit(
                            "k", "set", part, heads=plant.kv_heads, start=tokens.start, stop=tokens.stop,
                            step=tokens.step, lanes=(first + lane, first + lane + 1),
                        )
                    )  # fmt: skip
    return tuple(edits)


def _duplicates(draw: st.DrawFn, bucket: Bucket) -> tuple[tuple[Edit, ...], str]:
    """Keys that hold what another key holds, planted score included; every second one may differ in one lane."""
    source = draw(key_positions(bucket))
    tokens = draw(token_ranges(bucket, "k"))
    copies = [Edit("k", "copy", str(source), start=tokens.start, stop=tokens.stop, step=tokens.step)]
    words = f"keys {tokens.words} as {source}"
    if draw(st.booleans()):
        lane = (bucket.head_dim - 1, bucket.head_dim)
        value = draw(st.sampled_from(NEAR_WORDS))
        step = 2 * tokens.step
        copies.append(Edit("k", "set", value, start=tokens.start, stop=tokens.stop, step=step, lanes=lane))
        copies.append(Edit("q", "set", "0x1p+0", lanes=lane))
        words += " but for a lane"
    return tuple(copies), words


def _value_edits(draw: st.DrawFn, bucket: Bucket, exponent: int) -> tuple[tuple[Edit, ...], str]:
    """What is done to V: some tokens scaled (once, so that nothing overflows), others set, or a short period."""
    edits: list[Edit] = []
    words: list[str] = []
    width = bucket.v_dim or bucket.head_dim
    lanes = st.sampled_from((None, (0, 1), (width - 1, width)))
    if draw(st.booleans()):
        tokens, target = draw(token_ranges(bucket, "k")), draw(st.sampled_from(VALUE_EXPONENTS))
        edits.append(
            Edit(
                "v", "scale", str(target - exponent), start=tokens.start, stop=tokens.stop, step=tokens.step,
                lanes=draw(lanes),
            )
        )  # fmt: skip
        words.append(f"2^{target} at {tokens.words}")
    if draw(st.booleans()):
        period = draw(st.integers(2, 9))
        edits.append(Edit("v", "mod", str(period)))
        words.append(f"mod {period}")
    for _ in range(draw(st.integers(0, 2))):
        tokens, word = draw(token_ranges(bucket, "k")), draw(st.sampled_from(VALUE_WORDS))
        edits.append(Edit("v", "set", word, start=tokens.start, stop=tokens.stop, step=tokens.step, lanes=draw(lanes)))
        words.append(f"{word} at {tokens.words}")
    return tuple(edits), ", ".join(words)


def _features(draw: st.DrawFn, bucket: Bucket) -> tuple[dict[str, Any], str]:
    """Sinks and segment ids, where the bucket has them."""
    more: dict[str, Any] = {}
    words = []
    if bucket.sinks:
        more["sinks"] = tuple(draw(st.sampled_from(SINKS)) for _ in range(bucket.shape[1]))
        words.append("sinks " + ", ".join(f"{float.fromhex(sink):g}" for sink in more["sinks"]))
    if bucket.segments:
        for name, tokens in (("q_segments", bucket.q_len), ("k_segments", bucket.kv_len)):
            more[name] = draw(segment_runs(tokens))
            words.append(f"{name} " + " ".join(f"{count} of {ident}" for ident, count in more[name]))
    return more, "; ".join(words)


@functools.cache
def segment_runs(tokens: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Runs of ids that cover the tokens; ids come back, and boundaries lie on and off the block."""
    cuts = st.sets(st.one_of(st.sampled_from((1, LANES - 1, LANES, LANES + 1)), st.integers(1, tokens - 1)), max_size=4)

    def runs(cut: set[int], idents: list[int]) -> tuple[tuple[int, int], ...]:
        edges = [0, *sorted(cut), tokens]
        return tuple((idents[n], stop - start) for n, (start, stop) in enumerate(itertools.pairwise(edges)))

    return st.builds(runs, cuts, st.lists(st.integers(0, 2), min_size=5, max_size=5))


@st.composite
def anchor_cases(draw: st.DrawFn, buckets: Sequence[Bucket] = tuple(BUCKETS.values())) -> AttentionCase:
    """A case against the static anchor."""
    bucket = draw(st.sampled_from(list(buckets)))
    q_exponent, k_exponent = draw(st.sampled_from(BASES))
    planted = draw(st.lists(plants(bucket), max_size=MOST_PLANTS))
    copied, copy_words = _duplicates(draw, bucket) if draw(st.booleans()) else ((), "")
    v_exponent = draw(st.sampled_from(VALUE_EXPONENTS))
    valued, value_words = _value_edits(draw, bucket, v_exponent)
    seed = draw(st.integers(0, 2**16 - 1))
    words = [bucket.name, *(plant.words for plant in planted), copy_words]
    words.append("equal logits" if q_exponent is None or k_exponent is None else f"logits 2^{q_exponent + k_exponent}")
    words.append(f"v 2^{v_exponent}{' ' if value_words else ''}{value_words}")
    more, more_words = _features(draw, bucket)
    return AttentionCase(
        "; ".join(word for word in (*words, more_words) if word),
        bucket.shape,
        causal=bucket.causal,
        scale=bucket.scale,
        seed=seed,
        exponents=(q_exponent, k_exponent, v_exponent),
        edits=(*plant_edits(planted, bucket), *copied, *valued),
        config=bucket.config,
        v_dim=bucket.v_dim,
        window=bucket.window,
        softcap=bucket.softcap,
        **more,
    )


NON_DYADIC = ("0x1.56p-2", "0x1.9ap-4", "0x1.54p+0", "-0x1.48p+1", "0x1.0p+0", "0x1.fep+6")
"""Near 1/3, 1/10, 4/3, -2.56: no short sums; 1, and a number whose sums fill the significand."""


@st.composite
def constant_values(draw: st.DrawFn, buckets: Sequence[Bucket]) -> AttentionCase:
    """Values that are one number everywhere, or two: sums over many fragments, whose exact result is known."""
    bucket = draw(st.sampled_from(list(buckets)))
    first = draw(st.sampled_from(NON_DYADIC))
    edits = [Edit("v", "set", first)]
    words = [bucket.name, f"v {first}"]
    if draw(st.booleans()):
        second, tokens = draw(st.sampled_from(NON_DYADIC)), draw(token_ranges(bucket, "k"))
        edits.append(Edit("v", "set", second, start=tokens.start, stop=tokens.stop, step=tokens.step))
        words.append(f"{second} at {tokens.words}")
    q_exponent, k_exponent = draw(st.sampled_from(((None, None), (-3, -3), (-1, -2), (0, 0))))
    planted = draw(st.lists(plants(bucket), max_size=1))
    words += [plant.words for plant in planted]
    words.append("equal logits" if q_exponent is None or k_exponent is None else f"logits 2^{q_exponent + k_exponent}")
    return AttentionCase(
        "; ".join(words),
        bucket.shape,
        causal=bucket.causal,
        scale=bucket.scale,
        seed=draw(st.integers(0, 2**16 - 1)),
        exponents=(q_exponent, k_exponent, 0),
        edits=(*plant_edits(planted, bucket), *edits),
        config=bucket.config,
    )


PATTERNS = ("none", "first", "last", "diagonal", "consecutive", "some", "all")
STEPS = (150.0, 300.0, 149.0, 1000.0, 2885.0)
"""log2 units by which each further jump of a row rises: around the limit, and far beyond it."""


def _hit_blocks(draw: st.DrawFn, bucket: Bucket, q_block: int, pattern: str) -> list[int]:
    """The key blocks in which a query block meets a jump."""
    block_q, (block_kv, _) = bucket.config[0], bucket.key_grid
    last_row = min((q_block + 1) * block_q, bucket.q_len) - 1
    seen = bucket.last_key(last_row) // block_kv + 1
    chosen = {
        "none": list,
        "first": lambda: [0],
        "last": lambda: [seen - 1],
        "diagonal": lambda: [bucket.last_key(q_block * block_q) // block_kv],
        "consecutive": lambda: list(range(min(1, seen - 1), min(4, seen))),
        "some": lambda: sorted(draw(st.sets(st.integers(0, seen - 1), min_size=1, max_size=3))),
        "all": lambda: list(range(seen)),
    }
    return chosen[pattern]()


@st.composite
def replay_cases(draw: st.DrawFn, buckets: Sequence[Bucket]) -> AttentionCase:
    """Jumps chosen per query block: which are replayed, at which key blocks, and for which of their rows."""
    bucket = draw(st.sampled_from(list(buckets)))
    block_q, (block_kv, _) = bucket.config[0], bucket.key_grid
    planted, words = [], [bucket.name]
    for q_block in range(-(-bucket.q_len // block_q)):
        pattern = draw(st.sampled_from(PATTERNS))
        hit = _hit_blocks(draw, bucket, q_block, pattern)
        if not hit:
            continue
        first, stop = q_block * block_q, min((q_block + 1) * block_q, bucket.q_len)
        row = draw(st.sampled_from((first, (first + stop) // 2, stop - 1)))
        rows = draw(st.sampled_from((Tokens(first, stop, 1, f"{first}:{stop}"), one_token(row))))
        step = draw(st.sampled_from(STEPS))
        sign = draw(st.sampled_from((1.0, -1.0)))
        offset = draw(st.sampled_from((17, 0, block_kv - 1)))
        keys = [min(block * block_kv + offset, bucket.kv_len - 1) for block in hit]
        scores = tuple((one_token(key), float(np.float32(sign * step * (n + 1)))) for n, key in enumerate(keys))
        planted.append(Plant(scores, rows, None, None, ""))
        words.append(f"{pattern} {sign * step:g} rows {rows.words}")
    q_exponent, k_exponent = draw(st.sampled_from(((None, None), (-1, -2), (0, 0))))
    v_exponent = draw(st.sampled_from((0, 35, 118)))
    words.append("equal logits" if q_exponent is None or k_exponent is None else f"logits 2^{q_exponent + k_exponent}")
    return AttentionCase(
        "; ".join([*words, f"v 2^{v_exponent}"]),
        bucket.shape,
        causal=bucket.causal,
        scale=bucket.scale,
        seed=draw(st.integers(0, 2**16 - 1)),
        exponents=(q_exponent, k_exponent, v_exponent),
        edits=plant_edits(planted, bucket),
        config=bucket.config,
        window=bucket.window,
    )


@dataclasses.dataclass(frozen=True)
class RaggedBucket:
    """Token axes and heads of packed batches; lengths are drawn, since kernels take them as data.

    Attributes:
        name: what the command line calls it.
        shape: 1, heads, kv_heads, q tokens, k tokens, head_dim.
        causal: bottom-right aligned within each sequence.
        sequences: how many there are.
        why: what it reaches.
        window: (left, right).
        softcap: hexadecimal float.
        sinks: whether heads have sinks, whose logits are drawn.
        mode: how our kernel is called, `default` or `batch invariant`; others have one way.
    """

    name: str
    shape: tuple[int, int, int, int, int, int]
    causal: bool
    sequences: int
    why: str
    window: tuple[int | None, int | None] | None = None
    softcap: str | None = None
    sinks: bool = False
    mode: str = "default"


RAGGED_BUCKETS = {
    bucket.name: bucket
    for bucket in (
        RaggedBucket(
            "packed-96-d64",
            (1, 2, 1, 96, 96, 64),
            causal=True,
            sequences=4,
            why="self-attention of short sequences: tails of 1 to 17 rows",
        ),
        RaggedBucket(
            "packed-320-d64", (1, 4, 2, 320, 320, 64), causal=True, sequences=6, why="sequences over several key blocks"
        ),
        RaggedBucket(
            "unequal-64x256-d64",
            (1, 2, 1, 64, 256, 64),
            causal=True,
            sequences=4,
            why="queries behind keys of other lengths",
        ),
        RaggedBucket(
            "window-192-d64",
            (1, 2, 1, 192, 192, 64),
            causal=True,
            sequences=3,
            why="a window that ends within sequences",
            window=(24, 0),
        ),
        RaggedBucket(
            "full-128-d128", (1, 2, 1, 128, 128, 128), causal=False, sequences=4, why="not causal, head_dim 128"
        ),
        RaggedBucket(
            "sinks-160-d64",
            (1, 4, 2, 160, 160, 64),
            causal=True,
            sequences=4,
            why="sinks and a soft cap, grouped heads",
            softcap=(50.0).hex(),
            sinks=True,
        ),
        RaggedBucket(
            "invariant-160-d64",
            (1, 2, 1, 160, 160, 64),
            causal=True,
            sequences=4,
            why="the batch-invariant mode",
            mode="batch invariant",
        ),
    )
}


def _cuts(draw: st.DrawFn, sequences: int, tokens: int) -> tuple[int, ...]:
    """Cumulative lengths: short tails, empty sequences, edges on and off the 8-row grid, padding behind the last."""
    edge = st.one_of(st.sampled_from((tokens, 0, 1, 7, 8, 9, 13, 17, 64, 127, 128, 129)), st.integers(0, tokens)).map(
        lambda n: min(n, tokens)
    )
    return (0, *sorted(draw(st.lists(edge, min_size=sequences, max_size=sequences))))


@st.composite
def ragged_cases(draw: st.DrawFn, buckets: Sequence[RaggedBucket]) -> AttentionCase:
    """Packed sequences of any lengths over ordinary, equal or jumping scores."""
    bucket = draw(st.sampled_from(list(buckets)))
    q_tokens, k_tokens = bucket.shape[3:5]
    cu_q = _cuts(draw, bucket.sequences, q_tokens)
    cu_k = cu_q if q_tokens == k_tokens and draw(st.booleans()) else _cuts(draw, bucket.sequences, k_tokens)
    if not cu_q[-1] or not cu_k[-1]:  # a batch without a row or without a key is refused before it is packed
        cu_q, cu_k = ((*cu[:-1], tokens) for cu, tokens in ((cu_q, q_tokens), (cu_k, k_tokens)))
    q_exponent, k_exponent = draw(st.sampled_from(((None, None), (-1, -2), (0, 0), (2, 0), (8, 4))))
    edits: list[Edit] = []
    words = [bucket.name, f"cu_q {list(cu_q)}", f"cu_k {list(cu_k)}"]
    if draw(st.booleans()):
        key, size = draw(st.integers(0, k_tokens - 1)), draw(st.sampled_from((60.0, 149.0, 160.0, 2885.0)))
        edits = [Edit("k", "set", "0x0p+0", lanes=(0, 3)), Edit("q", "set", "0x1p+0", lanes=(0, 3))]
        edits += [
            Edit("k", "set", part, start=key, stop=key + 1, lanes=(lane, lane + 1))
            for lane, part in enumerate(bf16_parts(size))
        ]
        words.append(f"{size:g} at key {key}")
    sinks = tuple(draw(st.sampled_from(SINKS)) for _ in range(bucket.shape[1])) if bucket.sinks else None
    if sinks:
        words.append("sinks " + ", ".join(f"{float.fromhex(sink):g}" for sink in sinks))
    v_exponent = draw(st.sampled_from((0, 35, 100, 118)))
    words.append("equal logits" if q_exponent is None or k_exponent is None else f"logits 2^{q_exponent + k_exponent}")
    return AttentionCase(
        "; ".join([*words, f"v 2^{v_exponent}"]),
        bucket.shape,
        causal=bucket.causal,
        scale=LOG2_UNITS,
        seed=draw(st.integers(0, 2**16 - 1)),
        exponents=(q_exponent, k_exponent, v_exponent),
        edits=tuple(edits),
        window=bucket.window,
        softcap=bucket.softcap,
        sinks=sinks,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
    )
