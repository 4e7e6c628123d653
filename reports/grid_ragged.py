"""Packed batches for `flywheel.ragged_attention`: one shape per head_dim, since lengths need no compilation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.item import Item
from verify.attention.cases import AttentionCase, Edit

if TYPE_CHECKING:
    from collections.abc import Sequence

RAGGED = "flywheel.ragged_attention"
INVARIANT = f"{RAGGED}[invariant]"

TOKENS, SEQUENCES, HEADS = 640, 8, (2, 1)
BLOCK = 128
"""They compile in half the time that the default ones take, and a batch of 640 tokens has several."""

LENGTHS = (1, 7, 8, 63, 64, 65, 128, 129, 300, 512)
HEAD_DIMS = (64, 128)
SPREADS = (0, 2, 4)

MIXED = (13, 0, 17, 150, 1, 3, 131, 300)
KEYS_OF_MIXED = (5, 40, 17, 160, 1, 0, 131, 260)
"""Fewer and more keys than queries, none of either."""

PAIRS = ((1, 1), (1, 17), (7, 9), (8, 8), (9, 7), (13, 17), (16, 1), (17, 15))
"""Neighbours around multiples of 8 rows, the unit in which rows are copied."""

JUMP = 4096.0
"""Query times key in every lane of one pair: a score thousands of nats above all others."""

LARGE = 2.0**127


def ragged_items() -> list[Item]:
    """Everything that the standard grid asks of packed attention."""
    return [*_asked(RAGGED, HEAD_DIMS), *_asked(INVARIANT, HEAD_DIMS[:1])]


def _asked(subject: str, head_dims: Sequence[int]) -> list[Item]:
    items = [_item("ordinary", case, subject) for d in head_dims for case in _ordinary(d)]
    return items + [_item(family, case, subject) for family, case in _special(HEAD_DIMS[0])]


def _item(family: str, case: AttentionCase, subject: str) -> Item:
    group = f"{subject} {case.shape} {case.causal} {case.scale_value.hex()} {case.config}"
    return Item(family, case.name, "fast", case, group, subject, weight=4.0)


def packed(
    name: str,
    lengths: Sequence[int],
    head_dim: int,
    *,
    keys: Sequence[int] = (),
    edits: tuple[Edit, ...] = (),
    seed: int = 0,
    exponents: tuple[int, int, int] = (0, 0, 0),
) -> AttentionCase:
    """A batch of `SEQUENCES` sequences, empty ones behind the last, and NaN in the padding behind them."""
    cu_q, cu_k = (_cumulative(x) for x in (lengths, keys or lengths))
    ends = (("q", cu_q[-1]), ("k", cu_k[-1]), ("v", cu_k[-1]))
    padding = tuple(Edit(tensor, "set", "nan", start=end) for tensor, end in ends if end < TOKENS)
    return AttentionCase(
        name,
        (1, *HEADS, TOKENS, TOKENS, head_dim),
        seed=seed,
        exponents=exponents,
        edits=edits + padding,
        config=(BLOCK, 0, 0),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
    )


def _cumulative(lengths: Sequence[int]) -> tuple[int, ...]:
    found = [0]
    for n in (*lengths, *[0] * (SEQUENCES - len(lengths))):
        found.append(found[-1] + n)
    return tuple(found)


def _ordinary(head_dim: int) -> list[AttentionCase]:
    """As many sequences of one length as the batch holds; scores of 1, 4 and 16 nats."""
    return [
        packed(
            f"packed-length-{n}-d{head_dim}-spread-{2**spread}",
            [n] * min(SEQUENCES, TOKENS // n),
            head_dim,
            seed=1000 * spread + n,
            exponents=(spread, 0, 0),
        )
        for n in LENGTHS
        for spread in SPREADS
    ]


def _special(head_dim: int) -> list[tuple[str, AttentionCase]]:
    pairs = [
        ("boundary", packed(f"packed-pair-{a}-{b}-with-guards", (a, b, 40 - a - b), head_dim, seed=a * 32 + b))
        for a, b in PAIRS
    ]
    offsets = [("boundary", packed(f"packed-offset-{n}", (n, 128, 3, 259, 130), head_dim, seed=n)) for n in range(1, 8)]
    end = sum(MIXED[:4])
    jump = tuple(Edit(tensor, "set", float(JUMP**0.5).hex(), start=end - 60, stop=end - 59) for tensor in ("q", "k"))
    late = Edit("k", "set", float(JUMP**0.5).hex(), start=end - 90, stop=end - 89)
    large = Edit("v", "set", LARGE.hex(), start=end - 40, stop=end - 39)
    foreign = Edit("v", "set", "nan", start=sum(MIXED[:3]), stop=end)
    return [
        ("boundary", packed("packed-mixed-lengths", MIXED, head_dim, seed=1)),
        ("boundary", packed("packed-other-lengths-of-keys", MIXED, head_dim, keys=KEYS_OF_MIXED, seed=2)),
        ("boundary", packed("packed-nothing-but-empty-and-one", (0, 0, 1), head_dim, seed=3)),
        *pairs,
        *offsets,
        ("adversarial", packed("packed-jump-of-one-row", MIXED, head_dim, seed=4, edits=jump)),
        ("adversarial", packed("packed-jump-and-v-2^127", MIXED, head_dim, seed=5, edits=(*jump, late, large))),
        ("non-finite", packed("packed-nan-in-a-neighbour", MIXED, head_dim, seed=6, edits=(foreign,))),
    ]
