"""What the parts of the fused kernel share: the static call, its refs by name, and the place of a step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from flywheel.gdn.products import PARTS
from flywheel.gdn.tile import PIECES, TILE
from flywheel.packing import GROUP

if TYPE_CHECKING:
    from flywheel.gdn.products import Precision
    from flywheel.packing import Packing

LANES = 128
HEAD_DIM = 128
"""Width of queries, keys and values: a head is one tile of lanes."""

HISTORY = 16
"""Rows kept before a tile for its convolution: one BF16 tile, of which the last width - 1 are read."""


RING = 4
"""Buffers of what the first two stages leave for the fourth: at most three turns lie between, and of a power of two of
buffers the index is a mask."""


@dataclasses.dataclass(frozen=True)
class GdnSpec:
    """Everything static about one call.

    Attributes:
        packing: how tokens are cut into tiles.
        tokens: of the caller; the arrays are filled up to a multiple of 8.
        n_kq: query/key heads.
        n_v: value heads.
        group: query/key heads of one step.
        width: taps of the convolution.
        precision: of the products.
        scale: factor of the outputs.
        eps: of the l2norm, on the sum of squares; None: no norm.
        beta_scale: factor of the sigmoid.
        silu: whether the convolution is followed by silu.
        bias: whether the convolution has a bias.
    """

    packing: Packing
    tokens: int
    n_kq: int
    n_v: int
    group: int
    width: int
    precision: Precision
    scale: float
    eps: float | None
    beta_scale: float
    silu: bool
    bias: bool

    @property
    def groups(self) -> int:
        """Steps per tile."""
        return self.n_kq // self.group

    @property
    def values(self) -> int:
        """Value heads of one step."""
        return self.n_v // self.groups

    @property
    def channels(self) -> int:
        """Lane tiles of qkv that one step reads: queries, keys, values."""
        return 2 * self.group + self.values

    @property
    def split(self) -> bool:
        """Whether operands are hi/lo pairs."""
        return self.parts > 1

    @property
    def depth(self) -> int:
        """Turns of the loop that a step goes through; with pairs it does so in halves."""
        return 3 if self.split else 4

    @property
    def halves(self) -> tuple[range, range]:
        """Query/key heads of a step in halves; the second of one head is empty."""
        middle = -(-self.group // 2)
        return range(middle), range(middle, self.group)

    def values_of(self, heads: range) -> range:
        """Value heads of query/key heads of a step."""
        return range(heads.start * self.per_key, heads.stop * self.per_key)

    @property
    def per_key(self) -> int:
        """Value heads of a query/key head."""
        return self.n_v // self.n_kq

    @property
    def gates(self) -> int:
        """Gates of a value head: beta, beta exp(G), exp(G), and with pairs exp(G_C - G)."""
        return 4 if self.split else 3

    @property
    def gate_rows(self) -> int:
        """Rows of gates of one step, to whole register tiles."""
        return -(-self.gates * self.values // 8) * 8

    @property
    def word_rows(self) -> int:
        """Rows of log-decays in pieces."""
        return -(-PIECES * self.values // 8) * 8

    @property
    def parts(self) -> int:
        """BF16 numbers that stand for one number of a product's operand."""
        return PARTS[self.precision]

    def columns(self, g: Any, heads: range | None = None) -> tuple[tuple[Any, int, int], ...]:  # noqa: ANN401  traced
        """Where a group's queries, keys and values stand in qkv: (first column, columns, first column in the step).

        `heads`: of these of the group's query/key heads alone.
        """
        heads = range(self.group) if heads is None else heads
        q, v = self.group * HEAD_DIM, self.values * HEAD_DIM
        wholes = (
            (g * q, 0, heads),
            (self.n_kq * HEAD_DIM + g * q, q, heads),
            (2 * self.n_kq * HEAD_DIM + g * v, 2 * q, self.values_of(heads)),
        )
        return tuple(
            (column + own.start * HEAD_DIM, len(own) * HEAD_DIM, at + own.start * HEAD_DIM)
            for column, at, own in wholes
        )

    def channel_columns(self, g: Any) -> list[Any]:  # noqa: ANN401  int32, maybe traced
        """First column in qkv of each lane tile that a group reads."""
        return [column + n for column, size, _ in self.columns(g) for n in range(0, size, LANES)]

    @property
    def window_groups(self) -> int:
        """Most 8-row groups of a window: no copy is larger than the arrays."""
        return min(TILE, self.packing.tokens) // GROUP


class Refs(NamedTuple):
    """The kernel's refs; None for what a call does not have.

    Attributes:
        sequences: SMEM int32, `schedule.sequences_operand`.
        taps, bias, a_log, dt_bias: whole, in VMEM.
        qkv, b, a: HBM.
        out, conv, state: HBM; `conv` and `state` are the caller's caches, updated in place.
        x: windows of qkv, by block parity.
        b_in, a_in: windows of gate logits, by block parity.
        x_last, b_last, a_last: the last groups of windows of an odd number of groups.
        conv_in: convolution states that sequences begin with, by block parity.
        conv_out: one that a sequence ends with.
        history: rows before the window, by group.
        rows: the step's rows in FP32, history first, by channel tile.
        q, k: normalised queries and keys: from the first stage to the second, by step parity; None with pairs.
        v: beta v, from the first stage to the fourth, in a ring; FP32 with pairs.
        gate_logits: beta and log-decays of a tile.
        gates, words: per block parity and group.
        k_t, a_kk, a_qk: `tile.Head` by query/key head, within the second stage; with pairs k_t comes from the first.
        base, small, added: `inverse.Cut` by value head: from the second stage to the third; small with pairs. Pairs are
            kept as words (`products.keep`), here and in what follows.
        keys, read, writes, decay: of `tile.Prepared` what the fourth stage takes, in a ring; None with pairs.
        k_q, k_t_chunks: `residual.Keys` by query/key head, from the first stage to the fourth, in a ring; with pairs.
        scores: of `residual.Residuals`, from the second stage to the fourth, in a ring; with pairs.
        columns: a step's gates, a column each: from the first stage to the others, in a ring; with pairs.
        inverse: X by value head: from the third stage to the fourth.
        s: states by group and value head; the last group is nobody's.
        o: outputs, by block parity.
        o_last: the last group of an odd number.
        tail: last 8 rows of output written.
        blocks: SMEM int32, the list of tiles (`schedule.Plan`).
        flags: SMEM, copies under way.
        x_sem, conv_sem: semaphores of copies in, by block parity.
        conv_out_sem, state_sem, state_out_sem, out_sem: of the others.
    """

    sequences: Any
    taps: Any
    bias: Any
    a_log: Any
    dt_bias: Any
    qkv: Any
    b: Any
    a: Any
    out: Any
    conv: Any
    state: Any
    x: Any
    b_in: Any
    a_in: Any
    x_last: Any
    b_last: Any
    a_last: Any
    conv_in: Any
    conv_out: Any
    history: Any
    rows: Any
    q: Any
    k: Any
    v: Any
    gate_logits: Any
    gates: Any
    words: Any
    k_t: Any
    a_kk: Any
    a_qk: Any
    base: Any
    small: Any
    added: Any
    keys: Any
    read: Any
    writes: Any
    decay: Any
    k_q: Any
    k_t_chunks: Any
    scores: Any
    columns: Any
    inverse: Any
    s: Any
    o: Any
    o_last: Any
    tail: Any
    blocks: Any
    flags: Any
    x_sem: Any
    conv_sem: Any
    conv_out_sem: Any
    state_sem: Any
    state_out_sem: Any
    out_sem: Any


class Place(NamedTuple):
    """A step of the kernel: a tile's block and a group of heads.

    Attributes:
        block: which block; traced.
        g: which group of heads; traced.
        live: whether there is such a step.
        parity: of the step: which of two buffers it uses.
        ring: which of RING.
    """

    block: Any
    g: Any
    live: Any
    parity: Any
    ring: Any
