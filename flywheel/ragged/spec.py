"""What the parts of the kernel share: the static call, the refs by name, and the place of a head's block of queries."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from flywheel.attention.spec import both, lane_slice
from flywheel.ragged.geometry import FIELDS, Geometry, Record, Step

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import BFloat16, Bool, Int32

    from flywheel.attention.rotary import Layout
    from flywheel.attention.tile import ScoreRule
    from flywheel.ragged.tiling import Tiling

FLAG = 0
"""The scalar in `Refs.control` that a failed check sets."""

QUERIES, KEYS, TABLES, RESULTS, STAGE, SEMAPHORES = 0, 2, 4, 6, 7, 8
"""Semaphores: two for each buffer of two slots, one for results and one for replays; and how many there are."""


@dataclasses.dataclass(frozen=True)
class RaggedSpec:
    """Everything static about one call.

    Attributes:
        geometry: windows and bounds.
        group: query heads per KV head.
        heads: query heads.
        rule: from dot products to scores.
        online: the rescaling softmax throughout instead of the static anchor.
        sinks: every head has a sink.
        rotary: how q is rotated before it is used; None: not at all.
        return_lse: write LSE.
        return_max_logit: write each row's largest score.
        return_diagnostics: write what the softmax did.
        whole_copies: windows move in one copy each, of a traced size; Pallas' fast interpreter (`interpret=True`) knows
            static sizes only, and moves them group by group.
    """

    geometry: Geometry
    group: int
    heads: int
    rule: ScoreRule
    online: bool = False
    sinks: bool = False
    rotary: Layout | None = None
    return_lse: bool = False
    return_max_logit: bool = False
    return_diagnostics: bool = False
    whole_copies: bool = True

    @property
    def tiling(self) -> Tiling:
        """Block sizes."""
        return self.geometry.tiling

    @property
    def anchor(self) -> None:
        """No anchor for all rows: those of a soft cap are chosen like others, and rows adopt what they meet first."""
        return

    @property
    def late_anchors(self) -> bool:
        """Whether a row's first key may lie in any fragment: anchors are then adopted as keys come."""
        return self.geometry.left is not None

    @property
    def row_values(self) -> tuple[str, ...]:
        """The values per row that are written, by name of their refs."""
        names = ["lse"] * self.return_lse + ["max_logit"] * self.return_max_logit
        return (*names, *(("anchor_out", "l_out") if self.return_diagnostics else ()))


class Refs(NamedTuple):
    """The kernel's refs by name, None for what a call does not have.

    Arrays in HBM end in `_hbm`; `*_rows` are whole rows of tokens in VMEM; buffers have two slots.  `lse`,
    `max_logit`, `anchor_out` and `l_out` hold one block's results, as `flywheel.attention.finish` writes them.
    """

    records: Any
    totals: Any
    q_hbm: Any
    k_hbm: Any
    v_hbm: Any
    sinks: Any
    cos_hbm: Any
    sin_hbm: Any
    out_hbm: Any
    lse_rows: Any
    max_logit_rows: Any
    replays: Any
    anchor_out_rows: Any
    l_out_rows: Any
    q_long: Any
    k_long: Any
    v_long: Any
    out_long: Any
    q_short: Any
    k_short: Any
    v_short: Any
    out_short: Any
    cos_buffer: Any
    sin_buffer: Any
    tails: Any
    lse: Any
    max_logit: Any
    anchor_out: Any
    l_out: Any
    acc: Any
    sums: Any
    anchor: Any
    maxima: Any
    marks: Any
    failing: Any
    q_rotated: Any
    k_stage: Any
    v_stage: Any
    control: Any
    sems: Any
    out: Any = None
    """Where the block's results go (`Results`)."""


class Results(NamedTuple):
    """A ref of rows that is written as `flywheel.attention.finish` writes its own, by lanes of the state.

    Attributes:
        rows: `[rows, v_dim]`.
        lane: the lane of row 0.
    """

    rows: Any
    lane: Any

    @property
    def dtype(self) -> Any:  # noqa: ANN401
        """Of the results."""
        return self.rows.dtype

    def __setitem__(self, at: tuple[Any, ...], value: Array) -> None:
        queries = at[2]
        self.rows[lane_slice(_from(queries.start, self.lane), queries.size), :] = value


def _from(lane: Any, first: Any) -> Any:  # noqa: ANN401
    """Lanes from `first` on, a number that may be static."""
    return lane - first


@dataclasses.dataclass(frozen=True)
class Site:
    """One head's block of queries: the static call, its refs and traced numbers.

    Attributes:
        spec: the call.
        refs: its refs.
        record: the block.
        h: query head.
        kv_head: the head of keys that it reads.
        q: queries as the products take them: a ref of the rows of the window.
        k: the step's keys: a ref of the rows of their window.
        v: its values.
        lane: where the queries begin in the state, a multiple of 128.
        fresh: whether nothing was added to its state before.
        all_see: whether it is known that all of its rows see a key.
    """

    spec: RaggedSpec
    refs: Refs
    record: Record
    h: Any
    kv_head: Any
    q: Any
    k: Any
    v: Any
    lane: Any
    fresh: Any
    all_see: bool = False

    def queries(self, first: Any, count: int) -> BFloat16[Array, "count D"]:  # noqa: ANN401
        """Queries of lanes first .. first + count - 1."""
        return self.q[lane_slice(_from(first, self.lane), count), :]

    def rows(self, first: Any, count: int) -> Int32[Array, "1 count"]:  # noqa: ANN401  a lane, maybe traced
        """Rows of the window of the queries in lanes first .. first + count - 1."""
        return lax.broadcasted_iota(jnp.int32, (1, count), 1) + (first - self.lane)

    def inside(self, first: Any, count: int) -> Bool[Array, "1 count"]:  # noqa: ANN401
        """The block's own rows, on whose values a check may act."""
        rows = self.rows(first, count)
        return (rows >= self.record.carried) & (rows < self.record.stop)

    def has_key(self, first: Any, count: int) -> Bool[Array, "1 count"] | None:  # noqa: ANN401
        """Rows that see a key; None: all of them."""
        if self.all_see:
            return None
        record, geometry = self.record, self.spec.geometry
        aligned = self.rows(first, count) + record.aligned
        seeing = jnp.broadcast_to(record.first_key < record.stop_key, aligned.shape)
        if geometry.left is not None:
            seeing &= aligned - geometry.left < record.stop_key
        if geometry.right is not None:
            seeing &= aligned + geometry.right >= record.first_key
        return seeing

    def visible(
        self, step: Step, keys: Int32[Array, "F 1"], rows: Int32[Array, "1 C"], *, ends: bool = True
    ) -> Bool[Array, "F C"]:
        """Which rows of the window see which keys of a window of keys.  `ends`: look at its first and last key too."""
        geometry, visible = self.spec.geometry, None
        if geometry.right is not None:
            visible = keys <= rows + (step.shift + geometry.right)
        if geometry.left is not None:
            visible = both(visible, keys >= rows + (step.shift - geometry.left))
        if ends or visible is None:
            inside = (keys >= step.lo) & (keys < step.hi)
            visible = both(visible, jnp.broadcast_to(inside, (keys.shape[0], rows.shape[1])))
        return visible  # type: ignore[return-value]  one of the two was made


def read_record(records: Any, block: Any) -> Record:  # noqa: ANN401  an SMEM ref, a traced number
    """A block's record from scalar memory."""
    return Record(*(records[block * FIELDS + n] for n in range(FIELDS)))
