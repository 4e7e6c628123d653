"""Named adversarial cases: what a static anchor, a mask or a head map gets wrong.

Scores are planted exactly: with scale = ln 2 a score in log2 units is q . k itself, and three lanes of k carry the 24
bits of any FP32 score against lanes of q that hold 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from verify.attention.cases import AttentionCase, Edit

if TYPE_CHECKING:
    from collections.abc import Iterable

LOG2_UNITS = math.log(2.0).hex()
"""The scale at which q . k is the score in log2 units."""

SCORE_LANES = (0, 3)
LARGEST_BF16 = "0x1.fep+127"
SMALLEST_NORMAL_BF16 = "0x1p-126"

SHAPE = (1, 2, 1, 512, 512, 64)
CONFIG = (128, 128, 128)
"""Four query blocks of up to four key blocks: every position that a jump can take, at the cost of one compilation."""

FLYWHEEL_LIMIT = 149.0
"""log2 units: the largest jump above an anchor at 0 that the kernel's check lets pass, 117 + BIAS (a test compares)."""

ARTICLE_TAU_NATS = 65.21
"""The article's tau for 512K keys, natural log."""

JUMPS_NATS = (30.0, 60.0, 64.0, 66.0, 100.0, 2000.0)
KEYS = {"first": 3, "first-block": 127, "middle": 200, "last-block": 400, "diagonal": 450, "last": 511}


def bf16_parts(value: float) -> tuple[str, str, str]:
    """Three BF16 numbers whose sum is the FP32 number `value`, exactly, as hexadecimal text."""
    rest, parts = float(np.float32(value)), []
    for _ in range(SCORE_LANES[1]):
        # Truncate, so that every part keeps the sign and the rest stays within reach of the next one.
        word = np.float32(rest).view(np.uint32) & np.uint32(0xFFFF0000)
        part = float(word.view(np.float32))
        parts.append(part.hex())
        rest -= part
    if rest != 0.0:
        message = f"value must be an FP32 number that three BF16 parts hold, got {value}"
        raise ValueError(message)
    return parts[0], parts[1], parts[2]


def score(key: int, log2_units: float, heads: tuple[int, ...] | None = None) -> tuple[Edit, ...]:
    """Give one key a score, for every row whose score lanes are switched on."""
    return tuple(
        Edit("k", "set", part, heads=heads, start=key, stop=key + 1, lanes=(lane, lane + 1))
        for lane, part in enumerate(bf16_parts(log2_units))
    )


def score_lanes(rows: slice = slice(None)) -> tuple[Edit, ...]:
    """Clear the score lanes, and switch them on in some rows."""
    start, stop = rows.start or 0, rows.stop
    return (
        Edit("k", "set", "0x0p+0", lanes=SCORE_LANES),
        Edit("q", "set", "0x0p+0", lanes=SCORE_LANES),
        Edit("q", "set", "0x1p+0", start=start, stop=stop, step=rows.step or 1, lanes=SCORE_LANES),
    )


def jump(
    name: str,
    key: int,
    log2_units: float,
    *more: Edit,
    quiet: bool = False,
    rows: slice = slice(None),
    shape: tuple[int, int, int, int, int, int] = SHAPE,
) -> AttentionCase:
    """A jump of one key's score over the rest.

    `quiet` makes every other score exactly 0; otherwise they are bell-shaped with standard deviation 1.
    """
    exponents = (None, None, 0) if quiet else (-1, -2, 0)
    return AttentionCase(
        name,
        shape,
        scale=LOG2_UNITS,
        seed=key,
        exponents=exponents,
        edits=(*score_lanes(rows), *score(key, log2_units), *more),
        config=CONFIG,
    )


def jumps() -> list[AttentionCase]:
    """Jumps around every limit, in every place."""
    limit = np.float32(FLYWHEEL_LIMIT)
    around = {
        "limit-1ulp": float(np.nextafter(limit, np.float32(0))),
        "limit": float(limit),
        "limit+1ulp": float(np.nextafter(limit, np.float32(np.inf))),
        # Certainly above the limit of a partial sum, below that of the denominator: refused between blocks alone.
        "between-the-limits": FLYWHEEL_LIMIT + 3.0,
        "article-tau": ARTICLE_TAU_NATS / math.log(2.0),
    }
    sizes = around | {f"{nats:g}-nats": nats / math.log(2.0) for nats in JUMPS_NATS}
    cases = [
        jump(f"jump-{size}-{place}", key, value, quiet=size.startswith("limit"))
        for size, value in sizes.items()
        for place, key in KEYS.items()
    ]
    cases += [
        jump(f"jump-{nats:g}-nats-one-row", 300, nats / math.log(2.0), rows=slice(333, 334)) for nats in (60.0, 200.0)
    ]
    # One row makes its block replay; the others, whose weights are ordinary, show what the replay read for them.
    grouped = (2, 4, 2, 256, 256, 64)
    cases.append(jump("jump-2000-nats-one-row-grouped-heads", 140, 2885.0, rows=slice(200, 201), shape=grouped))
    consecutive = tuple(edit for block in range(1, 4) for edit in score(128 * block + 17, 200.0 * block))
    cases.append(jump("jumps-in-consecutive-blocks", 17, 1.0, *consecutive))
    falling = tuple(edit for block in range(1, 4) for edit in score(128 * block + 17, -200.0 * block))
    cases.append(jump("falls-in-consecutive-blocks", 17, 1.0, *falling))
    return cases


def large_values() -> list[AttentionCase]:
    """|v| up to the largest BF16, alone and with a jump: what a check of l alone cannot see."""
    cases = [
        jump(f"v-2^{exponent}-jump-{nats:g}-nats", 300, nats / math.log(2.0), Edit("v", "scale", str(exponent - 1)))
        for exponent in (12, 35, 60, 100, 118, 126)
        for nats in (0.0, 20.0, 60.0, 100.0)
    ]
    largest = Edit("v", "set", LARGEST_BF16)
    cases += [
        jump("v-largest-equal-logits", 300, 0.0, largest, quiet=True),
        jump("v-largest-random-logits", 300, 0.0, largest),
        jump("v-largest-jump-100-nats", 300, 100.0 / math.log(2.0), largest),
        jump(
            "v-largest-alternating",
            300,
            0.0,
            largest,
            Edit("v", "set", "-" + LARGEST_BF16, start=1, step=2),
            quiet=True,
        ),
        jump("v-smallest-normal", 300, 0.0, Edit("v", "set", SMALLEST_NORMAL_BF16)),
        jump("v-2^-100", 300, 0.0, Edit("v", "scale", "-100")),
        jump("v-one-huge-invisible", 511, 0.0, Edit("v", "set", LARGEST_BF16, start=511, stop=512)),
    ]
    return cases


def extreme_logits() -> list[AttentionCase]:
    """Equal, huge and hugely negative logits; anchors far from the rest."""
    cases = [
        jump("equal-logits", 0, 0.0, quiet=True),
        jump("equal-logits-v-mod-8", 0, 0.0, Edit("v", "mod", "8"), quiet=True),
        jump("anchor-200-above", 0, 200.0),
        jump("anchor-2000-above", 0, 2000.0),
        jump("first-key-200-below", 0, -200.0),
        jump("first-128-keys-2000-below", 0, -2000.0, *(e for key in range(1, 128) for e in score(key, -2000.0))),
    ]
    for exponent in (20, 60, 100, 120, 126):
        huge = Edit("k", "set", f"-0x1p+{exponent}", lanes=(0, 1))
        cases.append(jump(f"all-logits-minus-2^{exponent}", 0, 0.0, huge, quiet=True))
        cases.append(jump(f"one-logit-2^{exponent}", 300, 2.0**exponent))
        cases.append(jump(f"one-logit-minus-2^{exponent}", 300, -(2.0**exponent)))
    cases += [
        AttentionCase(f"bell-logits-2^{exponent}", SHAPE, seed=exponent, exponents=(exponent, 0, 0), config=CONFIG)
        for exponent in (3, 6, 20, 50)
    ]
    cases.append(AttentionCase("negative-scale", SHAPE, scale="-0x1p-2", seed=5, exponents=(2, 0, 0), config=CONFIG))
    cases.append(AttentionCase("scale-zero", SHAPE, scale="0x0p+0", seed=6, config=CONFIG))
    cases.append(cancelling())
    cases.append(jump("near-duplicate-keys", 9, 40.0, Edit("k", "copy", "9", start=10, stop=400)))
    return cases


def cancelling() -> AttentionCase:
    """Scores whose terms cancel by more than 53 bits: exactly 0 and 1024, which no FP32 or float64 sum can tell."""
    keys = (
        {0: "-0x1p+75", 1: "-0x1p+56", 3: "0x1p+75", 4: "-0x1p+99", 5: "0x1p+56", 6: "0x1p+99"},
        {0: "0x1p+77", 1: "0x1p+58", 2: "0x1p+10", 3: "-0x1p+58", 4: "0x1p+45", 8: "-0x1p+77", 10: "-0x1p+45"},
    )
    edits = [
        Edit("k", "set", value, start=key, stop=key + 1, lanes=(lane, lane + 1))
        for key, lanes in enumerate(keys)
        for lane, value in lanes.items()
    ]
    values = [Edit("v", "set", value, start=key, stop=key + 1) for key, value in enumerate(("0x1p+0", "-0x1p+0"))]
    ones = Edit("q", "set", "0x1p+0")
    return AttentionCase(
        "scores-that-cancel-beyond-float64",
        (1, 1, 1, 1, 2, 64),
        scale="0x1p+0",
        exponents=(None, None, None),
        edits=(ones, *edits, *values),
    )


def nonfinite() -> list[AttentionCase]:
    """NaN and infinities in visible, invisible and partly visible places."""
    cases = []
    for value in ("nan", "inf", "-inf"):
        for tensor in ("k", "v"):
            for place, key in (("first", 0), ("middle", 200), ("diagonal", 450), ("last", 511)):
                edit = Edit(tensor, "set", value, start=key, stop=key + 1, lanes=(5, 6))
                cases.append(jump(f"{value}-in-{tensor}-{place}", 300, 10.0, edit))
        edit = Edit("q", "set", value, start=300, stop=301, lanes=(5, 6))
        cases.append(jump(f"{value}-in-one-query", 300, 10.0, edit))
    both = (
        Edit("v", "set", "inf", start=100, stop=101, lanes=(5, 6)),
        Edit("v", "set", "-inf", start=300, stop=301, lanes=(5, 6)),
    )
    cases.append(jump("both-infinities-in-v", 9, 10.0, *both))
    cases.append(jump("inf-in-v-behind-a-2000-nat-jump", 300, 2885.0, Edit("v", "set", "inf", start=100, stop=101)))
    return cases


GQA_RATIOS = ((8, 2), (24, 4), (28, 4), (6, 2), (8, 1), (4, 4))


def head_maps() -> list[AttentionCase]:
    """V of KV head h holds h + 1 everywhere, K is random: the output names the head that was read."""
    cases = []
    for heads, kv_heads in GQA_RATIOS:
        edits = tuple(Edit("v", "set", float(h + 1).hex(), heads=(h,)) for h in range(kv_heads))
        cases.append(
            AttentionCase(f"heads-{heads}-{kv_heads}", (1, heads, kv_heads, 9, 9, 64), seed=heads, edits=edits)
        )
        cases.append(AttentionCase(f"random-heads-{heads}-{kv_heads}", (1, heads, kv_heads, 9, 9, 64), seed=heads))
    return cases


def lengths(values: Iterable[int], *, head_dim: int = 64) -> list[AttentionCase]:
    """Equal lengths, causal and full; V[t] = t mod 8 in the full ones, whose exact answers are means."""
    cases = []
    for n in values:
        shape = (1, 1, 1, n, n, head_dim)
        cases.append(AttentionCase(f"causal-length-{n}", shape, seed=n))
        cases.append(
            AttentionCase(
                f"uniform-length-{n}", shape, causal=False, exponents=(0, None, 0), edits=(Edit("v", "mod", "8"),)
            )
        )
    return cases


def unequal_lengths() -> list[AttentionCase]:
    """q_len and kv_len apart: bottom-right alignment, rows without a visible key."""
    pairs = ((5, 2), (3, 128), (1, 300), (129, 300), (300, 129), (384, 128), (77, 512), (512, 77), (130, 1))
    return [AttentionCase(f"causal-{q}x{k}", (1, 2, 1, q, k, 64), seed=q, config=(128, 128, 128)) for q, k in pairs]


SEGMENTS = ((0, 100), (1, 28), (0, 72), (2, 100), (3, 100))
"""Runs of 400 tokens: an id that comes back, boundaries on and off the block, one id that the keys do not have."""
KEY_SEGMENTS = ((0, 60), (1, 100), (2, 140), (0, 100))
SINKS = ((4.0).hex(), "-inf")


def _featured(
    name: str,
    *edits: Edit,
    shape: tuple[int, int, int, int, int, int] = SHAPE,
    **more: Any,  # noqa: ANN401  fields of AttentionCase
) -> AttentionCase:
    options: dict[str, Any] = {"scale": LOG2_UNITS, "seed": len(name), "exponents": (-1, -2, 0), "config": CONFIG}
    return AttentionCase(name, shape, edits=(*score_lanes(), *edits), **(options | more))


def features() -> list[AttentionCase]:
    """Windows, soft caps, sinks, segments and other widths, each alone and with jumps where anchors are chosen late."""
    nonfinite_values = (
        Edit("v", "set", "nan", start=130, stop=131, lanes=(0, 1)),
        Edit("v", "set", "inf", start=131, stop=132, lanes=(1, 2)),
    )
    long_jump = score(300, 2885.0)
    segments: dict[str, Any] = {"q_segments": SEGMENTS, "k_segments": KEY_SEGMENTS, "shape": (1, 2, 1, 400, 400, 64)}
    return [
        *(_featured(f"window-{left}-{right}", window=(left, right)) for left, right in ((0, 0), (100, 0), (200, None))),
        _featured("window-both-sides", causal=False, window=(130, 60)),
        _featured("window-right-only", causal=False, window=(None, 100)),
        _featured("window-jump", *long_jump, window=(200, None)),
        _featured("window-values", *nonfinite_values, window=(100, 0)),
        _featured("window-more-queries", shape=(1, 2, 1, 300, 129, 64), window=(50, None)),
        _featured("window-no-key-at-all", shape=(1, 1, 1, 384, 128, 64), window=(20, None)),
        _featured("window-unequal-blocks", window=(200, None), config=(256, 128, 128)),
        # Blocks of several fragments, in each of which some queries see their first key.
        _featured("window-several-fragments", shape=(1, 2, 1, 640, 640, 64), window=(100, 0), config=(0, 0, 0)),
        _featured("softcap", softcap=(20.0).hex()),
        _featured("softcap-saturated", *score(5, 1000.0), *score(300, 2000.0), softcap=(50.0).hex()),
        _featured("softcap-larger-than-the-limit", *long_jump, softcap=(1000.0).hex()),
        _featured("sinks", sinks=SINKS),
        _featured("sink-2000-nats", sinks=((2000.0).hex(), (-2000.0).hex())),
        _featured("sink-jump", *long_jump, sinks=SINKS),
        _featured("sink-nan-and-inf", sinks=("nan", "inf")),
        _featured("sink-without-keys", shape=(1, 2, 1, 384, 128, 64), sinks=SINKS),
        _featured("segments", **segments),
        _featured("segments-full", causal=False, **segments),
        _featured("segments-jump", *score(200, 2885.0), **segments),
        _featured("segments-minus-inf", Edit("k", "set", "-inf", start=160, stop=162, lanes=(0, 1)), **segments),
        _featured("segments-window-sinks-softcap", window=(90, 0), sinks=SINKS, softcap=(30.0).hex(), **segments),
        _featured("values-wider", v_dim=128),
        _featured("values-narrower", shape=(1, 2, 1, 200, 300, 128), v_dim=64),
    ]


def families() -> dict[str, list[AttentionCase]]:
    """Every named family, in the order in which a report shows them."""
    return {
        "ordinary": lengths((1, 8, 65, 129, 300)) + unequal_lengths() + head_maps(),
        "adversarial": jumps() + large_values() + extreme_logits(),
        "non-finite": nonfinite(),
        "features": features(),
    }


def by_name() -> dict[str, AttentionCase]:
    """Every named case."""
    return {case.name: case for cases in families().values() for case in cases}
