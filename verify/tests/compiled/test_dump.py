"""Reading libtpu's dumps."""

# ruff: noqa: E501  dumps have long lines

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from verify.compiled.dump import DumpError, parse_schedule, parse_utilization, read_text
from verify.tests.compiled.conftest import kept_dumps

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.compiled.compile import Artifact

TEXT = """\
= control target key start
LH: loop header

     0   :  { %s7_s0 = inlined_call_operand.hbm [shape: bf16[8,128], index: 0, kind: input] /* operand 0 */ }
   0x1 LB: > { %s9_s1 = sadd.s32 1, %s8_s1 /* a, b ;; { not code } */  ;;  %p3_p2 = scmp.lt.s32.totalorder %s9_s1, 4 } /* Start region 5 */
   0x2   : > { %12 = dma.hbm_to_vmem [thread:$0]  (!%p3_p2), /*hbm=*/%s7_s0, /*size_in_granules=*/16, /*dst_syncflagno=*/[#allocation4 + $0x1] /*
base_bounds: (4, 1)
 */ }
   0x3   : > { %2655 = vmatmul.mubr.bf16.gmra.mrb[68].mxu0 %v1_v2  ;;  %s5_s6 = smov (%p3_p2, %s4_s7), %s9_s1 }
   0x4   :  {} /* End region 5 :: Start region 6 :: End region 6 */
"""


def test_bundles_instructions_and_regions() -> None:
    """Labels, results, predicates, named operands, multi-line comments and region marks are told apart."""
    schedule = parse_schedule("k", TEXT, None)
    first, loop, copy, product, empty = schedule.bundles
    assert [bundle.pc for bundle in schedule.bundles] == [0, 1, 2, 3, 4]
    assert first.instructions[0].comment == "operand 0"
    assert (loop.label, loop.starts, len(loop.instructions)) == ("LB", (5,), 2)
    assert loop.instructions[0].operands == "1, %s8_s1"
    assert loop.instructions[0].comment == "a, b ;; { not code }"
    assert (copy.instructions[0].predicate, copy.instructions[0].negated) == ("p3_p2", True)
    assert copy.instructions[0].named == {
        "hbm": "%s7_s0",
        "size_in_granules": "16",
        "dst_syncflagno": "[#allocation4 + $0x1]",
    }
    assert product.instructions[0].opcode == "vmatmul.mubr.bf16.gmra.mrb.mxu0"
    assert (product.instructions[1].otherwise, product.instructions[1].operands) == ("s4_s7", "%s9_s1")
    assert empty.instructions == ()
    assert empty.ends == (5, 6)


def test_a_missing_bundle_is_an_error() -> None:
    """A dump with a gap is refused: a reader that skips what it cannot read reports too few cycles."""
    with pytest.raises(DumpError, match="bundle 0x2 is missing"):
        parse_schedule("k", TEXT.replace("   0x2   : > {", "   garbled {"), None)


@pytest.mark.parametrize("text", ["", "nothing here\n"])
def test_an_empty_dump_is_an_error(text: str) -> None:
    """A file without bundles is no schedule of zero cycles."""
    with pytest.raises(DumpError, match="no bundle"):
        parse_schedule("k", text, None)


def test_utilization_rows_must_match_bundles() -> None:
    """A table of another operation is not accepted."""
    table = "== CAPACTIY:\nMXU, SALU\n    2     2\n== UTILIZATION:\n0 1\n2 0\n"
    assert parse_utilization(table).rows == ((0, 1), (2, 0))
    with pytest.raises(DumpError, match="5 bundles, but 2 rows"):
        parse_schedule("k", TEXT, table)
    with pytest.raises(DumpError, match="not 2 wide"):
        parse_utilization(table + "1\n")
    with pytest.raises(DumpError, match="not a utilization table"):
        parse_utilization("MXU\n")


@pytest.mark.parametrize("name", kept_dumps("lengths") + kept_dumps("transposed"))
def test_dumps_of_every_generation_and_compiler_read(name: str, kept: Callable[[str], Artifact]) -> None:
    """Kept dumps of four generations and three libtpu versions read whole: no unknown text, tables that fit."""
    artifact = kept(name)
    for operation, (bundles, table) in artifact.operations().items():
        assert table is not None
        schedule = parse_schedule(operation, read_text(bundles), read_text(table))
        assert len(schedule.bundles) > 10
        opcodes = {instruction.opcode for bundle in schedule.bundles for instruction in bundle.instructions}
        assert not [opcode for opcode in opcodes if "[" in opcode or "%" in opcode]
