"""The unrolled bodies: blocks of static size on the diagonal, whole blocks of keys, and short sequences.

As in the dense kernel, the softmax of fragment n is emitted beside the products of fragment n - 1, which the compiler
overlaps; one body may go over several heads.  What is traced are a few bounds inside the masks: up to 7 keys before a
sequence's first, and how far the diagonal lies from the 8-row grid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flywheel.attention import tile
from flywheel.attention.finish import any_mark, finish_queries
from flywheel.attention.spec import ANCHOR_KEYS, lane_slice, on_sublanes
from flywheel.packing import GROUP
from flywheel.ragged.spec import FLAG, Refs, Site
from flywheel.ragged.tiling import EDGE, FRAGMENT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from jax import Array
    from jaxtyping import Bool, Float32

    from flywheel.ragged.geometry import Step

    Shape = Literal["diagonal", "whole", "square"]
    Mask = Literal["all", "last", "none"]

_ENOUGH = 8 * 256 * 256
"""Scores whose products hide the latency of others: as in the dense kernel."""

_DIVIDED_AT_ONCE = 256


class _Cell(NamedTuple):
    """Keys of one fragment against some queries of a head; rows count from the window's first.

    Attributes:
        site: the head.
        start: first key.
        size: keys.
        first: first row.
        width: rows.
        mask: what needs a mask: "all" keys, the "last" few of the fragment (`Geometry.slack`), or "none" of them; apart
            from the first 8 of the window, which may lie before the sequence.
    """

    site: Site
    start: int
    size: int
    first: int
    width: int
    mask: Mask

    @property
    def lane(self) -> int:
        """The first query's lane in the state."""
        return self.site.lane + self.first

    @property
    def queries(self) -> Any:  # noqa: ANN401
        return lane_slice(self.lane, self.width)


class _Weights(NamedTuple):
    """P of a cell as it enters the product, and the factor of what o was before (None: 1)."""

    cell: _Cell
    p: Array
    factor: Array | None


class _Fragment(NamedTuple):
    """Some keys of a block for one head, and the rows that are done with them: first .. stop - 1."""

    cells: tuple[_Cell, ...]
    done: tuple[int, int] | None


class _Emitted(NamedTuple):
    """A fragment whose weights are made, and whose products are not."""

    fragment: _Fragment
    weights: list[_Weights]


class _Failure(NamedTuple):
    """Marks of the final check: 1 where it fails, from a lane on."""

    lane: Any
    marks: Array


def emit(sites: Sequence[Site], step: Step, shape: Shape, size: int) -> None:
    """One body: `size` rows of each head.

    "diagonal": against the same number of keys, each row up to its own; the last step of a block.  "whole": against a
    whole block of keys.  "square": against `size` keys between the step's bounds; the only step of a block.
    """
    fragments = [fragment for site in sites for fragment in _fragments(site, shape, size)]
    failures: list[_Failure] = []
    pending: list[_Emitted] = []
    for group in _groups(fragments):
        emitted = _weave(group, pending, step, shape)
        failures += _conclude(pending)
        pending = emitted
    if shape == "whole" and not sites[0].spec.online:
        check_sums(sites[0], size)
    for each in pending:
        for weights in each.weights:
            _add_values(weights)
    failures += _conclude(pending)
    if failures:
        _raise_flag(sites[0].refs, failures)


def _weave(group: Sequence[_Fragment], pending: Sequence[_Emitted], step: Step, shape: Shape) -> list[_Emitted]:
    """Weights of a group's cells, woven with the products of the group before."""
    products = [weights for each in pending for weights in each.weights]
    emitted = []
    for fragment in group:
        emitted.append(_Emitted(fragment, []))
        for cell in fragment.cells:
            emitted[-1].weights.append(_softmax(cell, step, shape))
            if products:
                _add_values(products.pop(0))
    for each in products:
        _add_values(each)
    return emitted


def _conclude(group: Sequence[_Emitted]) -> list[_Failure]:
    """Divide and write the rows that are done with a group, and where the final check fails."""
    failures = []
    for fragment, _ in group:
        if fragment.done is None:
            continue
        site = fragment.cells[0].site
        for first, stop in _stretches(*fragment.done):
            lane = site.lane + first
            failures.append(_Failure(lane, finish_queries(site, lane, stop - first)))  # type: ignore[arg-type]
    return failures


def _stretches(first: int, stop: int) -> list[tuple[int, int]]:
    return [(at, min(at + _DIVIDED_AT_ONCE, stop)) for at in range(first, stop, _DIVIDED_AT_ONCE)]


def _fragments(site: Site, shape: Shape, size: int) -> list[_Fragment]:
    """What a body of this shape consists of for one head."""
    block = site.spec.tiling.block
    keys, most = (block, FRAGMENT) if shape == "whole" and not site.spec.online else (size, EDGE)
    if shape == "whole":
        keys = block
    found = []
    for start in range(0, keys, most):
        rows = min(most, keys - start)
        if shape == "diagonal":
            # Rows start .. start + rows - 1 do not see all keys; those from start + rows on miss a few.
            masked = min(start + rows, size)
            cells = _cells(site, start, rows, start, masked, "all") + _cells(site, start, rows, masked, size, "last")
            found.append(_Fragment(tuple(cells), (start, masked)))
        elif shape == "square":
            cells = _cells(site, start, rows, 0, size, "all")
            found.append(_Fragment(tuple(cells), (0, size) if start + rows == keys else None))
        else:
            # The first few rows may not see the last keys of the block before the diagonal; a window may be shorter.
            geometry = site.spec.geometry
            cut = start + rows == keys and (geometry.right is not None or geometry.queries.own_origin)
            cells = _cells(site, start, rows, 0, size, "last" if cut else "none")
            found.append(_Fragment(tuple(cells), None))
    return found


def _cells(site: Site, start: int, size: int, first: int, stop: int, mask: Mask) -> list[_Cell]:
    width = site.spec.tiling.width
    return [_Cell(site, start, size, at, min(width, stop - at), mask) for at in range(first, stop, width)]


def _groups(fragments: Sequence[_Fragment]) -> list[list[_Fragment]]:
    """Consecutive fragments that are emitted together, each group with enough products to hide another's latency."""
    groups: list[list[_Fragment]] = []
    work = _ENOUGH
    for fragment in fragments:
        if work >= _ENOUGH:
            groups.append([])
            work = 0
        groups[-1].append(fragment)
        work += sum(cell.size * cell.width for cell in fragment.cells)
    return groups


def _softmax(cell: _Cell, step: Step, shape: Shape) -> _Weights:
    """Weights of a cell; adds them to the sums."""
    site = cell.site
    refs, spec, queries = site.refs, site.spec, cell.queries
    keys = site.k[pl.ds(cell.start, cell.size), :]
    s = spec.rule(tile.dot_products(keys, site.queries(cell.lane, cell.width)))
    starting = cell.start == 0
    visible = _visible(cell, step, shape)
    if spec.return_max_logit:
        before = _before(site, refs.maxima[:, queries], tile.UNSET, starting=starting)
        hidden = jnp.concatenate([tile.hide(s[rows], mask) for rows, mask in visible])
        refs.maxima[:, queries] = jnp.maximum(before, tile.partial_maxima(hidden))
    factor = None
    if spec.online:
        mask = _whole_mask(visible, cell.width, cell.size)
        shift = _before(site, refs.anchor[:1, queries], tile.UNSET, starting=starting)
        p, shift, factor = tile.online_weights(s, shift, mask, late_bias=False)
        refs.anchor[:, queries] = on_sublanes(shift)
    else:
        anchor = _anchors(cell, s, visible)
        p = jnp.concatenate([tile.weights(s[rows], anchor, mask) for rows, mask in visible])
    sums = _before(site, refs.sums[:, queries], 0.0, starting=starting) if not _alone(site, starting=starting) else 0.0
    if factor is not None and not _alone(site, starting=starting):
        sums = _before(site, refs.sums[:, queries] * factor, 0.0, starting=starting)
    refs.sums[:, queries] = tile.partial_sums(p) + sums
    return _Weights(cell, p.astype(jnp.bfloat16), factor)


def _visible(cell: _Cell, step: Step, shape: Shape) -> list[tuple[slice, Bool[Array, "F C"] | None]]:
    """Stretches of the cell's keys, each with its mask (None: all rows see all of them)."""
    site = cell.site
    keys = lax.broadcasted_iota(jnp.int32, (cell.size, 1), 0) + cell.start
    rows = lax.broadcasted_iota(jnp.int32, (1, cell.width), 1) + cell.first
    if cell.mask == "all":
        mask = site.visible(step, keys, rows, ends=shape == "square")
        if cell.start == 0 and shape != "square":
            mask &= keys >= step.lo
        return [(slice(0, cell.size), mask)]
    # The other register tiles go without a mask.
    first, stop, found = 0, cell.size, []
    if cell.start == 0:
        first = GROUP
        found.append((slice(0, first), jnp.broadcast_to(keys[:first] >= step.lo, (first, cell.width))))
    if cell.mask == "last":
        stop -= site.spec.geometry.slack
        ends = shape == "whole" and site.spec.geometry.queries.own_origin
        last = (slice(stop, cell.size), site.visible(step, keys[stop:], rows, ends=ends))
        return [*found, (slice(first, stop), None), last]
    return [*found, (slice(first, stop), None)]


def _whole_mask(
    visible: list[tuple[slice, Bool[Array, "F C"] | None]], width: int, size: int
) -> Bool[Array, "size C"] | None:
    """One mask for the first `size` keys."""
    if all(mask is None for _, mask in visible):
        return None
    pieces = []
    for rows, mask in visible:
        count = min(rows.stop, size) - rows.start
        if count > 0:
            pieces.append(jnp.ones((count, width), jnp.bool_) if mask is None else mask[:count])
    return jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _alone(site: Site, *, starting: bool) -> bool:
    """Whether it is known that nothing was added to the head's state before."""
    return starting and site.fresh is True


def _before(site: Site, state: Array, blank: float, *, starting: bool) -> Array:
    """The state that a cell adds to: blank if this is the first step of the block."""
    if not starting or site.fresh is False:
        return state
    return jnp.full_like(state, blank) if site.fresh is True else jnp.where(site.fresh, blank, state)


def _anchors(
    cell: _Cell, s: Float32[Array, "F C"], visible: list[tuple[slice, Bool[Array, "F C"] | None]]
) -> Float32[Array, "S C"]:
    """The anchors of the cell's queries, chosen from their first keys if nothing was added before."""
    site, queries, starting = cell.site, cell.queries, cell.start == 0
    anchor = site.refs.anchor
    if site.spec.late_anchors:
        before = _before(site, anchor[:, queries], tile.UNSET, starting=starting)
        for rows, mask in visible:
            before = tile.adopt_anchor(before, s[rows], mask)
        anchor[:, queries] = before
        return before
    if not starting or site.fresh is False:
        return anchor[:, queries]
    chosen = on_sublanes(tile.choose_anchor(s[:ANCHOR_KEYS], _whole_mask(visible, cell.width, ANCHOR_KEYS)))
    if site.fresh is not True:
        chosen = jnp.where(site.fresh, chosen, anchor[:, queries])
    anchor[:, queries] = chosen
    return chosen


def _add_values(weights: _Weights) -> None:
    """o += V^T P^T for one cell."""
    cell = weights.cell
    site = cell.site
    refs, starting = site.refs, cell.start == 0
    v = site.v[pl.ds(cell.start, cell.size), :]
    product = tile.weighted_values(v, weights.p)
    if not _alone(site, starting=starting):
        before = refs.acc[:, cell.queries]
        if weights.factor is not None:
            before *= weights.factor
        product += _before(site, before, 0.0, starting=starting)
    refs.acc[:, cell.queries] = product


def _raise_flag(refs: Refs, failures: Sequence[_Failure]) -> None:
    """Set the flag if a check failed, and keep where: a body of several heads replays those that need it."""
    for lane, marks in failures:
        refs.failing[:, lane_slice(lane, marks.shape[1])] = marks
    refs.control[FLAG] = any_mark(*(marks for _, marks in failures))


def check_sums(site: Site, size: int) -> None:
    """The check between blocks of keys, for the first `size` queries."""
    exceeding = tile.exceeds_limit(site.refs.sums[:, lane_slice(0, size)])
    site.refs.control[FLAG] = any_mark(jnp.where(site.inside(0, size), exceeding, 0.0))
