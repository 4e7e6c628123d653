"""The lemmas hold as the constants stand, and editing a constant in an unsafe direction refutes a named one."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import z3

from proofs import catalogue, constants, smt
from proofs import packing as packing_lemmas
from proofs.attention import overflow, rounding, tiles
from proofs.exact import BF16, FP32, Format, power_of_two
from proofs.lemma import LemmaRefuted, examine

import jax.numpy as jnp  # isort: skip  after proofs, which configures JAX

from flywheel import packing
from flywheel.attention import budget, checks, schedule, tile
from flywheel.attention import rotary as rotary_kernel
from flywheel.gdn import inverse as gdn_inverse
from flywheel.gdn import schedule as gdn_schedule
from flywheel.gdn import spec as gdn_spec
from flywheel.gdn import tile as gdn_tile
from flywheel.ragged import geometry
from verify import devices
from verify.attention import contract
from verify.gdn import contract as gdn_contract
from verify.gdn import inverse, inverse_levels, steps
from verify.rotary import contract as rotary

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array

ROOT = Path(__file__).parents[3]
_FRAGMENT, _KIND, _VISITED = schedule.Schedule._fragment, schedule.Schedule.kind, schedule.Schedule.visited
_SEEN, _SHARED = schedule.Schedule._seen, schedule.Schedule._shared
_PIECES, _WITHIN = schedule.Schedule.pieces, schedule.BlockKind.within
_THROUGH, _ADVANCE = gdn_contract._Carried.through, gdn_contract._Carried.advance
BY_NAME = {lemma.name: lemma for lemma in catalogue.LEMMAS}


DEEP = {"ragged_windows", "tile_skipping", "packed_rows_written_once"}
"""Lemmas that take many seconds; `python -m proofs`, which `.ci/run` calls, checks them every time."""


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep) if name in DEEP else name for name in BY_NAME]
)
def test_lemma_holds(name: str) -> None:
    """Every lemma holds for the constants as they stand, and says what it found."""
    verdict = examine(BY_NAME[name])
    assert verdict.holds, verdict.finding
    assert verdict.finding


UNSAFE = [
    (budget, "LANE_LIMIT", 2.0**120, "checked_sum_has_normal_reciprocal"),
    (budget, "LANE_LIMIT", 2.0**118, "checked_sum_has_normal_reciprocal"),
    (budget, "LANE_LIMIT", 2.0**128, "check_never_misses"),
    (budget, "LANE_LIMIT", 2.0**70, "article_tau"),
    (budget, "LANES", 256, "checked_sum_has_normal_reciprocal"),
    (budget, "BIAS", 8, "replay_never_overflows"),
    (budget, "BIAS", 30, "replay_never_overflows"),
    (budget, "BIAS", 33, "flushed_weights_are_negligible"),
    (budget, "BIAS", 40, "floor_is_reached"),
    (budget, "BIAS", 100, "floor_is_reached"),
    (budget, "BIAS", 100, "flushed_weights_are_negligible"),
    (budget, "SUM_FLOOR", 2.0**-33, "floor_is_reached"),
    (budget, "SUM_FLOOR", 2.0**-20, "floor_is_reached"),
    (budget, "SUM_FLOOR", 2.0**-35, "flushed_weights_are_negligible"),
    (budget, "SUM_FLOOR", 2.0**-100, "flushed_weights_are_negligible"),
    (budget, "SUM_FLOOR", 0.0, "checked_sum_has_normal_reciprocal"),
    (budget, "MAX_KEYS", 2**32, "replay_never_overflows"),
    (budget, "MAX_KEYS", 2**31, "contract_constants"),
    (budget, "HALF_BF16_MAX", 2.0**127, "clamp_keeps_the_bound"),
    (budget, "HALF_BF16_MAX", (2.0 - 2.0**-6) * 2.0**126, "clamp_keeps_the_bound"),
    (budget, "FP32_MAX", 2.0**127, "clamp_keeps_the_bound"),
    (budget, "FP32_MAX", 2.0**127, "integer_maximum_rescales_exactly"),
    (contract, "BIAS", 31, "flushed_weights_are_negligible"),
    (contract, "BIAS", 60, "flushed_weights_are_negligible"),
    (contract, "LARGEST_EXPONENT", 117.0, "check_never_misses"),
    (contract, "LARGEST_EXPONENT", 64.0, "contract_constants"),
    (contract, "DOMAIN_LIMIT", 2.0**128, "contract_constants"),
    (contract, "EVALUATION_SLACK", 1.0, "contract_constants"),
    (budget, "SUM_FLOOR", 2.0**-36, "attention_bound"),
    (contract, "BIAS", 31, "attention_bound"),
    (contract, "BIAS", 29, "convex_bound"),
    (rotary, "FP32_UNIT", 2.0**-25, "rotary_phase"),
    (rotary, "RECIPROCAL_OF_POWER", 2.0**-24, "rotary_phase"),
    (devices, "BF16_UNIT_ROUNDOFF", 2.0**-9, "bf16_rounding_unit"),
    (devices, "BF16_UNIT_ROUNDOFF", 2.0**-7, "bf16_rounding_unit"),
    (contract, "CONVEX_KEYS", 2**29, "convex_bound"),
    (contract, "NEGLIGIBLE", 0.5, "contract_constants"),
    (tile, "LOG2_E", math.log2(math.e) * (1 + 2.0**-30), "contract_constants"),
    (tile, "LOG2_E", math.log2(math.e) * (1 + 2.0**-20), "sinks"),
    (tile, "LN2", math.log(2.0) * (1 + 2.0**-20), "maximum_logit"),
    (tile, "LN2", math.log(2.0) * (1 + 2.0**-20), "attention_theorem"),
    (tile, "_FP32_EXPONENT_BIAS", 126, "integer_maximum_rescales_exactly"),
    (tile, "_FP32_MANTISSA_BITS", 22, "integer_maximum_rescales_exactly"),
    (contract, "BIAS", 29, "attention_theorem"),
    (contract, "LARGEST_EXPONENT", 64.0, "attention_theorem"),
    (contract, "EVALUATION_SLACK", 1.0 + 2.0**-16, "attention_theorem"),
    (budget, "SUM_FLOOR", 2.0**-36, "attention_theorem"),
    (budget, "LANE_LIMIT", 2.0**120, "attention_theorem"),
    (budget, "LANE_LIMIT", 2.0**20, "early_bias"),
    (budget, "MAX_KEYS", 2**48, "early_bias"),
    (budget, "BIAS", 1, "early_bias"),
    (budget, "SUM_FLOOR", 2.0**-80, "early_bias"),
    (checks, "_LARGEST", 2.0**128, "soft_cap"),
    (checks, "_SMALLEST_NORMAL", 2.0**-130, "soft_cap"),
    (contract, "DOMAIN_LIMIT", 2.0**128, "sinks"),
    (contract, "DOMAIN_LIMIT", 2.0**126, "soft_cap"),
    (budget, "LANE_LIMIT", 2.0**-10, "sinks"),
    (budget, "BIAS", -100, "sinks"),
    (rotary_kernel, "MAX_POSITION", 2**36, "rotary_turns"),
    (rotary_kernel, "_WORD", 31, "rotary_turns"),
    (rotary_kernel, "_HALF_WORD", 15, "rotary_turns"),
    (rotary_kernel, "_DIGITS", 16, "rotary_turns"),
    (gdn_tile, "PIECES", 2, "gate_sums"),
    (steps, "PIECES", 2, "gate_sums"),
    (steps, "PIECES_SIZE", 1.0 + 2.0**-8, "gate_sums"),
    (inverse_levels, "LOW_UNIT", 2.0**-10, "gate_sums"),
    (inverse_levels, "SPLIT_UNIT", 2.0**-18, "gate_sums"),
    (gdn_tile, "FAR", -12.0, "log_decays"),
    (gdn_tile, "FAR", -90.0, "log_decays"),
    (steps, "FAR", -12.0, "log_decays"),
    (gdn_tile, "LEAST_LOG_DECAY", -80.0, "log_decays"),
    (gdn_tile, "LEAST_LOG_DECAY", -1e37, "log_decays"),
    (gdn_inverse, "CHUNK", 32, "eight_products"),
    (gdn_inverse, "PRODUCTS", 7, "eight_products"),
    (gdn_schedule, "MOST_TOKENS", 2**23, "gdn_layout"),
    (gdn_spec, "HISTORY", 6, "gdn_layout"),
    (gdn_tile, "TILE", 256, "gdn_layout"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("module", "constant", "value", "name"), UNSAFE)
def test_unsafe_constant_refutes_a_lemma(
    monkeypatch: pytest.MonkeyPatch, module: object, constant: str, value: float, name: str
) -> None:
    """A constant edited in an unsafe direction refutes the lemma that names it."""
    assert constants.name_of(module, constant) in BY_NAME[name].rests_on
    monkeypatch.setattr(module, constant, value)
    verdict = examine(BY_NAME[name])
    assert not verdict.holds
    assert verdict.finding


def test_every_constant_has_an_unsafe_edit() -> None:
    """Every constant that the table lists, but for what a device model says, has an edit above that refutes a lemma."""
    listed = {name for lemma in catalogue.LEMMAS for name in lemma.rests_on if not constants.is_of_device(name)}
    assert listed == {constants.name_of(module, constant) for module, constant, _, _ in UNSAFE}


def test_every_constant_of_the_budget_is_watched() -> None:
    """No constant of the budget is outside the lemmas."""
    listed = {name for lemma in catalogue.LEMMAS for name in lemma.rests_on}
    assert {f"budget.{name}" for name in vars(budget) if name.isupper()} <= listed


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("exp2_relative", 0.6, "floor_is_reached"),
        ("exp2_relative", 0.6, "flushed_weights_are_negligible"),
        ("smallest_normal", 2.0**-120, "flushed_weights_are_negligible"),
        ("reciprocal_relative", 0.6, "final_division"),
        ("exp_relative", 0.6, "softplus_error"),
        ("exp_relative", 0.06, "sigmoid_error"),
        ("tanh_relative", 3.0, "soft_cap"),
        ("tanh_absolute", 3.0, "soft_cap"),
        ("log_relative", 1.5, "attention_theorem"),
    ],
)
def test_worse_machine_refutes_a_lemma(monkeypatch: pytest.MonkeyPatch, field: str, value: float, name: str) -> None:
    """A device model that allows more than the constants have room for refutes a lemma."""
    worse = dataclasses.replace(devices.V6E, **{field: value})
    if field == "smallest_normal":
        # The contract charges what the model says, so that only a kernel with a smaller floor can lose more.
        monkeypatch.setattr(budget, "SUM_FLOOR", budget.SUM_FLOOR / 2)
    monkeypatch.setattr(devices, "MODELS", {**devices.MODELS, "worse": worse})
    assert not examine(BY_NAME[name]).holds


def test_too_small_gamma_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first-order n u, which (1 + u)**n - 1 passes, does not do as gamma."""
    monkeypatch.setattr(contract, "gamma", lambda n, u: n * u)
    assert not examine(BY_NAME["contract_constants"]).holds


def test_too_wide_heads_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of 2**23 products, whose roundings leave a score at the end of the domain no room, are refuted."""
    monkeypatch.setattr(checks, "HEAD_DIMS", (*checks.HEAD_DIMS, 2**23))
    assert not examine(BY_NAME["contract_constants"]).holds


def test_inexact_power_of_two_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's exp2, which errs on integers, does not do as the factor of a replay."""
    monkeypatch.setattr(tile, "power_of_two", lambda n: jnp.exp2(n) * jnp.float32(1 + 2.0**-23))
    assert not examine(BY_NAME["integer_maximum_rescales_exactly"]).holds


def _one_query_too_few(self: schedule.Schedule, kind: schedule.BlockKind, start: int, size: int) -> schedule.Fragment:
    found = _FRAGMENT(self, kind, start, size)
    return found._replace(first=found.first + schedule.LANE_GRID)


def _mask_left_out(self: schedule.Schedule, kind: schedule.BlockKind, start: int, size: int) -> schedule.Fragment:
    found = _FRAGMENT(self, kind, start, size)
    return found._replace(clear_first=found.first)


def _anchor_sought_too_late(
    self: schedule.Schedule, kind: schedule.BlockKind, start: int, size: int
) -> schedule.Fragment:
    found = _FRAGMENT(self, kind, start, size)
    return found._replace(adopting=min(found.adopting + schedule.LANE_GRID, found.stop))


def _first_block_left_out(self: schedule.Schedule, i: int) -> tuple[int, ...]:
    return _VISITED(self, i)[1:] or (0,)


def _edge_skipped(self: schedule.Schedule, i: int, j: int) -> schedule.BlockKind | None:
    _, upper = self.band.moved(i * self.block_q - j * self.block_kv)
    return None if upper is not None and upper + self.block_q - 1 <= 0 else _KIND(self, i, j)


def _bare_piece(
    self: schedule.Schedule, kind: schedule.BlockKind, fragment: schedule.Fragment, first: int, queries: int
) -> tuple[schedule.Piece, ...]:
    bare = schedule.BlockKind(schedule.Band(None, None), schedule.LANE_GRID)
    return tuple(
        piece if piece.hidden else piece._replace(mask=bare._replace(keys=piece.size))
        for piece in _PIECES(self, kind, fragment, first, queries)
    )


def _one_key_too_few(self: schedule.Schedule, kind: schedule.BlockKind, first: int, width: int) -> tuple[int, int]:
    begin, end = _SEEN(self, kind, first, width)
    return begin, end - 1


def _keys_that_some_see(self: schedule.Schedule, kind: schedule.BlockKind, first: int, width: int) -> int | None:
    return _SHARED(self, kind, first, width - 1)


def _next_of_overlapping(self: schedule.Schedule, i: int) -> tuple[int, ...]:
    visited = _VISITED(self, i)
    return tuple(j + 1 for j in visited) if self.overlap > 0 else visited


@pytest.mark.parametrize(
    ("method", "broken", "symbolic"),
    [
        ("pieces", _bare_piece, False),
        ("_fragment", _one_query_too_few, True),
        ("_fragment", _one_query_too_few, False),
        ("_fragment", _mask_left_out, True),
        ("_fragment", _anchor_sought_too_late, True),
        ("visited", _first_block_left_out, True),
        ("visited", _first_block_left_out, False),
        ("kind", _edge_skipped, True),
        ("kind", _edge_skipped, False),
        ("_seen", _one_key_too_few, True),
        ("_seen", _one_key_too_few, False),
        ("_shared", _keys_that_some_see, True),
        ("visited", _next_of_overlapping, True),
        ("visited", _next_of_overlapping, False),
    ],
)
def test_faulty_schedule_is_refuted(
    monkeypatch: pytest.MonkeyPatch, method: str, broken: Callable[..., object], symbolic: bool
) -> None:
    """A schedule that leaves out queries, a mask, an anchor or a block is refuted, by grid and solver alone."""
    monkeypatch.setattr(schedule.Schedule, method, broken)
    if symbolic:
        monkeypatch.setattr(tiles, "_schedules", tuple)
    else:
        monkeypatch.setattr(tiles, "_visits_are_complete", int)
        monkeypatch.setattr(tiles, "_kinds_are_right", int)
        monkeypatch.setattr(tiles, "_masks_are_right", int)
        monkeypatch.setattr(tiles, "_fragments_are_right", int)
        monkeypatch.setattr(tiles, "_overlapping_blocks_hold_all", int)
        monkeypatch.setattr(tiles, "_cells_are_right", int)
    assert not examine(BY_NAME["tile_skipping"]).holds


def _last_bound_dropped(
    self: schedule.BlockKind, key: int, keys: int, first: int, queries: int
) -> schedule.BlockKind | None:
    found = _WITHIN(self, key, keys, first, queries)
    return found if found is None else found._replace(band=schedule.Band(found.band.lower, None))


def test_faulty_masks_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of pieces that lose a bound are refuted by the solver alone, where blocks and fragments are right."""
    monkeypatch.setattr(schedule.BlockKind, "within", _last_bound_dropped)
    monkeypatch.setattr(tiles, "_schedules", tuple)
    monkeypatch.setattr(tiles, "_kinds_are_right", int)
    assert not examine(BY_NAME["tile_skipping"]).holds


@pytest.mark.parametrize(
    ("field", "broken"),
    [
        ("carried", lambda blocks: jnp.maximum(blocks.carried - 1, 0)),
        ("stop", lambda blocks: jnp.maximum(blocks.stop - 1, 0)),
        ("group", lambda blocks: blocks.group + 1),
        ("groups", lambda blocks: jnp.maximum(blocks.groups - 1, 1)),
    ],
)
def test_faulty_windows_are_refuted(
    monkeypatch: pytest.MonkeyPatch, field: str, broken: Callable[[packing.Blocks], Array]
) -> None:
    """Windows that carry a row too few, end early, lie one group off or leave out a group are refuted."""
    sound = packing.Packing.blocks

    def faulty(self: packing.Packing, starts: Array) -> packing.Blocks:
        blocks = sound(self, starts)
        return blocks._replace(**{field: broken(blocks)})

    monkeypatch.setattr(packing.Packing, "blocks", faulty)
    assert not examine(BY_NAME["packed_rows_written_once"]).holds


def test_faulty_pieces_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that leave out a window's last group are refuted."""
    sound = packing.pieces
    monkeypatch.setattr(packing_lemmas, "pieces", lambda groups, most: sound(max(groups - 1, 0), most))
    assert not examine(BY_NAME["packed_rows_written_once"]).holds


def test_faulty_measure_of_an_inverse_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An a-posteriori measure without its last factor, or a tail without its second term, is refuted."""
    with monkeypatch.context() as context:
        context.setattr(inverse, "of_residual", lambda size, residual: size @ residual)
        assert not examine(BY_NAME["inverse_error_measures"]).holds
    with monkeypatch.context() as context:
        context.setattr(inverse_levels, "_neumann_tail", lambda step, first: first + step @ first)
        assert not examine(BY_NAME["inverse_error_measures"]).holds


def _half_of_what_is_carried(self: gdn_contract._Carried, left: np.ndarray, lanes: int) -> np.ndarray:
    return 0.5 * _THROUGH(self, left, lanes)


def _forgotten(self: gdn_contract._Carried, transition: np.ndarray, added: list[tuple[np.ndarray, np.ndarray]]) -> None:
    small = transition.size and np.abs(transition).max() < 2.0**-60
    _ADVANCE(self, 0.0 * transition if small else 0.5 * transition, added)


@pytest.mark.parametrize(("method", "broken"), [("through", _half_of_what_is_carried), ("advance", _forgotten)])
def test_faulty_chain_is_refuted(monkeypatch: pytest.MonkeyPatch, method: str, broken: Callable[..., object]) -> None:
    """A bound of the state that is half of what is carried, or transitions that lose half, are refuted."""
    monkeypatch.setattr(gdn_contract._Carried, method, broken)
    assert not examine(BY_NAME["gdn_chain_bound"]).holds


def test_a_sum_charged_with_too_few_roundings_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract's sums of log-decays charged as exact are refuted."""
    monkeypatch.setattr(gdn_contract, "gamma", lambda n, u: 0.5 * n * u)
    assert not examine(BY_NAME["gate_sums"]).holds


def test_uncharged_options_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contract whose charge for roundings of constants is nothing is refuted by soft cap, sinks and maximum logit."""
    monkeypatch.setattr(contract, "gamma", lambda n, u: np.zeros_like(n * u))
    for name in ("soft_cap", "sinks", "maximum_logit"):
        assert not examine(BY_NAME[name]).holds


def test_a_bias_that_is_never_added_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rescaling step with the bias left out of the early shift."""
    sound = tile.online_weights

    def broken(s: Array, shift: Array, visible: Array | None, *, late_bias: bool) -> tuple[Array, Array, Array]:
        p, new, factor = sound(s, shift, visible, late_bias=late_bias)
        return (p, new, factor) if late_bias else (p * 2.0**budget.BIAS, new - budget.BIAS, factor)

    monkeypatch.setattr(tile, "online_weights", broken)
    assert not examine(BY_NAME["early_bias"]).holds


@pytest.mark.deep
@pytest.mark.parametrize(
    "broken",
    [
        lambda record: record._replace(end=record.end + 1),
        lambda record: record._replace(begin=record.begin - 1),
        lambda record: record._replace(window=record.window + 1),
        lambda record: record._replace(diagonal=record.first_key < record.stop_key),
    ],
)
def test_faulty_ragged_windows_are_refuted(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[geometry.Record], geometry.Record]
) -> None:
    """Records that leave out a window, lie one group off, or take every first window for one on the diagonal."""
    sound = geometry.Geometry._windows
    monkeypatch.setattr(geometry.Geometry, "_windows", lambda self, *given: broken(sound(self, *given)))
    assert not examine(BY_NAME["ragged_windows"]).holds


def test_solver_finds_counterexamples_and_respects_what_is_given() -> None:
    """A claim that fails somewhere is refuted with an example; one that holds where it is asked about passes."""
    x = z3.Int("x")
    smt.require_always(x * x >= x, "a square is smaller", given=x >= 1)
    with pytest.raises(LemmaRefuted, match=r"a double is not larger, for example x = -?\d+"):
        smt.require_always(2 * x > x, "a double is not larger")


def test_every_path_through_the_code_is_taken_once() -> None:
    """Running code on symbols visits each way that its comparisons can come out, with a condition that is exact."""
    x = z3.Int("x")

    def clamp(path: smt.Path) -> object:
        return min(max(smt.Symbol(x, path), 0), 10)

    found = [(given, smt.expression(result)) for given, result in smt.paths([x >= -5], clamp)]
    assert len(found) == 3
    for given, result in found:
        expected = z3.If(x < 0, 0, z3.If(x > 10, 10, x))
        smt.require_always(result == expected, "wrong", given=z3.And(*given))
    smt.require_always(z3.Or(*(z3.And(*given) for given, _ in found)), "a value has no path", given=x >= -5)
    with pytest.raises(ValueError, match="division of a symbol by 0"):
        list(smt.paths([], lambda path: smt.Symbol(x, path) // 0))


def test_the_factor_two_of_any_order_is_needed() -> None:
    """With few bits some order of summing n ones computes more than 1.5 n, and none more than the bound."""
    precision = 5
    count = 2 ** (2 * precision - 1)
    sums = overflow.largest_sums(count, Format(precision, -126, 127))
    assert max(total / n for n, total in enumerate(sums.tolist(), 1)) > 1.5
    assert sums[-1] <= overflow.any_order_bound(count, precision)


def test_any_order_bound_refuses_what_its_induction_does_not_reach() -> None:
    """Beyond 2**(2 p - 1) terms the induction does not close, and the bound says so instead of returning."""
    assert overflow.any_order_bound(2**47, 24) < 2**48
    with pytest.raises(LemmaRefuted, match="induction"):
        overflow.any_order_bound(2**47 + 1, 24)


def test_rounding_agrees_with_the_formats() -> None:
    """Exact rounding knows ties to even, the formats' limits, and which numbers they hold."""
    assert BF16.nearest(1 + power_of_two(-8)) == 1
    assert BF16.nearest(1 + 3 * power_of_two(-8)) == 1 + power_of_two(-6)
    assert FP32.largest == budget.FP32_MAX
    assert BF16.largest == 2 * budget.HALF_BF16_MAX
    assert FP32.holds(FP32.smallest_normal)
    assert not FP32.holds(FP32.smallest_normal / 2)
    assert not FP32.holds(1 + power_of_two(-24))
    assert rounding.error_of_worst() < power_of_two(-8)


def test_sources_cite_lemmas_that_exist() -> None:
    """Every lemma that a comment of the kernels or of the suite cites is in the catalogue."""
    cited: set[str] = set()
    for room in ("flywheel", "verify"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if "tests" not in path.parts:
                cited |= set(re.findall(r"lemma\s+`(\w+)`", path.read_text(encoding="utf-8")))
    assert cited
    assert cited <= set(BY_NAME)


@pytest.mark.parametrize("name", BY_NAME)
def test_lemma_is_complete(name: str) -> None:
    """Each lemma states its argument in words, its constants can be read, and its assumptions are watched over."""
    lemma = BY_NAME[name]
    assert lemma.statement
    assert lemma.methods
    assert lemma.check.__doc__
    for constant in lemma.rests_on:
        assert constants.describe(constant).startswith(f"{constant} = ")
    for assumption in lemma.assumptions:
        where, found = assumption.covered_by.split("::") if "::" in assumption.covered_by else ("", "")
        if where:
            assert re.search(rf"^def {found}\(", (ROOT / where).read_text(encoding="utf-8"), flags=re.MULTILINE)
        else:
            module, function = assumption.covered_by.split(":")
            assert callable(getattr(importlib.import_module(module), function))


def test_every_lemma_is_explained() -> None:
    """proofs/README.md has a section for each lemma."""
    text = (ROOT / "proofs" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^### `(\w+)`", text, flags=re.MULTILINE) == [lemma.name for lemma in catalogue.LEMMAS]
