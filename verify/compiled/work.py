"""What a stretch of a schedule issues: products, pushes, transcendentals, spills, busy units."""

from __future__ import annotations

import collections
import dataclasses
from types import MappingProxyType
from typing import TYPE_CHECKING

from verify.compiled import opcodes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verify.compiled.dump import Schedule
    from verify.compiled.program import Block, Program

UNIT_NAMES = MappingProxyType(
    {
        # libtpu up to 0.0.50 has one column for the matrix unit, later ones tell products from pushes.
        "MXU": "mxu",
        "MATMUL": "mxu",
        "MATPUSH": "mxu_push",
        "XLU": "xlu",
        "VALU": "valu",
        "VPOP": "pop",
        "EUP": "eup",
        "VLOAD": "load",
        "VLOAD:FILL": "fill",
        "VSTORE": "store",
        "VSTORE:SPILL": "spill",
        "SALU": "salu",
    }
)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a stretch of the schedule issues.

    Attributes:
        cycles: bundles issued.
        products: `vmatmul` instructions by data type of the streamed operand.
        pushes: pushes of the stationary operand by data type.
        transposed_pushes: those that transpose.
        transposes: vector transposes on the cross-lane unit.
        transcendentals: instructions of the extended unary pipe by opcode.
        occupancy: busy share of each unit's slots, 0 to 1; None without a utilization table.
        spills: vector stores that spill a register; None without a utilization table.
        fills: vector loads that bring one back; None without a utilization table.
    """

    cycles: int
    products: Mapping[str, int]
    pushes: Mapping[str, int]
    transposed_pushes: int
    transposes: int
    transcendentals: Mapping[str, int]
    occupancy: Mapping[str, float] | None
    spills: int | None
    fills: int | None


def work_of(
    program: Program, visits: Mapping[int, int], skipped: Mapping[tuple[int, str], int] = MappingProxyType({})
) -> Work:
    """What so many visits of each block issue, less the instructions whose predicate failed.

    Occupancy is that of the schedule: an instruction issued in vain is taken to hold its slot all the same.
    """
    counts: collections.Counter[str] = collections.Counter()
    busy: collections.Counter[str] = collections.Counter()
    cycles = 0
    blocks = {block.first: block for block in program.blocks}
    for first, times in visits.items():
        block = blocks[first]
        cycles += times * block.bundles
        for opcode, count in _opcodes(program, block).items():
            counts[opcode] += times * count
        for unit, slots in _busy(program.schedule, block).items():
            busy[unit] += times * slots
    for (_, opcode), times in skipped.items():
        counts[opcode] -= times
    table = program.schedule.utilization
    capacity = (
        {UNIT_NAMES.get(unit, unit.lower()): slots for unit, slots in zip(table.units, table.capacity, strict=True)}
        if table
        else {}
    )
    return Work(
        cycles=cycles,
        products=opcodes.products(counts),
        pushes=opcodes.pushes(counts),
        transposed_pushes=opcodes.transposed_pushes(counts),
        transposes=opcodes.transposes(counts),
        transcendentals=opcodes.transcendentals(counts),
        occupancy={unit: busy[unit] / (cycles * slots) for unit, slots in capacity.items()}
        if table and cycles
        else None,
        spills=busy["spill"] if table else None,
        fills=busy["fill"] if table else None,
    )


def _opcodes(program: Program, block: Block) -> collections.Counter[str]:
    return collections.Counter(
        instruction.opcode for bundle in program.bundles(block) for instruction in bundle.instructions
    )


def _busy(schedule: Schedule, block: Block) -> dict[str, int]:
    table = schedule.utilization
    if table is None:
        return {}
    rows = table.rows[block.first : block.last + 1]
    return {
        UNIT_NAMES.get(unit, unit.lower()): sum(row[column] for row in rows) for column, unit in enumerate(table.units)
    }
