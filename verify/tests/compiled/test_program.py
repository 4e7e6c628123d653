"""Control flow of a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from jax._src import tpu_info

from verify.compiled.dump import DumpError, parse_schedule
from verify.compiled.generations import GENERATIONS
from verify.compiled.program import analyse
from verify.compiled.report import load_program
from verify.tests.compiled.conftest import kept_dumps

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.compiled.compile import Artifact

LOOP = """\
     0   :  { %s1_s1 = smov 0 }
   0x1 LB: > { %s2_s1 = sphi %s1_s1, %s3_s1  ;;  %s3_s1 = sadd.s32 1, %s2_s1 }
   0x2   : > { %p4_p0 = scmp.ge.s32.totalorder %s3_s1, 3 }
   0x3   : > { %9 = sbr.rel (!%p4_p0) target bundleno = 1 (0x1), region = 7 }
   0x4   : > { %v5_v0 = vadd.f32 %v1_v1, %v2_v2 }
   0x5   :  {} /* End region 7 */
   0x6   :  { %8 = vsyncpa [#allocation4], 1 }
"""


def test_blocks_end_with_the_delay_slots() -> None:
    """The bundles after a branch belong to the block that it ends, and the loop includes them."""
    program = analyse(parse_schedule("k", LOOP, None), delay_slots=2)
    assert [(block.first, block.last) for block in program.blocks] == [(0, 0), (1, 5), (6, 6)]
    assert program.blocks[1].branch is not None
    assert program.blocks[1].branch.backward
    assert [(loop.first, loop.last) for loop in program.loops] == [(1, 5)]


def test_a_wrong_number_of_delay_slots_is_noticed() -> None:
    """Region marks give the delay slots away: a compiler that changes them is not misread in silence."""
    with pytest.raises(DumpError, match="end no region after 1 delay slots"):
        analyse(parse_schedule("k", LOOP, None), delay_slots=1)


def test_a_branch_without_target_is_an_error() -> None:
    """A jump that cannot be followed is refused."""
    with pytest.raises(DumpError, match="without a target"):
        analyse(parse_schedule("k", LOOP.replace("target bundleno = 1 (0x1)", "%s4"), None), delay_slots=2)


@pytest.mark.parametrize("name", kept_dumps("lengths"))
def test_blocks_cover_the_schedule(name: str, kept: Callable[[str], Artifact]) -> None:
    """On every generation and compiler, blocks tile the schedule and the two nested loops are found."""
    artifact = kept(name)
    program = load_program(artifact, "lengths.1")
    covered = [pc for block in program.blocks for pc in range(block.first, block.last + 1)]
    assert covered == list(range(len(program.schedule.bundles)))
    outer, inner = program.loops
    assert outer.first < inner.first
    assert inner.last < outer.last


def test_generations_agree_with_jax() -> None:
    """VMEM, matrix units, bandwidth and peak are those that JAX lists, up to how each rounds the published figures."""
    for generation in GENERATIONS.values():
        version = tpu_info.chip_version_from_device_kind(generation.device_kind)
        assert version is not None
        info = tpu_info.get_tpu_info_for_chip(version, generation.cores)
        assert generation.vmem_bytes == info.vmem_capacity_bytes or generation.name == "v5e"
        assert generation.mxu_count == info.num_mxus
        assert generation.mxu_size == info.mxu_column_size
        assert generation.peak_flops / generation.cores == pytest.approx(info.bf16_ops_per_second, rel=0.01)
        per_core = generation.hbm_bytes_per_second / generation.cores
        assert per_core == pytest.approx(info.mem_bw_bytes_per_second, rel=0.13)


def test_clocks_are_inferred_from_the_peak() -> None:
    """The clock is what makes the published peak of the matrix units' FLOP per cycle."""
    gigahertz = {name: round(generation.clock_hz / 1e9, 2) for name, generation in GENERATIONS.items()}
    assert gigahertz == {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "v7x": 2.2}
    assert GENERATIONS["v6e"].flop_per_cycle == 524288
