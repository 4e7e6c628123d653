"""What the fused Gated DeltaNet kernel packs into words and keeps of earlier rows."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from flywheel.gdn import checks, inverse, schedule, spec, tile
from flywheel.packing import GROUP, Packing
from proofs.lemma import Assumption, Method, lemma, require

_STOPS = (1, 7, 8, 9, 63, 64, 65, 127, 128)
_SCALAR_MEMORY = 2**20
"""Bytes of scalar memory of the smallest supported core."""


@lemma(
    statement="a block's fields fit the bits of its packed word and are read back, the list of MOST_TOKENS tokens "
    "fits scalar memory, and HISTORY rows hold what the widest convolution reads",
    rests_on=("gdn_inverse.CHUNK", "gdn_schedule.MOST_TOKENS", "gdn_spec.HISTORY", "gdn_tile.TILE"),
    methods=(Method.EXHAUSTIVE,),
    assumptions=(
        Assumption("more tokens are refused", "verify/tests/kernels/gdn/test_layer_errors.py::test_refuses"),
        Assumption("wider convolutions are refused", "flywheel.gdn.checks:check_layer"),
    ),
)
def gdn_layout() -> str:
    """On the kernel's own constants.

    A block has up to 7 carried rows, stops after 1 .. TILE rows and takes as many groups of 8 as hold them: the
    ends of these ranges are packed as `Plan.fill` does and read with `Plan.field`.  A tile is two chunks, as the
    side-by-side layout of the inverse takes them.  Rows before a tile: a convolution of `width` taps reads width - 1
    of them, from row HISTORY - (width - 1) on, and a BF16 tile has 16.  The list has five words per block; blocks of
    the longest call, cut as finely as one sequence can be, fit the scalar memory.
    """
    require(tile.TILE == 2 * inverse.CHUNK, f"a tile of {tile.TILE} tokens is not two chunks of {inverse.CHUNK}")
    widest = checks.WIDTHS[1]
    require(widest - 1 <= spec.HISTORY, f"{spec.HISTORY} rows before a tile are fewer than {widest} taps read")
    require(spec.HISTORY % (2 * GROUP) == 0, f"{spec.HISTORY} rows are no whole BF16 tiles")
    packing = Packing(schedule.MOST_TOKENS, 1, tile.TILE, padding=True)
    size = 4 * schedule.words(packing)
    require(size <= _SCALAR_MEMORY, f"the list of {schedule.MOST_TOKENS} tokens takes {size} bytes of scalar memory")
    tried = 0
    for carried, stop in itertools.product((0, 1, GROUP - 1), (*_STOPS, tile.TILE)):
        fields = {"carried": carried, "stop": stop, "groups": -(-stop // GROUP), "is_first": tried % 2, "is_last": 1}
        found = _read_back(fields)
        require(found == fields, f"a block's word gives {found} for {fields}")
        tried += 1
    return f"{tried} words; the longest list takes {size / 2**10:.0f} KiB"


def _read_back(fields: dict[str, int]) -> dict[str, int]:
    """The fields of a word that `Plan.fill` would make, as `Plan.field` reads them."""
    word, shift = 0, 0
    for name, bits in schedule._FIELDS.items():  # noqa: SLF001  the kernel's own layout
        word, shift = word | fields[name] << shift, shift + bits
    require(shift < 32, f"a block's fields take {shift} bits of a word")
    plan: Any = SimpleNamespace(_word=lambda _block, _which: word)
    return {name: int(schedule.Plan.field(plan, 0, name)) for name in fields}
