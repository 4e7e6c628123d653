"""Integer arrays in SMEM.

The expected addresses and shifts were read off compiled kernels that load single elements (v6e, libtpu 0.0.50.1).
"""

from __future__ import annotations

import numpy as np
import pytest

from verify.compiled.hlo import parse_array
from verify.compiled.smem import LayoutError, words

# layout, [(index of an element, word it was loaded from, shift of that word)]
LOADS = [
    ("s32[3,5]{1,0:T(4,128)}", [((0, 1), 0x1, 0)]),
    ("s32[20,300]{1,0:T(8,128)}", [((3, 6), 0x186, 0), ((9, 16), 0xC90, 0), ((18, 31), 0x191F, 0)]),
    ("s32[2,3,5]{2,1,0:T(4,128)}", [((1, 0, 4), 0x204, 0), ((1, 2, 2), 0x302, 0), ((0, 2, 1), 0x101, 0)]),
    ("s8[600]{0:T(1024)(128)(4,1)}", [((3,), 0x3, 0), ((21,), 0x15, 0)]),
    ("s8[2,40,300]{2,1,0:T(8,128)(4,1)}", [((0, 1, 2), 0x2, 8), ((1, 6, 9), 0xF89, 16), ((0, 21, 30), 0x69E, 8)]),
    ("s16[600]{0:T(1024)(128)(2,1)}", [((3,), 0x3, 0), ((21,), 0x15, 0)]),
]


@pytest.mark.parametrize(("layout", "loads"), LOADS)
def test_elements_are_where_the_compiler_loads_them(layout: str, loads: list[tuple[tuple[int, ...], int, int]]) -> None:
    """An element's value is found in the word and at the shift that the compiled kernel reads."""
    array = parse_array(layout)
    bits = {"s8": 8, "s16": 16, "s32": 32}[array.dtype]
    values = np.random.default_rng(0).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), array.shape)
    found = words(values.reshape(-1).tolist(), array)
    for index, word, shift in loads:
        field = (found[word] & 0xFFFFFFFF) >> shift & ((1 << bits) - 1)
        assert field == int(values[index]) & ((1 << bits) - 1)


@pytest.mark.parametrize(
    "layout", ["s32[4,4]{0,1:T(4,128)}", "s32[4,4]{1,0}", "s8[8,8]{1,0:T(8,128)}", "s8[8]{0:T(128)}"]
)
def test_unknown_layouts_are_refused(layout: str) -> None:
    """A layout that was not checked gives no words, rather than wrong ones."""
    array = parse_array(layout)
    with pytest.raises(LayoutError, match="SMEM operand"):
        words([0] * int(np.prod(array.shape)), array)
