"""The control flow of a schedule: branches with their delay slots, basic blocks, loops."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from typing import TYPE_CHECKING

from verify.compiled.dump import DumpError

if TYPE_CHECKING:
    from verify.compiled.dump import Bundle, Schedule

_TARGET = re.compile(r"target bundleno = (\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Branch:
    """A conditional or unconditional jump.

    Attributes:
        pc: where it stands; it takes effect after its delay slots.
        target: where it goes.
        predicate: taken if this value is true; None is always.
        negated: taken if it is false instead.
    """

    pc: int
    target: int
    predicate: str | None
    negated: bool

    @property
    def backward(self) -> bool:
        """Whether it closes a loop."""
        return self.target <= self.pc


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A straight run of bundles, delay slots of its branch included.

    Attributes:
        first: address of its first bundle.
        last: address of its last bundle.
        branch: the jump that ends it, or None if it falls through.
    """

    first: int
    last: int
    branch: Branch | None

    @property
    def bundles(self) -> int:
        """How many bundles it has: its issue cycles."""
        return self.last - self.first + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop of the schedule.

    Attributes:
        first: address of its header.
        last: address of its last bundle, delay slots included.
    """

    first: int
    last: int

    @property
    def bundles(self) -> int:
        """Static size."""
        return self.last - self.first + 1


@dataclasses.dataclass(frozen=True)
class Program:
    """A schedule with its control flow.

    Attributes:
        schedule: what was read.
        delay_slots: bundles after a branch that are always executed.
        blocks: basic blocks in order of address; together they are the whole schedule.
        loops: outer loops before inner ones.
    """

    schedule: Schedule
    delay_slots: int
    blocks: tuple[Block, ...]
    loops: tuple[Loop, ...]

    def bundles(self, block: Block) -> tuple[Bundle, ...]:
        """The bundles of one block."""
        return self.schedule.bundles[block.first : block.last + 1]


def analyse(schedule: Schedule, delay_slots: int) -> Program:
    """Find the control flow of a schedule.

    Raises:
        DumpError: a branch has no readable target, or the region marks contradict the number of delay slots.
    """
    branches = _branches(schedule)
    _check_delay_slots(schedule, branches, delay_slots)
    end = len(schedule.bundles)
    starts = {0}
    for branch in branches:
        starts.update(pc for pc in (branch.target, branch.pc + delay_slots + 1) if pc < end)
    edges = [*sorted(starts), end]
    by_pc = {branch.pc: branch for branch in branches}
    blocks = []
    for first, after in itertools.pairwise(edges):
        inside = [by_pc[pc] for pc in range(first, after) if pc in by_pc]
        if len(inside) > 1 or (inside and inside[0].pc + delay_slots != after - 1):
            message = f"{schedule.name}: a jump leads into the delay slots of the branch at {inside[0].pc:#x}"
            raise DumpError(message)
        blocks.append(Block(first, after - 1, inside[0] if inside else None))
    loops = sorted(
        (Loop(branch.target, branch.pc + delay_slots) for branch in branches if branch.backward),
        key=lambda loop: (loop.first, -loop.last),
    )
    return Program(schedule, delay_slots, tuple(blocks), tuple(loops))


def _branches(schedule: Schedule) -> list[Branch]:
    found = []
    for bundle in schedule.bundles:
        for instruction in bundle.instructions:
            if not instruction.opcode.startswith("sbr"):
                continue
            target = _TARGET.search(instruction.operands)
            if target is None or int(target.group(1)) > len(schedule.bundles):
                message = f"{schedule.name}: branch at {bundle.pc:#x} without a target: {instruction.operands}"
                raise DumpError(message)
            found.append(Branch(bundle.pc, int(target.group(1)), instruction.predicate, instruction.negated))
    return found


def _check_delay_slots(schedule: Schedule, branches: list[Branch], delay_slots: int) -> None:
    """A region always ends with the last delay slot of the branch that leaves it."""
    distances: collections.Counter[int] = collections.Counter()
    for branch in branches:
        window = schedule.bundles[branch.pc : branch.pc + 16]
        if any(bundle.ends for bundle in window[1:]):
            last = branch.pc + delay_slots
            distances[bool(last < len(schedule.bundles) and schedule.bundles[last].ends)] += 1
    if distances[False]:
        message = (
            f"{schedule.name}: {distances[False]} of {distances.total()} branches end no region after "
            f"{delay_slots} delay slots"
        )
        raise DumpError(message)


def explain(program: Program, name: str, depth: int = 12) -> str:
    """Where an unknown value comes from: the chain of definitions back to what is not modelled."""
    defined = {
        instruction.result: (bundle.pc, instruction)
        for bundle in program.schedule.bundles
        for instruction in bundle.instructions
        if instruction.result
    }
    chain, queue, seen = [], [name], set()
    while queue and len(chain) < depth:
        current = queue.pop(0)
        if current in seen or current not in defined:
            continue
        seen.add(current)
        pc, instruction = defined[current]
        chain.append(f"{pc:#x} {current} = {instruction.opcode} {' '.join(instruction.operands.split())[:80]}")
        if instruction.opcode in {"spop", "sld"} or instruction.opcode.startswith("vpop"):
            break
        queue += re.findall(r"%([sp]\d+_[sp]\d+)", instruction.operands)
    return "; ".join(chain) or f"{name} is not defined in the dump"
