"""The search spaces of masks, poison and packed sequences: the hazards that their hunts must reach."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.attention.buckets import ANCHOR_KEYS
from fuzz.attention.contamination import poisoned, untouched
from fuzz.hunts import hunts
from verify.attention.adversarial import FLYWHEEL_LIMIT, LARGEST_BF16
from verify.attention.cases import AttentionCase
from verify.attention.problem import widen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fuzz.case import Case
    from verify.attention.problem import AttentionProblem

GROUP = 8
"""Rows that a copy of the packed kernel moves together."""

TANH_SATURATES = 88.0
"""Where tanh built from two exponentials becomes inf / inf."""

LARGEST_INT16 = 2**15 - 1
MOST_DRAWS = 40
"""Batches of draws: far more than any hazard has needed."""


def missing(hunt: str, wanted: set[str], hazards: Callable[[Case], set[str]], buckets: Sequence[str] = ()) -> set[str]:
    """The hazards that no draw from these buckets (none named: all) has, once many have been tried."""
    left = set(wanted)
    space = hunts()[hunt]
    for number in range(MOST_DRAWS):

        @settings(
            max_examples=30, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
        )
        @seed(number)
        @given(space.cases(space.chosen(buckets)))
        def collect(case: Case) -> None:
            left.difference_update(hazards(case))

        collect()
        if not left:
            break
    return left


MASK_HAZARDS = {
    "segments-300-d64": {
        "first block hidden by segments", "rows without a key by segments", "a segment that comes back",
        "a jump behind a hidden block",
    },
    "band-300x200-d64": {
        "first block hidden by a window", "rows without a key by a window", "a jump behind a hidden block",
    },
    "sinks-129x300-d64": {
        "another sink for another head", "a sink beyond the limit", "a sink far below", "a sink of -inf",
    },
    "softcap-256-d128": {"soft cap far passed on both sides"},
}  # fmt: skip
"""By the shape that can have them."""


def mask_hazards(case: Case) -> set[str]:
    """What is special about the masks, sinks and caps of a case, seen from its first head."""
    inputs, problem = case.inputs, case.problem
    assert isinstance(inputs, AttentionCase)
    signs: dict[str, bool] = {}
    if problem.sinks is not None:
        signs = {
            "another sink for another head": len(set(problem.sinks.tolist())) > 1,
            "a sink beyond the limit": bool((problem.sinks > FLYWHEEL_LIMIT).any()),
            "a sink far below": bool((problem.sinks < -FLYWHEEL_LIMIT).any()),
            "a sink of -inf": bool(np.isneginf(problem.sinks).any()),
        }
    mask = problem.mask()
    seen, block = mask.any(axis=1), inputs.config[1]
    hidden = seen & ~mask[:, :block].any(axis=1)
    by = "a window" if problem.q_segments is None else "segments"
    signs[f"first block hidden by {by}"] = bool(hidden.any())
    signs[f"rows without a key by {by}"] = bool((~seen).any())
    if problem.k_segments is not None:
        ids = [ident for ident, _ in itertools.groupby(problem.k_segments[0].tolist())]
        signs["a segment that comes back"] = len(set(ids)) < len(ids)
    if hidden.any():
        scores = np.where(mask, logits(problem, 0), -np.inf)[hidden]
        first = scores[np.arange(len(scores)), np.isfinite(scores).argmax(axis=1)]
        signs["a jump behind a hidden block"] = bool((scores.max(axis=1) - first > FLYWHEEL_LIMIT).any())
    if problem.softcap is not None:
        far, scores = TANH_SATURATES * problem.softcap, logits(problem, 0)
        signs["soft cap far passed on both sides"] = bool((scores > far).any() and (scores < -far).any())
    return {name for name, here in signs.items() if here}


def logits(problem: AttentionProblem, head: int) -> np.ndarray:
    """Scaled products of one head, before soft caps and masks."""
    return widen(problem.q[0, head]) @ widen(problem.k[0, problem.kv_head(head)]).T * problem.scale


@pytest.mark.parametrize("bucket", MASK_HAZARDS)
def test_mask_space_reaches_each_hazard(bucket: str) -> None:
    """Blocks without a visible key and jumps behind them, rows without a key, sinks and caps far beyond the scores."""
    assert not missing("masks", MASK_HAZARDS[bucket], mask_hazards, (bucket,))


def test_mask_shapes_have_each_hazard() -> None:
    """Windows around the block and to each side, wider values, positions beyond 16 bits, a GQA ratio that tells."""
    buckets = hunts()["masks"].buckets.values()
    windows = {bucket.window for bucket in buckets if bucket.causal}
    assert {(0, None), (127, 0), (128, 0)} <= windows
    assert any(bucket.window is not None and bucket.window[0] is None for bucket in buckets if not bucket.causal)
    assert any(bucket.window == (1023, 0) and bucket.kv_len > LARGEST_INT16 for bucket in buckets)
    assert any(bucket.v_dim is not None and bucket.v_dim > bucket.head_dim for bucket in buckets)
    ratios = [(bucket.shape[1] // bucket.shape[2], bucket.shape[2]) for bucket in buckets]
    assert any(1 < kv_heads != group > 1 for group, kv_heads in ratios)


POISON_HAZARDS = {
    *(f"{value} in {tensor}" for value in ("nan", "inf", "-inf") for tensor in ("q", "k", "v")),
    "in V that no row sees", "in V that some rows of a block see", "in one lane", "all of a row's keys",
}  # fmt: skip


def poison_hazards(case: Case) -> set[str]:
    """What the poison of a case reaches, and what it must not."""
    inputs, problem = case.inputs, poisoned(case.problem, case)
    assert isinstance(inputs, AttentionCase)
    tensor = str(case.asked("tensor"))
    found = {f"{case.asked('poison')} in {tensor}"}
    if case.asked("lane") != -1:
        found.add("in one lane")
    clean = untouched(problem)[0]
    heads = [h for h in range(problem.heads) if not np.isfinite(widen(problem.v[0, problem.kv_head(h)])).all()]
    if tensor == "v" and heads:
        rows = clean[heads[0]]
        blocks = [rows[start : start + inputs.config[0]] for start in range(0, len(rows), inputs.config[0])]
        if rows.all():
            found.add("in V that no row sees")
        if any(part.any() and not part.all() for part in blocks):
            found.add("in V that some rows of a block see")
    if tensor == "k":
        bad = ~np.isfinite(widen(problem.k[0])).all(axis=2)
        mask = problem.mask()
        seen = mask.any(axis=1)
        if any(bool((seen & ~(mask & ~bad[kv]).any(axis=1)).any()) for kv in range(problem.kv_heads)):
            found.add("all of a row's keys")
    return found


def test_poison_space_reaches_each_hazard() -> None:
    """Every value in every tensor; poison that nobody sees, that part of a block sees, that is all a row sees."""
    assert not missing("contamination", POISON_HAZARDS, poison_hazards)


PACKED_HAZARDS = {
    "queries without keys", "keys without queries", "neither", "a boundary off the 8-row grid", "rows behind the last",
    "a jump beyond the limit", "two short sequences in one group", "a window", "sinks that differ", "a soft cap",
    "batch invariant", "not causal", *(f"a tail of {n}" for n in range(1, 18)),
    *(f"{value} in the padding" for value in ("nan", "inf", "-inf")),
    *(f"a neighbour's {tensor} is not finite" for tensor in ("q", "k", "v")),
}  # fmt: skip


def packed_hazards(case: Case) -> set[str]:
    """What is special about a packed batch."""
    assert isinstance(case.inputs, AttentionCase)
    ragged = case.inputs.ragged()
    assert ragged is not None
    queries, keys = np.diff(ragged.cu_seqlens_q), np.diff(ragged.cu_seqlens_k)
    inner = ragged.cu_seqlens_q[1:-1]
    signs = {
        "queries without keys": bool(((queries > 0) & (keys == 0)).any()),
        "keys without queries": bool(((queries == 0) & (keys > 0)).any()),
        "neither": bool(((queries == 0) & (keys == 0)).any()),
        "a boundary off the 8-row grid": bool(((inner % GROUP != 0) & (inner < ragged.q_tokens)).any()),
        "two short sequences in one group": any(
            a // GROUP == b // GROUP and b > a for a, b in itertools.pairwise(inner.tolist())
        ),
        "rows behind the last": ragged.q_tokens < ragged.q.shape[1],
        "a window": ragged.window is not None,
        "sinks that differ": ragged.sinks is not None and len(set(ragged.sinks.tolist())) > 1,
        "a soft cap": ragged.softcap is not None,
        "batch invariant": case.asked("mode") == "batch invariant",
        "not causal": not ragged.causal,
        "a jump beyond the limit": any(edit.tensor == "k" for edit in case.inputs.edits),
        f"{case.asked('padding')} in the padding": ragged.k_tokens < ragged.k.shape[1],
    }
    signs |= {f"a tail of {n}": True for n in queries.tolist()}
    spoilt = int(case.asked("spoilt"))
    if spoilt >= 0:
        spoilt %= ragged.sequences
        tensor = str(case.asked("tensor"))
        own = queries if tensor == "q" else keys
        others = [n for n in range(ragged.sequences) if n != spoilt and queries[n] and keys[n]]
        signs[f"a neighbour's {tensor} is not finite"] = bool(own[spoilt]) and bool(others)
    return {name for name, here in signs.items() if here}


def test_packed_space_reaches_each_hazard() -> None:
    """Tails of 1 to 17 rows, empty sequences, boundaries off the grid, poison in the padding and in neighbours."""
    assert not missing("ragged", PACKED_HAZARDS, packed_hazards)


ANCHOR_HAZARDS = {
    "equal logits, the largest values", "the largest values of one sign, logits that differ",
    "large values, a jump below the limit", "weights that may be flushed", "logits that a BF16 scale would spoil",
}  # fmt: skip


def anchor_hazards(case: Case) -> set[str]:
    """Values and scores that meet in one row."""
    problem = case.problem
    scores = np.where(problem.mask(), logits(problem, 0) * np.log2(np.e), -np.inf)
    seen = np.isfinite(scores)
    with np.errstate(invalid="ignore"):
        above = np.where(seen, scores - scores.max(axis=1, keepdims=True), 0.0)
    values = widen(problem.v[0, 0])
    largest = np.abs(values).max() == float.fromhex(LARGEST_BF16)
    first = scores[:, :ANCHOR_KEYS].max(axis=1)
    jump = scores.max(axis=1) - np.where(np.isfinite(first), first, np.inf)
    ordinary = float(np.abs(scores[seen]).max()) if seen.any() else 0.0
    signs = {
        "equal logits, the largest values": largest and not above.any() and bool(seen.any()),
        "the largest values of one sign, logits that differ": largest
        and bool((np.abs(values).max(axis=0) == values.max(axis=0)).any() and above.any()),
        "large values, a jump below the limit": float(np.abs(values).max()) > 2.0**100
        and bool(((jump > 20.0) & (jump < FLYWHEEL_LIMIT)).any()),
        "weights that may be flushed": bool(((above < -90.0) & (above > -150.0)).any()),
        "logits that a BF16 scale would spoil": 60.0 < ordinary < 2.0**12,
    }
    return {name for name, here in signs.items() if here}


def test_anchor_space_reaches_each_meeting_of_values_and_scores() -> None:
    """Division last, weights rounded up, o that overflows below the limit of l, flushed weights, large scores."""
    assert not missing("anchor", ANCHOR_HAZARDS, anchor_hazards, ("256x256-d128",))


REPLAY_HAZARDS = {
    "no block", "the first block alone", "the last block alone", "consecutive blocks", "every block", "one row",
    "all rows", "at the first key block", "at the diagonal", "at the last key block", "at consecutive key blocks",
    "again after a replay has begun", "with large values", "far beyond the limit",
}  # fmt: skip


def replay_hazards(case: Case) -> set[str]:
    """Which query blocks meet a score beyond the limit, and where, from the exact scores of the first head."""
    inputs, problem = case.inputs, case.problem
    assert isinstance(inputs, AttentionCase)
    if inputs.window is not None:
        return set()  # anchors are not the first keys' there
    block_q, block_kv, _ = inputs.config
    scores = np.where(problem.mask(), logits(problem, 0) * np.log2(np.e), -np.inf)
    with np.errstate(invalid="ignore"):
        above = scores - scores[:, :ANCHOR_KEYS].max(axis=1, keepdims=True)
    beyond = above > FLYWHEEL_LIMIT
    starts = range(0, problem.kv_len, block_kv)
    hit = np.stack([beyond[:, at : at + block_kv].any(axis=1) for at in starts], axis=1)
    rows = [hit[at : at + block_q] for at in range(0, problem.q_len, block_q)]
    replayed = [bool(part.any()) for part in rows]
    tops = np.stack([above[:, at : at + block_kv].max(axis=1) for at in starts], axis=1)
    with np.errstate(invalid="ignore"):
        rising = tops[:, 1:] - tops[:, :-1] > FLYWHEEL_LIMIT
    signs = {
        "no block": not any(replayed),
        "the first block alone": replayed[0] and not any(replayed[1:]),
        "the last block alone": replayed[-1] and not any(replayed[:-1]),
        "consecutive blocks": any(a and b for a, b in itertools.pairwise(replayed)) and not all(replayed),
        "every block": all(replayed),
        "one row": any(int(part.any(axis=1).sum()) == 1 for part in rows),
        "all rows": any(bool(part.any(axis=1).all()) for part in rows),
        "at the first key block": bool(hit[:, 0].any()),
        "at the diagonal": problem.causal and problem.q_len == problem.kv_len and bool(np.trace(hit[::block_q]) > 0),
        "at the last key block": bool(hit[:, -1].any()),
        "at consecutive key blocks": bool((hit[:, 1:] & hit[:, :-1]).any()),
        "again after a replay has begun": bool((hit[:, :-1] & rising).any()),
        "with large values": any(replayed) and float(np.abs(widen(problem.v)).max()) > 2.0**117,
        "far beyond the limit": bool((above > 1000.0).any()),
    }
    return {name for name, here in signs.items() if here}


def test_replay_space_reaches_each_pattern() -> None:
    """Which query blocks are replayed, at which key blocks, and for how many of their rows."""
    assert not missing("replays", REPLAY_HAZARDS, replay_hazards)
