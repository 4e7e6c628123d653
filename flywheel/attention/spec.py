"""What the parts of the kernel share: the static call, the refs by name, and the place in the grid."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flywheel.attention import tile
from flywheel.attention.budget import LANES
from flywheel.attention.schedule import ROW_GRID

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float32, Int32

    from flywheel.attention.rotary import Layout
    from flywheel.attention.schedule import Band, Schedule
    from flywheel.attention.tile import ScoreRule
    from flywheel.attention.tiling import Tiling


ANCHOR_KEYS = ROW_GRID
"""Keys that anchors are chosen from: one register tile.  More would cost products and make replays no rarer to speak
of: a query replays when a score exceeds its anchor by 103 nats."""

CONTROLS = 6
FLAG, FIRST_BLOCK, Q_NEXT, Q_HERE, KV_NEXT, KV_HERE = range(CONTROLS)
"""What the scalars in `Refs.control` are: a failed check; the first key block that the query block visits; and, where
the kernel fetches blocks itself (`fetch`), the slots that blocks of q, and of k and v, were last fetched to and are
read from."""


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """Everything static about one call.

    Attributes:
        schedule: the grid.
        tiling: block sizes.
        group: query heads per KV head.
        rule: from dot products to scores.
        online: the rescaling softmax throughout instead of the static anchor.
        segments: rows see keys of their own segment only.
        sinks: every head has a sink.
        rotary: how q is rotated before it is used; None: not at all.
        return_lse: write LSE.
        return_max_logit: write each row's largest score.
        return_diagnostics: write what the softmax did.
    """

    schedule: Schedule
    tiling: Tiling
    group: int
    rule: ScoreRule
    online: bool = False
    segments: bool = False
    sinks: bool = False
    rotary: Layout | None = None
    return_lse: bool = False
    return_max_logit: bool = False
    return_diagnostics: bool = False

    @property
    def anchor(self) -> float | None:
        """The anchor of every row, where there is one; None: rows have their own, or the softmax rescales."""
        return None if self.online else self.rule.anchor

    @property
    def late_anchors(self) -> bool:
        """Whether rows may see their first key anywhere: anchors of their own are then adopted block by block."""
        return self.anchor is None and (self.segments or not self.schedule.sees_key_0)

    @property
    def blind_rows(self) -> bool:
        """Whether some rows may see no key."""
        return self.segments or self.schedule.has_empty_rows


class Refs(NamedTuple):
    """The kernel's refs by name, None for what a call does not have.

    `q_in`, `k` and `v` are the step's blocks, `[tokens, width]`; `*_slots` are where they lie when the kernel fetches
    them itself (`fetch`), and `*_hbm` are whole arrays.
    """

    steps: Any
    q_in: Any
    k: Any
    v: Any
    q_hbm: Any
    k_hbm: Any
    v_hbm: Any
    sinks: Any
    q_ids: Any
    k_ids: Any
    k_ids_hbm: Any
    cos: Any
    sin: Any
    out: Any
    lse: Any
    max_logit: Any
    replays: Any
    anchor_out: Any
    l_out: Any
    acc: Any
    sums: Any
    anchor: Any
    seen: Any
    maxima: Any
    marks: Any
    q_rotated: Any
    q_slots: Any
    k_slots: Any
    v_slots: Any
    k_stage: Any
    v_stage: Any
    v_clean: Any
    k_ids_stage: Any
    control: Any
    sems: Any
    fetch_sems: Any

    @property
    def q(self) -> Any:  # noqa: ANN401  a ref
        """Queries as the products take them, `[block_q, head_dim]`."""
        return self.q_in if self.q_rotated is None else self.q_rotated


@dataclasses.dataclass(frozen=True)
class Site:
    """One grid step: the static call, its refs and the traced indices."""

    spec: CallSpec
    refs: Refs
    b: Any
    h: Any
    i: Any
    j: Any

    @property
    def schedule(self) -> Schedule:
        """The grid of one head."""
        return self.spec.schedule

    def rows(self, first: Any, count: int) -> Int32[Array, "1 count"]:  # noqa: ANN401  an int, maybe traced
        """Positions of queries first .. first + count - 1 of this block in the sequence of queries."""
        return lax.broadcasted_iota(jnp.int32, (1, count), 1) + (self.i * self.schedule.block_q + first)

    def inside(self, first: Any, count: int) -> Bool[Array, "1 count"] | None:  # noqa: ANN401
        """Rows before q_len, on whose values a check may act; None: all of them."""
        return self.rows(first, count) < self.schedule.q_len if self.schedule.ragged_rows else None

    def has_key(self, first: Any, count: int) -> Bool[Array, "1 count"] | None:  # noqa: ANN401
        """Rows that see a key; None: all of them."""
        if self.spec.segments:
            return tile.denominator(self.refs.seen[:, lane_slice(first, count)]) > 0.0
        if not self.schedule.has_empty_rows:
            return None
        rows, (lower, upper) = self.rows(first, count), self.schedule.band
        seeing = None
        if upper is not None and upper < 0:
            seeing = rows + upper >= 0
        if lower is not None:
            seeing = both(seeing, rows + lower < self.schedule.kv_len)
        return seeing


def lane_slice(first: Any, count: int) -> Any:  # noqa: ANN401
    """Queries first .. first + count - 1 of a block."""
    return pl.ds(first if isinstance(first, int) else pl.multiple_of(first, LANES), count)


def band_mask(band: Band, keys: Int32[Array, "F 1"], rows: Int32[Array, "1 C"]) -> Bool[Array, "F C"] | None:
    """Which rows see which keys; None: all."""
    visible = None
    if band.upper is not None:
        visible = keys <= rows + band.upper
    if band.lower is not None:
        visible = both(visible, keys >= rows + band.lower)
    return visible


def both(a: Array | None, b: Array | None) -> Array | None:
    """Conjunction of two masks of which None hides nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def on_sublanes(row: Float32[Array, "1 C"]) -> Float32[Array, "S C"]:
    """A row of values per query, as the state keeps it: on every sublane, so that reading it costs no broadcast."""
    return jnp.broadcast_to(row, (tile.SUBLANES, row.shape[1]))


def key_ids_on_sublanes(ids: Int32[Array, "1 F"], count: int) -> Int32[Array, "F count"]:
    """Keys' segment ids beside `count` queries; they come on lanes."""
    column = jnp.broadcast_to(ids, (LANES, ids.shape[1])).T
    return jnp.concatenate([column] * (count // LANES), axis=1)
