"""What a compiled kernel of this project must be: checks on its schedule and on the HLO around it.

Interpret mode cannot see any of this.  A kernel that computes the right numbers there may still compile to FP32
products at default precision (which the matrix unit rounds to BF16), need a transpose of an activation in front of it,
spill, or be refused.

Each check returns findings, sentences with the figure and the rule; no finding is a pass.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verify.compiled.cases import CASES
from verify.compiled.cases_gdn import GDN_CASES
from verify.compiled.cases_ragged import RAGGED_CASES
from verify.compiled.compile import Job
from verify.compiled.generations import generation
from verify.compiled.hlo import parse_module
from verify.compiled.report import analyse_artifact
from verify.compiled.run import Assume
from verify.compiled.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.compiled.compile import Artifact
    from verify.compiled.report import KernelReport, Report

PUBLIC = {**CASES, **GDN_CASES, **RAGGED_CASES}
"""Every public configuration by name."""

FACTORIES = {
    **dict.fromkeys(CASES, "cases.py:attention"),
    **dict.fromkeys(GDN_CASES, "cases_gdn.py:gdn"),
    **dict.fromkeys(RAGGED_CASES, "cases_ragged.py:ragged"),
}
"""Where each one's factory stands, beside this file."""

BUDGETS_FILE = Path(__file__).with_name("data") / "budgets.json"
FORMAT = "flywheel-budgets/1"

CYCLE_TOLERANCE = 1.01
"""The scheduler is deterministic: the same compiler on the same source gives the same bundles.  One percent is what an
edit may cost before somebody has to say so by renewing the baseline."""

SAFE_PRECISIONS = ("HIGH", "HIGHEST", "DotAlgorithmPreset")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A check that failed.

    Attributes:
        check: its name.
        message: the figure and the rule.
    """

    check: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Budget:
    """What was committed for one case on one generation.

    Attributes:
        transposed_pushes: executed in one call, at most.
        spills: vector spill stores executed in one call, at most.
        cycles: modelled cycles of one call by libtpu version.
    """

    transposed_pushes: int
    spills: int
    cycles: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Checked:
    """A compiled case with what its checks need.

    Attributes:
        artifact: the compilation.
        report: its report, every run-time check taken to find nothing.
        budget: what was committed; None if nothing was.
    """

    artifact: Artifact
    report: Report
    budget: Budget | None

    @property
    def libtpu(self) -> str:
        """The compiler's version."""
        return str(self.artifact.versions["libtpu"])


def job(case: str, generation_name: str, python: str | None = None) -> Job:
    """The compilation of a public configuration."""
    if case not in PUBLIC:
        message = f"case must be one of {', '.join(PUBLIC)}, got {case!r}"
        raise ValueError(message)
    place = Path(__file__).with_name(FACTORIES[case])
    return Job(Target(str(place), options={"case": case}, factory=True), generation_name, python=python)


def checked(artifact: Artifact, budget: Budget | None, flops: float | None = None) -> Checked:
    """Read a compilation for the checks."""
    return Checked(artifact, analyse_artifact(artifact, assume=Assume.ZERO, flops=flops), budget)


def fp32_products(one: Checked) -> list[Finding]:
    """No FP32 product at default precision, neither as written nor as scheduled.

    On a TPU such a product is one pass with operands rounded to BF16, on a CPU it is exact: it must be written as the
    BF16 product that it is, or at a precision that says what it costs.
    """
    found = []
    for kernel in one.report.kernels:
        wide = [product for product in kernel.written if "float32" in {product.lhs, product.rhs}]
        for product in wide:
            if not product.precision.startswith(SAFE_PRECISIONS):
                what = f"{product.count} {product.lhs} x {product.rhs} products at default precision"
                lines = ", ".join(product.sources)
                found.append(Finding("fp32-products", f"{kernel.name}: {what}, written at {lines}"))
        if not wide and (count := kernel.static.products.get("f32", 0)):
            found.append(
                Finding("fp32-products", f"{kernel.name}: {count} FP32 vmatmul in the schedule, none in the source")
            )
    return found


def transposed_pushes(one: Checked) -> list[Finding]:
    """Transposed pushes stay within the committed number, those of the score product."""
    return _within(
        "transposed-pushes", one, one.budget and one.budget.transposed_pushes, lambda work: work.transposed_pushes
    )


def spills(one: Checked) -> list[Finding]:
    """Spilled registers stay within the committed number."""
    return _within("spills", one, one.budget and one.budget.spills, lambda work: work.spills)


def _within(check: str, one: Checked, limit: int | None, count: Callable[[Any], int | None]) -> list[Finding]:
    if limit is None:
        return []
    total = 0
    for kernel in one.report.kernels:
        if kernel.executed is None:
            return [Finding(check, f"{kernel.name}: cannot be counted, {kernel.reasons['executed']}")]
        total += count(kernel.executed) or 0
    return [Finding(check, f"{total} executed, the budget is {limit}")] if total > limit else []


def moved_activations(one: Checked) -> list[Finding]:
    """XLA puts no transpose, copy, retile or convert of an activation around the kernels."""
    module = parse_module(one.artifact.hlo())
    seconds = {each.name: each.seconds for each in one.report.around}
    return [
        Finding(
            "moved-activations",
            f"{operation.opcode} {operation.name} makes {operation.results[0]}"
            + (f", {time * 1e6:.1f} us modelled" if (time := seconds.get(operation.name)) else ""),
        )
        for operation in module.moved_activations()
    ]


def vmem(one: Checked) -> list[Finding]:
    """Scoped VMEM fits the core's."""
    limit = generation(one.report.generation).vmem_bytes
    return [
        Finding("vmem", f"{kernel.name}: {kernel.vmem_bytes} bytes, a {one.report.generation} core has {limit}")
        for kernel in one.report.kernels
        if kernel.vmem_bytes is not None and kernel.vmem_bytes > limit
    ]


def cycles(one: Checked) -> list[Finding]:
    """Modelled cycles do not pass the baseline of the same compiler; another compiler has no baseline yet."""
    baseline = one.budget.cycles.get(one.libtpu) if one.budget else None
    if baseline is None:
        return []
    total = kernel_cycles(one.report)
    if total is None:
        return [Finding("cycles", f"no modelled time: {one.report.reasons.get('seconds')}")]
    ratio = total / baseline
    if ratio <= CYCLE_TOLERANCE:
        return []
    message = f"{total} cycles are {ratio:.3f} of libtpu {one.libtpu}'s baseline {baseline}, at most {CYCLE_TOLERANCE}"
    return [Finding("cycles", message)]


CHECKS = (fp32_products, transposed_pushes, spills, moved_activations, vmem, cycles)


def findings(one: Checked) -> list[Finding]:
    """Everything that is wrong with a compiled case."""
    return [finding for check in CHECKS for finding in check(one)]


def kernel_cycles(report: Report) -> int | None:
    """Issue cycles and DMA waits of all kernels."""

    def total(kernel: KernelReport) -> float | None:
        if kernel.issue_cycles is None or kernel.stall_cycles is None:
            return None
        return kernel.issue_cycles + kernel.stall_cycles

    parts = [total(kernel) for kernel in report.kernels]
    return None if None in parts else round(sum(part for part in parts if part is not None))


def load_budgets(path: Path = BUDGETS_FILE) -> dict[tuple[str, str], Budget]:
    """Committed budgets by case and generation."""
    if not path.exists():
        return {}
    document = json.loads(path.read_text())
    if document.get("format") != FORMAT:
        message = f"{path} is not of format {FORMAT}: {document.get('format')!r}"
        raise ValueError(message)
    return {
        (case, name): Budget(**budget)
        for case, generations in document["cases"].items()
        for name, budget in generations.items()
    }


def renewed(one: Checked) -> Budget:
    """The budget that a compiled case keeps exactly, with the baselines of other compilers unchanged."""
    works = [kernel.executed for kernel in one.report.kernels]
    total = kernel_cycles(one.report)
    if None in works or total is None:
        message = f"no baseline without a modelled time: {one.report.reasons.get('seconds')}"
        raise ValueError(message)
    return Budget(
        transposed_pushes=sum(work.transposed_pushes for work in works if work),
        spills=sum(work.spills or 0 for work in works if work),
        cycles={**(one.budget.cycles if one.budget else {}), one.libtpu: total},
    )


def save_budgets(budgets: dict[tuple[str, str], Budget], path: Path = BUDGETS_FILE) -> None:
    """Write budgets, in a stable order."""
    cases: dict[str, dict[str, Any]] = {}
    for (case, name), budget in sorted(budgets.items()):
        cases.setdefault(case, {})[name] = dataclasses.asdict(budget)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, "cases": cases}, indent=1, sort_keys=True) + "\n")
