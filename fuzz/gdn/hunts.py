"""The hunts for Gated DeltaNet."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from fuzz.attention.hunts import SCHEDULES
from fuzz.case import Case
from fuzz.gdn.inverse_case import BETAS, FAMILIES, InverseCase
from fuzz.gdn.inverse_moves import words
from fuzz.gdn.layer_case import GATES, SPOILT, LayerCase
from fuzz.gdn.layer_moves import words as layer_words
from fuzz.hunts import Hunt
from fuzz.kinds import KINDS, LOCAL
from fuzz.operations import INVERSE, LAYER
from verify.gdn.cases import BETAS as LAYER_BETAS
from verify.gdn.cases import DECAYS as LAYER_DECAYS
from verify.gdn.cases import KEYS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import SearchStrategy


@dataclasses.dataclass(frozen=True)
class InverseBucket:
    """A precision and a range of write strengths; every matrix is 64 x 64.

    Attributes:
        name: what the command line calls it.
        precision: of the operands.
        betas: largest write strengths to draw from, hexadecimal.
        why: what it reaches.
    """

    name: str
    precision: str
    betas: tuple[str, ...]
    why: str


BELOW_ONE = ("0x1p+0", *(x.hex() for x in (0.5, 0.58203125, 0.8349609375, 0.98828125)))
UP_TO_TWO = ("0x1p+1", *(x.hex() for x in (1.1, 1.5, 1.9, 1.9501953125)))

INVERSE_BUCKETS = {
    bucket.name: bucket
    for bucket in (
        InverseBucket("bf16", "bf16", BELOW_ONE, "the domain of the 8-product inverse: write strengths up to 1"),
        InverseBucket("bf16x3", "bf16x3", BELOW_ONE, "operands as pairs of BF16 numbers"),
        InverseBucket("bf16x3-beta-2", "bf16x3", UP_TO_TWO, "write strengths up to 2: inverses may be large"),
        InverseBucket("bf16-beta-2", "bf16", UP_TO_TWO, "beyond what BF16 operands are meant for; the bound says so"),
    )
}
DECAYS = (
    "0x1p+0",
    *(float.fromhex(x).hex() for x in ("0x1.ffcp-1", "0x1.fap-1", "0x1p-8", "0x1p-100", "0x0p+0")),
    "random",
)


def _fp32(text: str) -> str:
    """The nearest FP32 number, written down."""
    import numpy as np  # noqa: PLC0415  light, and used here alone

    return float(np.float32(float.fromhex(text))).hex()


@st.composite
def inverse_cases(draw: st.DrawFn, buckets: Sequence[InverseBucket]) -> Case:
    """A matrix from a family of keys, write strengths and decays."""
    bucket = draw(st.sampled_from(list(buckets)))
    inputs = InverseCase(
        "",
        width=draw(st.sampled_from((2, 3, 4, 8, 16, 128))),
        family=draw(st.sampled_from(FAMILIES)),
        period=draw(st.integers(1, 16)),
        noise=draw(st.integers(-10, 0)),
        beta_kind=draw(st.sampled_from(BETAS)),
        beta_max=_fp32(draw(st.sampled_from(bucket.betas))),
        decay=draw(st.sampled_from(DECAYS)),
        seed=draw(st.integers(0, 2**16 - 1)),
    )
    return Case("inverse", dataclasses.replace(inputs, name=words(inputs)), (("precision", bucket.precision),))


@dataclasses.dataclass(frozen=True)
class LayerBucket:
    """Everything static about a layer call; lengths are drawn, since the kernel takes them as data.

    Attributes:
        name: what the command line calls it.
        heads: n_kq, n_v.
        width: taps of the convolution.
        sequences: how many are packed.
        tokens: at most so many in all, padding included.
        why: what it reaches.
        least: tokens in all, padding included: our subject fills up to multiples of 128, and compiles for each.
        precision: of our kernel's products; others have one of their own.
        biased: the convolution has a bias.
        activation: of the convolution.
        norm: what stands under the root.
        doubled: write strengths up to 2.
    """

    name: str
    heads: tuple[int, int]
    width: int
    sequences: int
    tokens: int
    why: str
    least: int = 1
    precision: str = "bf16"
    biased: bool = False
    activation: str = "silu"
    norm: str = "eps 1e-6"
    doubled: bool = False

    @property
    def betas(self) -> list[str]:
        """Families of write strengths that its gates can give."""
        return list(LAYER_BETAS) if self.doubled else [name for name in LAYER_BETAS if "2" not in name]


def _layer_buckets(*buckets: LayerBucket) -> dict[str, LayerBucket]:
    return {bucket.name: bucket for bucket in buckets}


LAYER_BUCKETS = _layer_buckets(
    LayerBucket("packed-128", (1, 2), 4, 3, 128, "three sequences: tails shorter than the convolution, empty ones"),
    LayerBucket(
        "grouped-256", (1, 2), 2, 2, 256, "two value heads per key head, two taps, sequences over two tiles", least=129
    ),
    LayerBucket(
        "eight-taps-128", (1, 1), 8, 4, 128, "the widest convolution, with a bias, operands as pairs: sequences of up "
        "to seven tokens live on what they were given", precision="bf16x3", biased=True,
    ),
)  # fmt: skip
GATE_BUCKETS = _layer_buckets(
    LayerBucket("one-128", (1, 1), 4, 1, 128, "one sequence of up to two chunks"),
    LayerBucket(
        "bare-128", (1, 1), 3, 1, 128, "no activation, no epsilon: zero vectors and squares that underflow",
        activation="none", norm="eps 0",
    ),
    LayerBucket(
        "doubled-128", (1, 1), 4, 1, 128, "write strengths up to 2, operands as pairs", precision="bf16x3", doubled=True
    ),
)  # fmt: skip

SIZES = {
    "state": st.sampled_from((0, -4, 4)),
    "gates": st.one_of(st.integers(-40, 20), st.sampled_from((40, 57, 61, -64, -66))),
}
"""log2 of the projection: where silu cancels, where epsilon outweighs the squares, where their sum nearly overflows or
underflows."""


def _lengths(draw: st.DrawFn, bucket: LayerBucket) -> tuple[int, ...]:
    """Lengths: ordinary first, then those around the convolution's width, the 8-row grid and the chunk."""
    length = st.one_of(
        st.sampled_from((16, 0, 1, 2, 3, 4, 6, 7, 8, 9, 13, 63, 64, 65)), st.integers(0, bucket.tokens)
    )  # fmt: skip
    lengths, left = [], bucket.tokens
    for n in range(bucket.sequences):
        # The others keep at least a token each: one long sequence among short ones is a case of its own.
        lengths.append(min(draw(length), left - (bucket.sequences - 1 - n)))
        left -= lengths[-1]
    return tuple(lengths) if sum(lengths) else (16, *lengths[1:])


def _slots(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Slots that sequences read and write, of one more than there are sequences; one may be written nowhere."""
    slots = range(count + 1)
    order = tuple(draw(st.permutations(slots)))[:count]
    others = tuple(draw(st.permutations(slots)))[:count] if draw(st.booleans()) else order
    padded = draw(st.integers(0, 3)) == 3
    writes = (-1, *order[1:]) if padded else order
    # A slot that one sequence writes is read by no other: the order of sequences would matter.
    return tuple(r if r == w or r not in writes else w for r, w in zip(others, writes, strict=True)), writes


@st.composite
def layer_cases(draw: st.DrawFn, hunt: str, buckets: Sequence[LayerBucket]) -> Case:
    """A layer call; `gates` draws the gates' ends, `state` the packing and the slots."""
    bucket = draw(st.sampled_from(list(buckets)))
    count = bucket.sequences
    lengths = _lengths(draw, bucket)
    used = sum(lengths)
    padding = max(min(draw(st.sampled_from((0, 1, 8, 17))), bucket.tokens - used), bucket.least - used)
    reads, writes = _slots(draw, count)
    inputs = LayerCase(
        "",
        keys=draw(st.sampled_from(list(KEYS))),
        beta=draw(st.sampled_from(bucket.betas)),
        decay=draw(st.sampled_from(list(LAYER_DECAYS))),
        seed=draw(st.integers(0, 2**16 - 1)),
        lengths=lengths,
        padding=padding,
        heads=bucket.heads,
        width=bucket.width,
        size=draw(SIZES[hunt]),
        biased=bucket.biased,
        norm=bucket.norm,
        activation=bucket.activation,
        doubled=bucket.doubled,
        gates=draw(st.sampled_from(list(GATES))) if hunt == "gates" else "ordinary",
        initial=tuple(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))),
        reads=reads,
        writes=writes,
        slots=count + 1,
        poison=draw(st.booleans()),
        spoilt=draw(st.sampled_from((-1, *range(count)))) if hunt == "state" else -1,
        spoilt_by=draw(st.sampled_from(SPOILT)),
    )
    return Case(hunt, dataclasses.replace(inputs, name=layer_words(inputs)), (("precision", bucket.precision),))


def _gates(buckets: Sequence[LayerBucket]) -> SearchStrategy[Case]:
    return layer_cases("gates", buckets)


def _state(buckets: Sequence[LayerBucket]) -> SearchStrategy[Case]:
    return layer_cases("state", buckets)


def _scheduled(buckets: Sequence[LayerBucket]) -> SearchStrategy[Case]:
    """Packed calls with a schedule of the interpreter."""
    names = sorted(SCHEDULES)
    asks = st.tuples(*(SCHEDULES[name] for name in names))

    def asked(case: Case, given: tuple[str | int, ...]) -> Case:
        ask = tuple(sorted((*case.ask, *zip(names, given, strict=True))))
        return dataclasses.replace(case, hunt="layer-schedule", ask=ask)

    return st.builds(asked, layer_cases("state", buckets), asks)


def _cases(buckets: Sequence[InverseBucket]) -> SearchStrategy[Case]:
    return inverse_cases(buckets)


HUNTS = (
    Hunt(
        "inverse",
        "the chunk's triangular inverse: repeated, near-duplicate, alternating, periodic and low-rank keys, write "
        "strengths up to 1 and 2, decays from none to a reset",
        INVERSE,
        INVERSE_BUCKETS,
        _cases,
        "fuzz.gdn.inverse:evaluate",
        "fuzz.gdn.inverse_moves:MOVES",
        LOCAL,
    ),
    Hunt(
        "gates",
        "a Gated DeltaNet layer at the ends of its gates and norms: resets, exp(a_log) that overflows, decays far "
        "below the range, projections that silu and l2norm flush or overflow",
        LAYER,
        GATE_BUCKETS,
        _gates,
        "fuzz.gdn.layer:evaluate",
        "fuzz.gdn.layer_moves:MOVES",
        KINDS,
    ),
    Hunt(
        "state",
        "state carry and slots: permuted, padded and unread slots, initial states that do not count, sequences shorter "
        "than the convolution, poison wherever nothing is read, and a neighbour that is NaN",
        LAYER,
        LAYER_BUCKETS,
        _state,
        "fuzz.gdn.layer:evaluate",
        "fuzz.gdn.layer_moves:MOVES",
        KINDS,
    ),
    Hunt(
        "layer-schedule",
        "a Gated DeltaNet layer under the TPU interpreter's schedules: races between copies made by hand, when they "
        "land, memory that holds NaN; outputs and states must not change by a bit",
        LAYER,
        {name: LAYER_BUCKETS[name] for name in ("packed-128",)},
        _scheduled,
        "fuzz.gdn.layer:evaluate_schedule",
        "fuzz.gdn.layer_moves:MOVES",
        KINDS,
    ),
)
