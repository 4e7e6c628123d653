"""Executing the scalar program."""

# ruff: noqa: E501  dumps have long lines

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from verify.compiled.dump import parse_schedule
from verify.compiled.generations import GENERATIONS
from verify.compiled.machine import execute
from verify.compiled.program import analyse
from verify.compiled.report import analyse_artifact, load_program
from verify.compiled.run import Assume, Run
from verify.tests.compiled.conftest import kept_dumps
from verify.tests.compiled.kernels import LENGTHS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from verify.compiled.compile import Artifact

V6E = GENERATIONS["v6e"]

# A loop of `count` turns, count being scalar operand 0, read from SMEM; each turn has 2 + 4 delay bundles.
LOOP = """\
     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: s32[1], index: 0, kind: input]  ;;  %s2_s1 = smov [#allocation3] }
   0x1   :  { %3 = dma.hbm_to_smem /*hbm=*/%s1_s0, /*size_in_granules=*/16, /*smem=*/%s2_s1, /*dst_syncflagno=*/[#allocation1] }
   0x2   :  { %4 = dma.done.wait [#allocation1], 16 }
   0x3   :  { %s5_s2 = sld [smem:[#allocation3]]  ;;  %s6_s3 = smov 0 }
   0x4 LB: > { %s7_s3 = sphi %s6_s3, %s8_s3  ;;  %s8_s3 = sadd.s32 1, %s7_s3 }
   0x5   : > { %p9_p0 = scmp.ge.s32.totalorder %s8_s3, %s5_s2  ;;  %10 = sbr.rel (!%p9_p0) target bundleno = 4 (0x4), region = 1 }
   0x6   : > {}
   0x7   : > {}
   0x8   : > {}
   0x9   :  {} /* End region 1 */
   0xa   :  { %11 = vsyncpa [#allocation1], 1 }
"""

# A branch over 4 bundles that a value of the vector unit decides.
GUARD = """\
     0   :  { %s1_s1 = spop %77 }
   0x1   :  { %p2_p0 = scmp.gt.s32.totalorder %s1_s1, 0 }
   0x2   :  { %3 = sbr.rel (!%p2_p0) target bundleno = 11 (0xb), region = 1 }
   0x3   :  {}
   0x4   :  {}
   0x5   :  {}
   0x6   :  {} /* End region 1 */
   0x7   :  { %v4_v0 = vexp2.f32 %v5_v1 }
   0x8   :  {}
   0x9   :  {}
   0xa   :  {}
   0xb   :  { %6 = vsyncpa [#allocation1], 1 }
"""


def run(text: str, operands: Mapping[int, Sequence[int]] | None = None, assume: Assume = Assume.NOTHING) -> Run:
    """Execute a schedule written down in a test."""
    return execute(analyse(parse_schedule("k", text, None), V6E.delay_slots), V6E, operands, assume=assume)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_trip_counts_come_from_scalar_operands(count: int) -> None:
    """A loop turns as often as the operand in SMEM says, and cycles are counted bundle by bundle."""
    result = run(LOOP, {0: [count]})
    assert result.stopped is None
    assert result.visits[4] == count
    assert result.issue_cycles == 4 + 6 * count + 1


def test_a_loop_on_an_unknown_value_stops_with_the_reason() -> None:
    """Without the operand's contents there is no number of cycles, and the message names the load."""
    result = run(LOOP)
    assert result.issue_cycles is None
    assert result.cycles is None
    assert "loop at 0x5" in (result.stopped or "")
    assert "sld [smem:[#allocation3]]" in (result.stopped or "")


def test_branches_on_values_of_the_vector_unit() -> None:
    """Such a branch stops the run unless a value is assumed, which is then reported."""
    stopped = run(GUARD)
    assert "branch at 0x2" in (stopped.stopped or "")
    assert "spop" in (stopped.stopped or "")
    zero, one = run(GUARD, assume=Assume.ZERO), run(GUARD, assume=Assume.ONE)
    assert (zero.issue_cycles, one.issue_cycles) == (8, 12)
    assert dict(zero.assumed) == dict(one.assumed) == {0: 1}


PREDICATES = """\
     0   :  { %s1_s0 = smov 5  ;;  %s2_s1 = smov 7  ;;  %p3_p0 = scmp.lt.s32.totalorder 1, 0  ;;  %p4_p1 = scmp.lt.f32.partialorder %s99_s9, 0.0 }
   0x1   :  { %s5_s2 = smov (%p3_p0, %s2_s1), %s1_s0  ;;  %s6_s3 = smov (!%p3_p0, %s2_s1), %s1_s0  ;;  %s7_s4 = smov (%p4_p1, %s2_s1), %s1_s0 }
   0x2   :  { %v9_v0 = vexp2.f32 (%p3_p0), %v8_v1  ;;  %p10_p2 = scmp.eq.s32.totalorder NAME, 5 }
   0x3   :  { %11 = sbr.rel (%p10_p2) target bundleno = 9 (0x9), region = 1 }
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   :  {} /* End region 1 */
   0x8   :  {}
   0x9   :  {}
"""


def test_predicated_instructions() -> None:
    """A failed predicate takes the alternative, a true one the value, an unknown one gives an unknown result."""
    assert run(PREDICATES.replace("NAME", "%s5_s2")).issue_cycles == 10
    assert run(PREDICATES.replace("NAME", "%s6_s3")).issue_cycles == 9
    assert "branch at 0x3" in (run(PREDICATES.replace("NAME", "%s7_s4")).stopped or "")


def test_instructions_issued_in_vain_are_counted() -> None:
    """A vector instruction whose predicate fails is not work."""
    assert dict(run(PREDICATES.replace("NAME", "%s5_s2")).skipped) == {(2, "vexp2.f32"): 1}


def test_dma_waits_add_cycles() -> None:
    """A copy of 1 MiB that is waited for at once costs its latency and its bytes over the nominal bandwidth."""
    granules = 2**20 // 32
    text = f"""\
     0   :  {{ %s1_s0 = inlined_call_operand.hbm [shape: bf16[1024,512], index: 0, kind: input] }}
   0x1   :  {{ %2 = dma.hbm_to_vmem /*hbm=*/%s1_s0, /*size_in_granules=*/{granules}, /*vmem=*/%s3_s1, /*dst_syncflagno=*/[#allocation4] }}
   0x2   :  {{ %3 = dma.done.wait [#allocation4], {granules} }}
   0x3   :  {{ %4 = dma.done.wait [#allocation5], 1 }}
"""
    result = run(text)
    assert result.issue_cycles == 4
    assert dict(result.dma.bytes_moved) == {"hbm_to_vmem": 2**20}
    transfer = 2**20 / V6E.hbm_bytes_per_second + 600e-9
    assert V6E.seconds(result.dma.stall_cycles + 1) == pytest.approx(transfer)
    assert list(result.dma.stalls) == [2]
    assert result.dma.unmatched_waits == 1


@pytest.mark.parametrize("name", kept_dumps("lengths"))
def test_trip_counts_on_every_generation(name: str, kept: Callable[[str], Artifact]) -> None:
    """The kept kernel's inner loop turns sum(lengths) times and its condition holds twice, whatever the compiler.

    64 x 128 FP32 elements are 8 registers: 8 exponentials for each length over 3, even where the compiler issues some of
    them, predicated, in the delay slots of the branch around them.
    """
    artifact = kept(name)
    program = load_program(artifact, "lengths.1")
    kernel = analyse_artifact(artifact).kernels[0]
    assert kernel.reasons.get("executed") is None
    inner = program.loops[-1]
    assert next(block.visits for block in kernel.hot if block.first == inner.first) == sum(LENGTHS)
    assert kernel.executed is not None
    assert sum(kernel.executed.transcendentals.values()) == 8 * sum(length > 3 for length in LENGTHS)
    assert kernel.static.transcendentals.keys() <= {"vexp2.f32", "vpow2.f32"}


def test_annotated_offsets() -> None:
    """`6 [#allocation12]` is the offset 6 with the compiler's remark, so that the wait finds its copy."""
    text = """\
     0   :  { %s1_s0 = scalar_lea.sflag [#allocation12], 1  ;;  %s9_s9 = inlined_call_operand.hbm [shape: bf16[8,128], index: 0, kind: input] }
   0x1   :  { %s2_s1 = scalar_lea.sflag %s1_s0, 6 [#allocation12] }
   0x2   :  { %3 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s9_s9, /*size_in_granules=*/64, /*vmem=*/%s9_s9, /*dst_syncflagno=*/%s2_s1 }
   0x3   :  { %4 = dma.done.wait [#allocation12 + $0x7], 64 }
"""
    assert run(text).dma.unmatched_waits == 0
