"""The project's kernel, compiled for every generation, against its committed budgets; and faults planted in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from verify.compiled import checks
from verify.compiled.compile import Artifact, Job, RefusedError, compile_job
from verify.compiled.generations import GENERATIONS
from verify.compiled.target import Target
from verify.tests.compiled.conftest import SMOKE_CASES

if TYPE_CHECKING:
    from verify.compiled.checks import Checked

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("compiler")]
MUTANTS = Path(__file__).with_name("mutants.py")

KNOWN = {
    "d128-causal-all-outputs": "LSE, maxima and diagnostics leave the kernel as [.., 1, tokens], and are copied",
    "d64-rotary-interleaved": "tables of half the width are spread over pairs of lanes, once for all heads",
}
"""Cases around which XLA moves something, never q, k, v or the output, with the reason; the test fails when one of them
no longer does."""


def parameters() -> list[object]:
    """Every case on every generation; the smoke subset is the main case on each and head_dim 256 on v6e."""
    marked = []
    for case in checks.PUBLIC:
        for name in GENERATIONS:
            smoke = [pytest.mark.smoke] if (case, name) in SMOKE_CASES else []
            marked.append(pytest.param(case, name, marks=smoke))
    return marked


def compiled_case(case: str, name: str) -> Checked:
    """A public configuration with its budget."""
    return checks.checked(compile_job(checks.job(case, name)), checks.load_budgets().get((case, name)))


@pytest.mark.parametrize(("case", "name"), parameters())
def test_public_configurations(case: str, name: str) -> None:
    """It compiles, has no FP32 product at default precision, and keeps its budgets of pushes, spills, VMEM and cycles.

    XLA moves no activation around it, but for the known cases, which do so still.
    """
    one = compiled_case(case, name)
    found = checks.findings(one)
    moved = [str(each) for each in found if each.check == "moved-activations"]
    assert [str(each) for each in found if each.check != "moved-activations"] == []
    assert bool(moved) == (case in KNOWN), moved or f"{case} is no longer moved: {KNOWN.get(case)}"


def mutant(name: str) -> Artifact:
    """A compiled mutant."""
    return compile_job(
        Job(Target(f"{MUTANTS}:{name}", factory=True, path=(str(Path(checks.__file__).parents[2]),)), "v6e")
    )


@pytest.mark.parametrize("name", ["fp32_values", "fp32_scores"])
def test_fp32_products_are_caught(name: str) -> None:
    """A product that became FP32 computes the same bits in interpret mode; here its line is named."""
    found = checks.fp32_products(checks.checked(mutant(name), None))
    assert found
    assert "float32 x float32 products at default precision" in str(found[0])
    assert ("mutants.py" if name == "fp32_values" else "tile.py") in str(found[0])


def test_unproven_alignment_is_caught() -> None:
    """A DMA whose start nobody promised to be aligned is refused by the compiler, with the kernel's line."""
    with pytest.raises(RefusedError, match=r"(?s)Failed to verify that the index .* is divisible.*replay\.py:\d+"):
        mutant("unproven_alignment")


def test_transposed_weights_are_caught() -> None:
    """Weights pushed transposed break the budget of transposed pushes, which the sound kernel keeps."""
    sound = checks.checked(mutant("sound"), None)
    budget = checks.renewed(sound)
    found = checks.transposed_pushes(checks.checked(mutant("transposed_weights"), budget))
    assert [each.check for each in found] == ["transposed-pushes"]


def test_a_callers_layout_is_caught() -> None:
    """Transposes that a tokens-first caller costs are found around the kernel; the sound one has none."""
    assert checks.moved_activations(checks.checked(mutant("sound"), None)) == []
    found = checks.moved_activations(checks.checked(mutant("tokens_first"), None))
    assert len(found) >= 2, "at least the query's and the output's"
