"""Rotary embedding of the queries inside the kernel."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pytest

import flywheel
from flywheel.attention import rotary as kernel_rotary
from verify.attention.cases import AttentionCase
from verify.attention.contract import contract_bound
from verify.attention.judge import judge
from verify.attention.problem import BF16, widen
from verify.backend import device_model
from verify.devices import BF16_UNIT_ROUNDOFF
from verify.rotary import oracle_float64
from verify.rotary.problem import RotaryProblem
from verify.verdict import Verdict

if TYPE_CHECKING:
    from verify.attention.problem import AttentionProblem

PHASE_UNITS = 2.0 * math.pi * 2.0**-30 + math.pi * 3.0 * 2.0**-24
"""Radians: what `rotary_tables` says of the phase, and three FP32 roundings of at most pi: the turns, 2 pi and their
product."""


@pytest.mark.smoke
@pytest.mark.parametrize("base", [1e4, 1e5, 1e7])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tables_do_not_decay_with_position(base: float, head_dim: int) -> None:
    """Cosine and sine are as right at position 2**20 as at 1: the phase is reduced in integers."""
    positions = np.unique(np.concatenate([np.arange(64), 2 ** np.arange(21), 2 ** np.arange(1, 21) - 1])).astype(
        np.int32
    )
    got = flywheel.rotary_tables(jnp.asarray(positions), head_dim, base)
    want = oracle_float64.phases(base, head_dim, positions.astype(np.int64))
    device = device_model()
    for table, exact, doubt, envelope in (
        (got.cos, want.cos, want.cos_error, device.cos_absolute),
        (got.sin, want.sin, want.sin_error, device.sin_absolute),
    ):
        error = np.abs(np.asarray(table, np.float64) - exact)
        assert (error <= PHASE_UNITS + envelope + doubt).all()


def rotated(problem: AttentionProblem, positions: np.ndarray, base: float, layout: Any) -> tuple[Any, np.ndarray]:
    """The problem whose queries are the exactly rotated ones, rounded; and how far a kernel's may be from those."""
    rotation = RotaryProblem(problem.q, positions, base=base, layout=layout)
    exact = oracle_float64.rotate(rotation)
    nearest = exact.out.astype(BF16)
    # Each entry of a table is off by its phase and by one cosine or sine, at every position alike; two products and a
    # sum round in FP32, and the result rounds to BF16 once.
    device = device_model()
    table = PHASE_UNITS + max(device.cos_absolute, device.sin_absolute)
    sizes = np.zeros(exact.out.shape)
    first, second = rotation.lanes()
    sizes[..., first] = sizes[..., second] = np.abs(widen(problem.q)[..., first]) + np.abs(
        widen(problem.q)[..., second]
    )
    before = sizes * (table + 3.0 * device.unit_roundoff)
    room = before + BF16_UNIT_ROUNDOFF * (np.abs(exact.out) + before) + 4.0 * device.smallest_normal + exact.error
    return dataclasses.replace(problem, q=nearest), room + np.abs(nearest.astype(np.float64) - exact.out)


# Each is a compilation of its own: by default every pair of settings once, all eight in the deep tier.
ROTATIONS = [
    pytest.param(layout, *place, softmax, marks=() if (n + m + o) % 2 == 0 else pytest.mark.deep)
    for n, layout in enumerate(("half", "interleaved"))
    for m, place in enumerate(((64, 0), (128, 2**20 - 400)))
    for o, softmax in enumerate(("static", "online"))
]


@pytest.mark.parametrize(("layout", "head_dim", "first", "softmax"), ROTATIONS)
def test_rotated_queries_within_contract(layout: Any, head_dim: int, first: int, softmax: Any) -> None:
    """Rotating in the kernel gives the attention of exactly rotated queries, within the bound for their rounding."""
    problem = AttentionCase("rotary", (2, 2, 1, 200, 330, head_dim), seed=head_dim).build()
    positions = np.stack([np.arange(200), np.arange(200)[::-1]]).astype(np.int32) + first
    exact, error = rotated(problem, positions, 1e4, layout)
    result = flywheel.attention(
        *(jnp.asarray(x) for x in (problem.q, problem.k, problem.v)),
        causal=True,
        rotary=flywheel.Rotary(positions=jnp.asarray(positions), base=1e4, layout=layout),
        softmax=softmax,
        return_lse=True,
        config=flywheel.AttentionConfig(128, 128, 128),
        interpret=True,
    )
    bound = contract_bound(exact, device_model(), query_error=error)
    judgement = judge(exact, np.asarray(result.out), np.asarray(result.lse), bound, power=True)
    assert judgement.verdict is Verdict.PASS, judgement.reason


def test_tables_given_are_the_tables_used() -> None:
    """Positions and the tables made from them give the same bits; other positions give others."""
    problem = AttentionCase("rotary", (1, 2, 1, 128, 128, 64), seed=1).build()
    operands = [jnp.asarray(x) for x in (problem.q, problem.k, problem.v)]
    positions = jnp.arange(128, dtype=jnp.int32)
    tables = flywheel.rotary_tables(positions, 64, 1e4)
    ways = [
        flywheel.Rotary(positions=positions, base=1e4),
        flywheel.Rotary(tables=tables),
        flywheel.Rotary(positions=positions + 1, base=1e4),
    ]
    by_positions, by_tables, moved = (
        np.asarray(flywheel.attention(*operands, causal=True, rotary=way, interpret=True)).view(np.uint16)
        for way in ways
    )
    assert (by_positions == by_tables).all()
    assert (by_positions != moved).any()


@pytest.mark.smoke
def test_partner_lanes() -> None:
    """Half-split pairs lane i with i + D / 2, interleaved 2 i with 2 i + 1; a quarter turn swaps them with one sign."""
    q = jnp.arange(1, 9, dtype=jnp.bfloat16)[None]
    quarter = flywheel.RotaryTables(jnp.zeros((1, 4), jnp.float32), jnp.ones((1, 4), jnp.float32))
    for layout, want in (
        ("half", [-5, -6, -7, -8, 1, 2, 3, 4]),
        ("interleaved", [-2, 1, -4, 3, -6, 5, -8, 7]),
    ):
        cos, sin = kernel_rotary.expand_tables(quarter, layout)
        got = kernel_rotary.rotate(q, cos[0], sin[0], layout)
        assert np.asarray(got, np.float32)[0].tolist() == want


@pytest.mark.smoke
@pytest.mark.parametrize(("head_dim", "base", "text"), [(7, 1e4, "head_dim must be"), (64, 0.5, "base must be")])
def test_table_refusals(head_dim: int, base: float, text: str) -> None:
    """What makes no table is refused by name."""
    with pytest.raises(ValueError, match=text):
        flywheel.rotary_tables(jnp.zeros(1, jnp.int32), head_dim, base)
