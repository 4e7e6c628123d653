"""The checks themselves, on reports made up for them."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from verify.compiled import checks
from verify.compiled.cases import AttentionCase
from verify.compiled.checks import Budget, Checked
from verify.compiled.generations import GENERATIONS
from verify.compiled.products import WrittenProduct

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from verify.compiled.compile import Artifact

NAME = "transposed-v6e-0.0.50.1"


@pytest.fixture
def one(kept: Callable[[str], Artifact]) -> Checked:
    """A kept dump: one BF16 product with 32 transposed pushes, in 421 issued cycles."""
    return checks.checked(kept(NAME), None)


def with_kernel(one: Checked, **changes: object) -> Checked:
    """The same with its kernel's report changed."""
    (kernel,) = one.report.kernels
    report = dataclasses.replace(one.report, kernels=(dataclasses.replace(kernel, **changes),))
    return dataclasses.replace(one, report=report)


def with_budget(one: Checked, **changes: object) -> Checked:
    """The same with a budget that it just keeps, changed."""
    return dataclasses.replace(one, budget=dataclasses.replace(checks.renewed(one), **changes))


def test_a_renewed_budget_is_kept(one: Checked) -> None:
    """What was just committed has no findings, and holds the figures of the report."""
    budget = checks.renewed(one)
    assert budget.transposed_pushes == 32
    assert budget.cycles == {"0.0.50.1": checks.kernel_cycles(one.report)}
    assert checks.findings(dataclasses.replace(one, budget=budget)) == []


def test_more_than_the_budget_is_found(one: Checked) -> None:
    """One push or spill over the budget, or cycles past the tolerance, is a finding with its figures."""
    found = checks.findings(with_budget(one, transposed_pushes=31))
    assert [str(each) for each in found] == ["transposed-pushes: 32 executed, the budget is 31"]
    assert [each.check for each in checks.findings(with_budget(one, spills=-1))] == ["spills"]
    total = checks.kernel_cycles(one.report)
    assert total is not None
    slower = with_budget(one, cycles={"0.0.50.1": round(total / 1.02)})
    assert [each.check for each in checks.findings(slower)] == ["cycles"]
    assert checks.findings(with_budget(one, cycles={"0.0.50.1": round(total / 1.005)})) == []


def test_another_compiler_has_no_baseline(one: Checked) -> None:
    """Cycles are compared within one libtpu: a new one makes a new baseline, and keeps the old."""
    other = with_budget(one, cycles={"0.0.49": 1})
    assert checks.cycles(other) == []
    assert set(checks.renewed(other).cycles) == {"0.0.49", "0.0.50.1"}


@pytest.mark.parametrize("precision", ["None", "DEFAULT"])
def test_written_fp32_products_are_found(one: Checked, precision: str) -> None:
    """An FP32 operand at default precision is a finding that names the line; at HIGHEST it is none."""
    product = WrittenProduct("bfloat16", "float32", precision, 2, ("kernel.py:7:3 (body)",))
    (found,) = checks.fp32_products(with_kernel(one, written=(product,)))
    assert "2 bfloat16 x float32 products at default precision, written at kernel.py:7:3" in str(found)
    careful = dataclasses.replace(product, precision="HIGHEST")
    assert checks.fp32_products(with_kernel(one, written=(careful,))) == []


def test_scheduled_fp32_products_are_found(one: Checked) -> None:
    """FP32 products that the compiler made of BF16 ones are found in the schedule."""
    (kernel,) = one.report.kernels
    static = dataclasses.replace(kernel.static, products={"bf16": 8, "f32": 4})
    (found,) = checks.fp32_products(with_kernel(one, static=static))
    assert "4 FP32 vmatmul in the schedule, none in the source" in str(found)


def test_vmem_beyond_the_core_is_found(one: Checked) -> None:
    """More scoped VMEM than the core has is a finding."""
    (found,) = checks.vmem(with_kernel(one, vmem_bytes=GENERATIONS["v6e"].vmem_bytes + 1))
    assert "a v6e core has 134217728" in str(found)


def test_a_stopped_run_is_no_pass(one: Checked) -> None:
    """A kernel whose run stopped cannot be counted, and a budget on it is a finding, not a pass."""
    stopped = with_kernel(one, executed=None, issue_cycles=None, stall_cycles=None, reasons={"executed": "why"})
    budget = checks.renewed(one)
    found = {each.check for each in checks.findings(dataclasses.replace(stopped, budget=budget))}
    assert found == {"transposed-pushes", "spills", "cycles"}
    with pytest.raises(ValueError, match="no baseline without a modelled time"):
        checks.renewed(stopped)


def test_budgets_are_read_as_written(tmp_path: Path) -> None:
    """Budgets survive the file, and a file of another format is refused."""
    path = tmp_path / "budgets.json"
    budgets = {("a", "v6e"): Budget(1, 2, {"1": 3}), ("a", "v5e"): Budget(4, 5, {})}
    checks.save_budgets(budgets, path)
    assert checks.load_budgets(path) == budgets
    path.write_text(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="not of format flywheel-budgets/1"):
        checks.load_budgets(path)


def test_every_case_has_a_committed_budget() -> None:
    """Each public configuration has a budget on each generation: none passes for want of a figure."""
    budgets = checks.load_budgets()
    assert set(budgets) == {(case, name) for case in checks.PUBLIC for name in GENERATIONS}
    assert all(budget.cycles for budget in budgets.values())


def test_flops_of_a_case() -> None:
    """Useful FLOP count the visible pairs of the bottom-right mask."""
    assert AttentionCase(64, 2, 3, heads=1).flops == 4 * 64 * (2 + 3)
    assert AttentionCase(64, 3, 2, heads=1).flops == 4 * 64 * (0 + 1 + 2)
    assert AttentionCase(64, 2, 3, causal=False, heads=5).flops == 4 * 64 * 5 * 6


def test_unknown_cases_are_refused() -> None:
    """A case that does not exist is refused with the list."""
    with pytest.raises(ValueError, match=r"case must be one of d64-causal, .* got 'd512'"):
        checks.job("d512", "v6e")
