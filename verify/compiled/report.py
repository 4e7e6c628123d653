"""The figures of a compiled program: what its kernels' schedules say, and what XLA put around them.

Every time here is *modelled*: read off the compiler's schedule, never measured.  A figure that cannot be inferred is
None, and `reasons` says why.
"""

from __future__ import annotations

import collections
import dataclasses
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from verify.compiled import smem
from verify.compiled.dma import LATENCY_SECONDS
from verify.compiled.dump import parse_schedule, read_text
from verify.compiled.hlo import Module, Operation, Role, parse_module
from verify.compiled.machine import execute
from verify.compiled.products import WrittenProduct, fp32_passes, written_products
from verify.compiled.program import Program, analyse
from verify.compiled.run import Assume, Run
from verify.compiled.work import Work, work_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verify.compiled.compile import Artifact
    from verify.compiled.generations import Generation

HOT_BLOCKS = 8


@dataclasses.dataclass(frozen=True)
class HotBlock:
    """A basic block, with what it issues in one visit.

    Attributes:
        first: address of its first bundle.
        last: address of its last bundle.
        visits: how often it was executed.
        share: of the issue cycles of the kernel, 0 to 1.
        work: of one visit.
    """

    first: int
    last: int
    visits: int
    share: float
    work: Work


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One kernel.

    Attributes:
        name: of the HLO operation.
        bundles: static size of the schedule.
        static: what the schedule contains, each bundle once.
        executed: what one call issues; None if the run stopped.
        issue_cycles: cycles of one call without DMA waits; of the slower core of a megacore.
        stall_cycles: cycles that DMA waits add in the model of `verify.compiled.dma`.
        stalls: the same by address of the wait, longest first.
        seconds: modelled time of both.
        issue_seconds: modelled time without DMA waits.
        dma_bytes: by kind of copy.
        dma_copies: by kind of copy.
        smallest_piece_bytes: of the smallest contiguous piece of a strided copy.
        vmem_bytes: scoped VMEM, from the HLO.
        loops: static loops as (first, last) addresses.
        hot: the blocks with most cycles.
        assumed: how often a value from the vector unit was assumed, by address of the instruction that brings it.
        written: its products as they were written; empty if the trace was not recorded.
        fp32_passes: `vmatmul` instructions for each one that a single pass would take, over the FP32 products: 1 at
            default precision, 3 at HIGH, 6 at HIGHEST.
        reasons: why figures are None, by figure.
        notes: what to know before leaning on the figures.
    """

    name: str
    bundles: int
    static: Work
    executed: Work | None
    issue_cycles: int | None
    stall_cycles: float | None
    stalls: Mapping[int, float]
    seconds: float | None
    issue_seconds: float | None
    dma_bytes: Mapping[str, int]
    dma_copies: Mapping[str, int]
    smallest_piece_bytes: int | None
    vmem_bytes: int | None
    loops: tuple[tuple[int, int], ...]
    hot: tuple[HotBlock, ...]
    assumed: Mapping[int, int]
    written: tuple[WrittenProduct, ...]
    fp32_passes: float | None
    reasons: Mapping[str, str]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class AroundReport:
    """One operation that XLA put around the kernels.

    Attributes:
        name: of the HLO operation.
        opcode: HLO's.
        role: move, prefetch or compute.
        result: its array.
        bytes: what it reads and writes.
        seconds: modelled time from its own schedule; for a prefetch, its bytes over the nominal bandwidth.
        op_name: where in the traced function it comes from.
        reason: why `seconds` is None.
    """

    name: str
    opcode: str
    role: str
    result: str
    bytes: int
    seconds: float | None
    op_name: str
    reason: str | None


@dataclasses.dataclass(frozen=True)
class Report:
    """A compiled program.

    Attributes:
        target: what was compiled.
        generation: for which TPU.
        versions: of python, jax, jaxlib, libtpu.
        kernels: its Pallas kernels.
        around: the operations around them, free ones left out.
        code_bytes: machine code of the whole program.
        temporary_bytes: HBM that XLA allocates for intermediate results.
        compile_seconds: what compiling took.
        flops: useful FLOP of one call, as the caller counts them.
        seconds: modelled time of the program: kernels and operations around them, prefetches apart.
        share_of_peak: `flops` over `seconds` and the BF16 peak of the device.
        reasons: why figures are None.
    """

    target: str
    generation: str
    versions: Mapping[str, str | None]
    kernels: tuple[KernelReport, ...]
    around: tuple[AroundReport, ...]
    code_bytes: int | None
    temporary_bytes: int | None
    compile_seconds: float
    flops: float | None
    seconds: float | None
    share_of_peak: float | None
    reasons: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return _plain(self)


def analyse_artifact(
    artifact: Artifact,
    *,
    flops: float | None = None,
    assume: Assume = Assume.NOTHING,
    operands: Mapping[int, list[int]] | None = None,
) -> Report:
    """Read everything a compilation says.

    Args:
        artifact: the compilation.
        flops: useful FLOP of one call, for the share of peak.
        assume: what to take for values that come from the vector unit.
        operands: SMEM words of scalar operands by operand index, over those that the trace knows.
    """
    generation = artifact.job.device
    module = parse_module(artifact.hlo())
    kernels = tuple(
        kernel_report(
            load_program(artifact, operation.name),
            generation,
            scalar_operands(artifact, module, operation) | dict(operands or {}),
            assume=assume,
            vmem_bytes=operation.scoped_vmem_bytes,
            traced=traced_kernel(artifact, module, operation),
        )
        for operation in module.kernels
    )
    around = tuple(
        _around(artifact, module, operation)
        for operation in module.entry
        if module.role(operation) not in {Role.KERNEL, Role.FREE}
    )
    reasons = {}
    times = [kernel.seconds for kernel in kernels] + [each.seconds for each in around if each.role != "prefetch"]
    seconds = None if None in times else sum(time for time in times if time is not None)
    if seconds is None:
        reasons["seconds"] = "; ".join(
            [f"{kernel.name}: {kernel.reasons['executed']}" for kernel in kernels if kernel.seconds is None]
            + [f"{each.name}: {each.reason}" for each in around if each.seconds is None and each.role != "prefetch"]
        )
    if flops is None:
        reasons["share_of_peak"] = "the useful FLOP of a call were not given"
    elif seconds is None:
        reasons["share_of_peak"] = "no modelled time"
    memory = artifact.meta["memory"] or {}
    return Report(
        target=artifact.job.target.reference,
        generation=generation.name,
        versions=artifact.versions,
        kernels=kernels,
        around=around,
        code_bytes=memory.get("generated_code_size"),
        temporary_bytes=memory.get("temp_size"),
        compile_seconds=artifact.meta["compile_seconds"],
        flops=flops,
        seconds=seconds,
        share_of_peak=flops / seconds / generation.peak_flops if flops and seconds else None,
        reasons=reasons,
    )


def load_program(artifact: Artifact, name: str) -> Program:
    """The program of one HLO operation."""
    name = artifact.same_schedule().get(name, name)
    bundles, utilization = artifact.operations()[name]
    table = read_text(utilization) if utilization else None
    return analyse(parse_schedule(name, read_text(bundles), table), artifact.job.device.delay_slots)


def traced_kernel(artifact: Artifact, module: Module, kernel: Operation) -> dict[str, Any] | None:
    """What the trace recorded about a kernel; None if several could be meant and they differ."""
    stem = kernel.name.split(".")[0]
    traced = [each for each in artifact.meta["kernels"] if each["name"].replace(" ", "_") == stem]
    alike = [each for each in module.kernels if each.name.split(".")[0] == stem]
    if len(traced) == len(alike):
        return traced[alike.index(kernel)]
    return traced[0] if len({str(each) for each in traced}) == 1 else None


def scalar_operands(artifact: Artifact, module: Module, kernel: Operation) -> dict[int, list[int]]:
    """SMEM words of a kernel's integer operands, where the trace knew their values."""
    record = traced_kernel(artifact, module, kernel)
    found = {}
    for index, operand in (record["operands"] if record else {}).items():
        source = module.operand(kernel, int(index))
        if operand["value"] is not None and source is not None and source.results:
            try:
                found[int(index)] = smem.words(operand["value"], source.results[0])
            except smem.LayoutError:
                continue
    return found


def kernel_report(
    program: Program,
    generation: Generation,
    operands: Mapping[int, list[int]] | None = None,
    *,
    assume: Assume = Assume.NOTHING,
    vmem_bytes: int | None = None,
    traced: Mapping[str, Any] | None = None,
) -> KernelReport:
    """Execute one kernel's scalar program and count.

    Args:
        program: the kernel.
        generation: which TPU it was compiled for.
        operands: SMEM words of scalar operands by operand index.
        assume: what to take for values that come from the vector unit.
        vmem_bytes: scoped VMEM, from the HLO.
        traced: what the trace recorded about the kernel.
    """
    runs = _runs(program, generation, operands or {}, assume)
    run = max(runs, key=lambda each: (each.issue_cycles is None, each.cycles or 0.0))
    reasons, notes = {}, _notes(runs, generation)
    if run.stopped:
        reasons["executed"] = run.stopped
    if program.schedule.utilization is None:
        reasons["occupancy"] = "the compiler wrote no utilization table"
    if vmem_bytes is None:
        reasons["vmem_bytes"] = "the HLO records no scoped VMEM for the kernel"
    executed = None if run.stopped else work_of(program, run.visits, run.skipped)
    static = work_of(program, {block.first: 1 for block in program.blocks})
    written = traced["products"] if traced else []
    passes = fp32_passes(static, written, generation)
    if isinstance(passes, str):
        reasons["fp32_passes"] = passes
    cycles = run.cycles
    return KernelReport(
        name=program.schedule.name,
        bundles=len(program.schedule.bundles),
        static=static,
        executed=executed,
        issue_cycles=run.issue_cycles,
        stall_cycles=None if run.stopped else run.dma.stall_cycles,
        stalls=dict(sorted(run.dma.stalls.items(), key=lambda each: -each[1])),
        seconds=None if cycles is None else generation.seconds(cycles),
        issue_seconds=None if run.issue_cycles is None else generation.seconds(run.issue_cycles),
        dma_bytes=dict(sum((each.dma.bytes_moved for each in runs), collections.Counter())),
        dma_copies=dict(sum((each.dma.copies for each in runs), collections.Counter())),
        smallest_piece_bytes=run.dma.smallest_piece,
        vmem_bytes=vmem_bytes,
        loops=tuple((loop.first, loop.last) for loop in program.loops),
        hot=_hot(program, run),
        assumed=dict(run.assumed),
        written=written_products(written),
        fp32_passes=None if isinstance(passes, str) else passes,
        reasons=reasons,
        notes=notes,
    )


def _runs(program: Program, generation: Generation, operands: Mapping[int, list[int]], assume: Assume) -> list[Run]:
    """One run for each core; only cores that copy something share the bandwidth."""

    def on(core: int, sharing: int) -> Run:
        return execute(program, generation, operands, assume=assume, core=core, cores=sharing)

    runs = [on(core, generation.cores) for core in range(generation.cores)]
    busy = sum(bool(run.dma.bytes_moved) for run in runs)
    if 0 < busy < generation.cores:
        runs = [on(core, busy) for core in range(generation.cores)]
    return runs


def _notes(runs: list[Run], generation: Generation) -> tuple[str, ...]:
    notes = []
    assumed = sum(sum(run.assumed.values()) for run in runs)
    if assumed:
        notes.append(f"{assumed} values from the vector unit were assumed, not known")
    for run in runs:
        if run.dma.unknown_sizes:
            notes.append(f"{run.dma.unknown_sizes} copies have a size that is not known here; they move nothing")
        if run.dma.unmatched_waits:
            notes.append(f"{run.dma.unmatched_waits} waits have no copy to wait for in the model")
        if run.unmodelled:
            notes.append(f"not modelled, results unknown: {dict(run.unmodelled)}")
    cores = sum(bool(run.dma.bytes_moved) for run in runs)
    if generation.cores > 1 and cores == 1:
        notes.append(f"one of the {generation.cores} cores does all the work: no grid dimension is parallel")
    return tuple(dict.fromkeys(notes))


def _hot(program: Program, run: Run) -> tuple[HotBlock, ...]:
    total = sum(run.visits.get(block.first, 0) * block.bundles for block in program.blocks)
    ranked = sorted(program.blocks, key=lambda block: -run.visits.get(block.first, 0) * block.bundles)
    return tuple(
        HotBlock(
            first=block.first,
            last=block.last,
            visits=run.visits[block.first],
            share=run.visits[block.first] * block.bundles / total,
            work=work_of(program, {block.first: 1}),
        )
        for block in ranked[:HOT_BLOCKS]
        if run.visits.get(block.first)
    )


def _around(artifact: Artifact, module: Module, operation: Operation) -> AroundReport:
    generation, role = artifact.job.device, module.role(operation)
    moved = sum(array.bytes for array in operation.results[:1])
    read = sum(array.bytes for array in module.inputs(operation))
    seconds, reason = None, None
    if role is Role.PREFETCH:
        seconds = moved / generation.hbm_bytes_per_second + LATENCY_SECONDS
    else:
        name = artifact.same_schedule().get(operation.name, operation.name)
        if name in artifact.operations():
            runs = _runs(load_program(artifact, name), generation, {}, Assume.NOTHING)
            stopped = next((run.stopped for run in runs if run.stopped), None)
            if stopped is None:
                seconds = generation.seconds(max(run.cycles or 0.0 for run in runs))
            reason = stopped
        else:
            reason = "the compiler dumped no schedule for it"
    return AroundReport(
        name=operation.name,
        opcode=operation.opcode,
        role=role.value,
        result=str(operation.results[0]) if operation.results else "",
        bytes=moved + read,
        seconds=seconds,
        op_name=operation.op_name,
        reason=reason,
    )


def _plain(value: Any) -> Any:  # noqa: ANN401  any field of a report
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (dict, MappingProxyType)):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
