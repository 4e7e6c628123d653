"""Schedules of small kernels, compiled here, against what can be worked out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from verify.compiled.compile import RefusedError
from verify.compiled.generations import GENERATIONS
from verify.compiled.hlo import parse_module
from verify.compiled.machine import execute
from verify.compiled.report import analyse_artifact, load_program, scalar_operands
from verify.compiled.run import Assume
from verify.tests.compiled.kernels import LENGTHS, table_turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.compiled.compile import Artifact
    from verify.compiled.report import KernelReport

pytestmark = pytest.mark.aot
KIB = 1024


def kernel(artifact: Artifact, assume: Assume = Assume.NOTHING) -> KernelReport:
    """The report of a program of one kernel."""
    return analyse_artifact(artifact, assume=assume).kernels[0]


@pytest.mark.smoke
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_dense_product(compiled: Callable[..., Artifact], generation: str) -> None:
    """512 x 1024 x 1024 takes 2 * 512 * 1024 * 1024 FLOP over the peak, and at most a fifth more: fill and drain.

    `vmatmul`s: 32 of 16 rows for each tile of the stationary operand, 4 x 4 tiles of 256 or 8 x 8 of 128.
    """
    chip = GENERATIONS[generation]
    found = kernel(compiled("product", generation))
    assert found.executed is not None
    tiles = (1024 // chip.mxu_size) ** 2
    assert found.executed.products == {"bf16": 32 * tiles}
    ideal = 2 * 512 * 1024 * 1024 / chip.flop_per_cycle
    assert ideal <= found.executed.cycles <= 1.2 * ideal
    assert found.executed.occupancy is not None
    assert found.executed.occupancy["mxu"] == pytest.approx(ideal / found.executed.cycles, rel=0.01)


@pytest.mark.smoke
def test_a_chain_of_dependent_products(compiled: Callable[..., Artifact]) -> None:
    """Eight dependent products of 64 x 64 wait for each other's result: 190 to 240 cycles each, not 4 of issue.

    The waits stand in the dump as empty bundles; a reader of a later dump, where they are gone, would see 290.
    """
    found = kernel(compiled("chain"))
    assert found.executed is not None
    assert 8 * 190 <= found.executed.cycles <= 8 * 240
    single = kernel(compiled("chain", length=1))
    assert single.executed is not None
    each = (found.executed.cycles - single.executed.cycles) / 7
    assert 190 <= each <= 240


@pytest.mark.smoke
@pytest.mark.parametrize("generation", GENERATIONS)
def test_grid_steps(compiled: Callable[..., Artifact], generation: str) -> None:
    """A grid of 4 does 4 blocks' work and moves each array once; both cores of a megacore share it only if told to."""
    chip = GENERATIONS[generation]
    found = kernel(compiled("steps", generation))
    assert found.executed is not None
    assert found.executed.products == {"bf16": 4 * 32 * (256 // chip.mxu_size) ** 2}
    assert found.dma_bytes["vmem_to_hbm"] == 4 * 512 * 256 * 4
    if chip.cores == 2:
        assert any("one of the 2 cores" in note for note in found.notes)
        shared = kernel(compiled("steps", generation, parallel=True))
        assert shared.executed is not None
        assert shared.executed.products["bf16"] * 2 == found.executed.products["bf16"]
        assert shared.dma_bytes["vmem_to_hbm"] == found.dma_bytes["vmem_to_hbm"]


@pytest.mark.smoke
def test_vmem_of_double_buffers(compiled: Callable[..., Artifact]) -> None:
    """Scoped VMEM of the grid is two buffers of each block that changes, one of the block that stays."""
    found = kernel(compiled("steps"))
    assert found.vmem_bytes == (2 * 512 * 256 * 2) + (256 * 256 * 2) + (2 * 512 * 256 * 4)


@pytest.mark.smoke
@pytest.mark.parametrize("generation", GENERATIONS)
def test_scalar_operands_decide(compiled: Callable[..., Artifact], generation: str) -> None:
    """Trip counts and conditions from a prefetched operand: the exponentials of the lengths over 3, no others."""
    found = kernel(compiled("lengths", generation))
    assert found.executed is not None
    assert found.executed.transcendentals == {"vexp2.f32": 8 * sum(length > 3 for length in LENGTHS)}


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize(
    ("dtype", "shape"), [("int8", [2, 40, 300]), ("int8", [600]), ("int16", [40, 300]), ("int32", [20, 300])]
)
def test_packed_tables(compiled: Callable[..., Artifact], generation: str, dtype: str, shape: list[int]) -> None:
    """Loops driven by a packed table turn as often as its elements say: SMEM layouts of 8, 16 and 32 bits are right."""
    artifact = compiled("table", generation, dtype=dtype, shape=shape)
    module = parse_module(artifact.hlo())
    (operation,) = module.kernels
    program = load_program(artifact, operation.name)
    result = execute(program, artifact.job.device, scalar_operands(artifact, module, operation))
    assert result.stopped is None
    assert sum(result.visits[loop.first] for loop in program.loops) == table_turns(tuple(shape))


@pytest.mark.smoke
def test_values_of_the_vector_unit_are_unknown(compiled: Callable[..., Artifact]) -> None:
    """A branch on a vector result has no answer here; taking it for 0 or 1 brackets the time."""
    artifact = compiled("data_dependent")
    unknown = kernel(artifact)
    assert unknown.executed is None
    assert "spop" in unknown.reasons["executed"]
    skip, enter = kernel(artifact, Assume.ZERO), kernel(artifact, Assume.ONE)
    assert skip.issue_cycles is not None
    assert enter.issue_cycles is not None
    assert skip.issue_cycles < enter.issue_cycles
    assert enter.executed is not None
    assert enter.executed.transcendentals == {"vexp2.f32": 8}
    assert any("were assumed, not known" in note for note in skip.notes)


@pytest.mark.smoke
def test_transcendentals_and_transposes(compiled: Callable[..., Artifact]) -> None:
    """128 x 128 FP32 elements are 16 registers: so many of each function, and one transpose of 16 pieces."""
    found = kernel(compiled("transcendentals"))
    assert found.executed is not None
    assert found.executed.transcendentals == {"vexp2.f32": 16, "vrsqrt.f32": 16, "vtanh.f32": 16}
    assert found.executed.transposes == 16


@pytest.mark.smoke
@pytest.mark.parametrize(("precision", "passes"), [("DEFAULT", 1), ("HIGH", 3), ("HIGHEST", 6)])
def test_passes_of_fp32_products(compiled: Callable[..., Artifact], precision: str, passes: int) -> None:
    """An FP32 product takes 1, 3 or 6 passes of the matrix unit, as its precision says."""
    found = kernel(compiled("precision", name=precision))
    assert found.fp32_passes == passes
    assert found.executed is not None
    assert found.executed.products == {"f32": passes * 256 // 8}
    (product,) = found.written
    assert (product.precision, product.lhs) == (precision, "float32")
    assert "kernels.py" in product.sources[0]


@pytest.mark.smoke
def test_moves_around_a_kernel(compiled: Callable[..., Artifact]) -> None:
    """Transposes and converts that the caller's layout costs are found, with bytes and modelled time."""
    found = analyse_artifact(compiled("relayout"))
    moves = [each for each in found.around if each.role == "move"]
    assert len(moves) == 2
    for move in moves:
        assert move.bytes >= 2 * 4 * 1024 * 128
        assert move.seconds is not None
        assert move.seconds > 0
    assert found.seconds is not None
    assert found.seconds > sum(move.seconds or 0 for move in moves)


@pytest.mark.smoke
def test_the_compilers_refusal_names_the_line(compiled: Callable[..., Artifact]) -> None:
    """An unproven alignment, which interpret mode runs, is refused with the compiler's words and the kernel's line."""
    with pytest.raises(RefusedError, match=r"(?s)divisible by the tile dimension 8.*kernels\.py:\d+: copy\.start\(\)"):
        compiled("unaligned")
    with pytest.raises(
        RefusedError, match=r"(?s)trace failed with RuntimeError: the kernel's own complaint.*kernels\.py"
    ):
        compiled("broken")
    with pytest.raises(RefusedError, match=r"lower failed with NotImplementedError: .*cumsum"):
        compiled("broken", where="lower")
