"""Execute a schedule's scalar program: trip counts, branches and DMAs as on the device.

A kernel's control flow is decided by its scalar unit, whose instructions stand in the dump: grid indices,
block-skipping conditions, semaphores.  They are executed here with the real values of the scalar operands.  The vector
unit is not: a value that comes from it is unknown, and a branch on an unknown value stops the run, with the reason,
unless the caller says what to assume about such values.

Names make this exact without a model of latencies: every value in the dump has its own name, and only a loop's `sphi`
reads what its register last held.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING

from verify.compiled import scalar
from verify.compiled.dma import DmaEngine
from verify.compiled.program import explain
from verify.compiled.run import Assume, Run, UnknownBranchError
from verify.compiled.words import Words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from verify.compiled.dump import Instruction
    from verify.compiled.generations import Generation
    from verify.compiled.program import Block, Branch, Program
    from verify.compiled.scalar import Word

_SCALAR_RESULT = re.compile(r"[sp]\d+_[sp]\d+")
_SMEM = re.compile(r"\[smem:\[(.*?)\]\],? *(.*)$", re.DOTALL)
_OPERAND_INDEX = re.compile(r"index: (\d+)")
_OPERAND_SHAPE = re.compile(r"shape: (\w+)\[([\d,]*)\]")
_POINTER_SHIFTS = 6

FIRST_OPERAND_ADDRESS = 1 << 30
OPERAND_SPACING = 1 << 12


def execute(
    program: Program,
    generation: Generation,
    operands: Mapping[int, Sequence[int]] | None = None,
    *,
    assume: Assume = Assume.NOTHING,
    core: int = 0,
    cores: int = 1,
    cycle_limit: int = 10**11,
    block_limit: int = 2 * 10**7,
) -> Run:
    """Run the scalar program from the first bundle to the last.

    Args:
        program: what to run.
        generation: whose DMA rates and clock.
        operands: 32-bit words of the scalar operands, as they lie in SMEM, by operand index.
        assume: what to take for values that come from the vector unit.
        core: which core of a megacore runs.
        cores: how many run at the same time and share the HBM bandwidth.
        cycle_limit: give up after so many cycles.
        block_limit: give up after so many blocks.
    """
    return _Machine(program, generation, operands or {}, assume, core, cores).run(cycle_limit, block_limit)


_ASSUMED = {Assume.NOTHING: None, Assume.ZERO: 0, Assume.ONE: scalar.float_word(1.0)}


class _Machine:
    """The state of one run, and the instructions translated into closures on it."""

    def __init__(
        self,
        program: Program,
        generation: Generation,
        operands: Mapping[int, Sequence[int]],
        assume: Assume,
        core: int,
        cores: int,
    ) -> None:
        self.program, self.operands, self.assume, self.core = program, operands, assume, core
        self.dma = DmaEngine(generation, cores)
        self.words = Words()
        self.registers: dict[str, Word] = {}
        self.memory: dict[int, Word] = {}
        self.operand_at: dict[int, int] = {}
        self.unmodelled: collections.Counter[str] = collections.Counter()
        self.assumed: collections.Counter[int] = collections.Counter()
        self.skipped: collections.Counter[tuple[int, str]] = collections.Counter()
        self.cycle = 0
        self.phi_registers = {
            _register(instruction.result)
            for bundle in program.schedule.bundles
            for instruction in bundle.instructions
            if instruction.opcode == "sphi" and instruction.result
        }
        self.code = {block.first: self._translate(block) for block in program.blocks}

    def run(self, cycle_limit: int, block_limit: int) -> Run:
        blocks = {block.first: block for block in self.program.blocks}
        end = len(self.program.schedule.bundles)
        visits: collections.Counter[int] = collections.Counter()
        issued, steps, pc, stopped = 0, 0, 0, None
        while pc < end:
            block = blocks[pc]
            visits[pc] += 1
            self.cycle = issued
            for step in self.code[pc]:
                step()
            issued += block.bundles
            steps += 1
            if issued > cycle_limit or steps > block_limit:
                stopped = f"not finished after {issued} cycles and {steps} blocks"
                break
            try:
                taken = block.branch is not None and self._taken(block.branch)
            except UnknownBranchError as error:
                stopped = str(error)
                break
            pc = block.branch.target if taken and block.branch else block.last + 1
        return Run(
            visits=visits,
            issue_cycles=None if stopped else issued,
            dma=self.dma,
            skipped=self.skipped,
            assumed=self.assumed,
            stopped=stopped,
            unmodelled=self.unmodelled,
        )

    def _taken(self, branch: Branch) -> bool:
        if branch.predicate is None:
            return True
        value = self.words.values[self.words.slot(branch.predicate)]
        if value is not None:
            return bool(value) != branch.negated
        reason = explain(self.program, branch.predicate)
        kind = "loop" if branch.backward else "branch"
        message = f"the {kind} at {branch.pc:#x} depends on a value that is not known here: {reason}"
        raise UnknownBranchError(message)

    def _translate(self, block: Block) -> list[Callable[[], None]]:
        steps = []
        for bundle in self.program.bundles(block):
            # A bundle reads its registers before it writes them, so the phis go first.
            for instruction in sorted(bundle.instructions, key=lambda each: each.opcode != "sphi"):
                step = self._step(instruction, bundle.pc - block.first, bundle.pc)
                if step:
                    steps.append(step)
        return steps

    def _step(self, instruction: Instruction, offset: int, pc: int) -> Callable[[], None] | None:
        opcode, step = instruction.opcode, None
        if opcode == "sphi":
            step = self._phi(instruction)
        elif opcode == "sst":
            step = self._store(instruction)
        elif opcode.startswith("dma.done.wait"):
            step = self._wait(instruction, offset, pc)
        elif opcode.startswith("dma."):
            step = self._copy(instruction, offset)
        elif instruction.result and _SCALAR_RESULT.fullmatch(instruction.result):
            step = self._assign(instruction, pc)
        elif instruction.predicate and opcode.startswith("v"):
            step = self._predicated(instruction, pc)
        return step

    def _predicated(self, instruction: Instruction, pc: int) -> Callable[[], None]:
        """Count the times that a vector instruction is issued in vain."""
        happens, key, skipped = self._happens(instruction), (pc, instruction.opcode), self.skipped

        def count() -> None:
            if not happens():
                skipped[key] += 1

        return count

    def _phi(self, instruction: Instruction) -> Callable[[], None]:
        words, registers = self.words.values, self.registers
        slot, register = self.words.slot(instruction.result or ""), _register(instruction.result)

        def phi() -> None:
            words[slot] = registers.get(register)

        return phi

    def _assign(self, instruction: Instruction, pc: int) -> Callable[[], None]:
        words, registers = self.words.values, self.registers
        slot, register = self.words.slot(instruction.result or ""), _register(instruction.result)
        value = self._guarded(instruction, self._value(instruction, pc), lambda: words[slot])
        if register not in self.phi_registers:

            def assign() -> None:
                words[slot] = value()

            return assign

        written = self._written(instruction)

        def assign_register() -> None:
            word = words[slot] = value()
            if written():
                registers[register] = word

        return assign_register

    def _written(self, instruction: Instruction) -> Callable[[], bool]:
        """Whether the register is written at all: not by an instruction whose predicate is known to fail."""
        if instruction.predicate is None or instruction.otherwise is not None:
            return lambda: True
        words, guard, holds = self.words.values, self.words.slot(instruction.predicate), int(not instruction.negated)
        return lambda: words[guard] is None or words[guard] == holds

    def _guarded(
        self, instruction: Instruction, value: Callable[[], Word], kept: Callable[[], Word]
    ) -> Callable[[], Word]:
        """The value under the instruction's predicate: the alternative, or what was there, where it fails."""
        if instruction.predicate is None:
            return value
        words, guard, negated = self.words.values, self.words.slot(instruction.predicate), instruction.negated
        if instruction.otherwise is not None:
            other = self.words.slot(instruction.otherwise)
            kept = lambda: words[other]  # noqa: E731 - a closure like the one it replaces

        def guarded() -> Word:
            predicate = words[guard]
            return scalar.select(scalar.predicate_not(predicate) if negated else predicate, value(), kept())

        return guarded

    def _value(self, instruction: Instruction, pc: int) -> Callable[[], Word]:
        """What an instruction computes, predicate apart."""
        match instruction.opcode.split(".")[0]:
            case "spop":
                value = self._from_vector(pc)
            case "sld":
                value = self._load(instruction)
            case "inlined_call_operand":
                word = self._call_operand(instruction)
                value = lambda: word  # noqa: E731  one of several values
            case "int_to_ptr":
                value = self.words.reader(instruction.operands.split()[-1])
            case "scalar_lea":
                value = self._address(instruction)
            case "scalar_select":
                value = self._selected(instruction)
            case _:
                value = self._arithmetic(instruction.opcode, _split(instruction.operands))
        return value

    def _address(self, instruction: Instruction) -> Callable[[], Word]:
        parts = [self.words.reader(operand) for operand in _split(instruction.operands)]

        def address() -> Word:
            values = [part() for part in parts]
            return scalar.total(values)

        return address

    def _selected(self, instruction: Instruction) -> Callable[[], Word]:
        words = self.words.values
        choice, first, second = (self.words.operand(instruction.named[key]) for key in _SELECT)
        return lambda: scalar.select(words[choice], words[first], words[second])

    def _from_vector(self, pc: int) -> Callable[[], Word]:
        """A value that the vector unit hands over."""
        word, assumed = _ASSUMED[self.assume], self.assumed
        if word is None:
            return lambda: None

        def value() -> Word:
            assumed[pc] += 1
            return word

        return value

    def _arithmetic(self, opcode: str, operands: list[str]) -> Callable[[], Word]:
        words = self.words.values
        if len(operands) == 1 and (meaning := scalar.unary(opcode)):
            read = self.words.reader(operands[0])
            return lambda: meaning(read())
        if len(operands) == 2 and (both := scalar.binary(opcode)):
            a, b = (self.words.operand(operand) for operand in operands)
            return lambda: both(words[a], words[b])
        self.unmodelled[opcode] += 1
        return lambda: None

    def _load(self, instruction: Instruction) -> Callable[[], Word]:
        memory = self.memory
        match = _SMEM.match(instruction.operands)
        if match is None:
            return lambda: None
        if "core id" in instruction.comment:
            core = self.core
            return lambda: core
        address = self.words.reader(match.group(1))

        def load() -> Word:
            place = address()
            return None if place is None else memory.get(place)

        return load

    def _store(self, instruction: Instruction) -> Callable[[], None] | None:
        match = _SMEM.match(instruction.operands)
        if match is None:
            return None
        memory, words = self.memory, self.words.values
        place, slot = self.words.reader(match.group(1)), self.words.operand(match.group(2))
        value = self._guarded(instruction, lambda: words[slot], lambda: memory.get(place() or 0))

        def store() -> None:
            where = place()
            if where is not None:
                memory[where] = value()

        return store

    def _wait(self, instruction: Instruction, offset: int, pc: int) -> Callable[[], None]:
        operands = _split(instruction.operands)
        flag = self.words.reader(operands[0])
        granules = self.words.reader(operands[1]) if len(operands) > 1 else lambda: None
        happens = self._happens(instruction)

        def wait() -> None:
            if happens():
                self.dma.wait(self.cycle + offset + self.dma.stall_cycles, flag(), granules(), pc)

        return wait

    def _copy(self, instruction: Instruction, offset: int) -> Callable[[], None]:
        named, kind = instruction.named, instruction.opcode.removeprefix("dma.").split(".")[0]
        granules = self.words.reader(named.get("size_in_granules", ""))
        flag = self.words.reader(named.get("dst_syncflagno", ""))
        steps = self.words.reader(named.get("steps_per_stride", ""))
        stride = self.words.reader(named.get("src_stride" if kind.startswith("hbm") else "dst_stride", ""))
        source = self.words.reader(named.get("hbm" if kind.startswith("hbm") else "vmem", ""))
        target = self.words.reader(named.get("smem", ""))
        happens = self._happens(instruction)

        def copy() -> None:
            if happens():
                now = self.cycle + offset + self.dma.stall_cycles
                self.dma.start(now, kind, granules(), flag(), steps(), stride())
                if kind.endswith("to_smem"):
                    self._fill(source(), target())

        return copy

    def _happens(self, instruction: Instruction) -> Callable[[], bool]:
        """Whether a predicated effect takes place; one that is unknown is taken to."""
        if instruction.predicate is None:
            return lambda: True
        words, guard, negated = self.words.values, self.words.slot(instruction.predicate), instruction.negated
        return lambda: words[guard] is None or bool(words[guard]) != negated

    def _fill(self, source: Word, target: Word) -> None:
        """A scalar operand arrives in SMEM."""
        index = self.operand_at.get(source) if source is not None else None
        if index is None or target is None:
            return
        for place, word in enumerate(self.operands.get(index, ())):
            self.memory[target + place] = word

    def _call_operand(self, instruction: Instruction) -> Word:
        """Address of an operand in HBM or VMEM; the value itself if it is passed in a register."""
        match = _OPERAND_INDEX.search(instruction.operands)
        if match is None:
            return None
        index = int(match.group(1))
        if not instruction.opcode.endswith((".hbm", ".vmem", ".smem")):
            values = self.operands.get(index)
            return values[0] if values else None
        # Odd multiples, so that no two operands share an address after a pointer is shifted to granules.
        address = FIRST_OPERAND_ADDRESS + (2 * index + 1) * OPERAND_SPACING
        for shift in range(_POINTER_SHIFTS):
            self.operand_at[scalar.signed(address << shift)] = index
        if instruction.opcode.endswith(".smem"):
            self._fill(address, address)
        return address


_SELECT = ("predicate", "on_true", "on_false")


def _register(name: str | None) -> str:
    """The physical register in a value's name: `s12_s3` is in s3."""
    return (name or "").rpartition("_")[2]


def _split(text: str) -> list[str]:
    """Operands of an instruction."""
    return [part.strip() for part in text.split(",") if part.strip()]
