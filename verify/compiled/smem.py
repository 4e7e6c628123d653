"""How an integer array lies in SMEM: the words that the scalar unit reads.

The layout is XLA's layout of the kernel's operand, as the optimised HLO prints it.  Elements of less than 32 bits are
packed several rows to a word: `s8[40,300]{1,0:T(8,128)(4,1)}` holds rows 4i .. 4i+3 of a column in one word, the first
in the low bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from verify.compiled.hlo import BITS, Array
from verify.compiled.scalar import signed

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD_BITS = 32
_LANES = 128


class LayoutError(ValueError):
    """An operand's layout is not understood."""


def words(values: Sequence[int], array: Array) -> list[int]:
    """The 32-bit words of an array in SMEM.

    Args:
        values: elements in row-major order of the shape.
        array: shape, type and layout.

    Raises:
        LayoutError: the layout is not one of those that were checked against compiled kernels.
    """
    packing = _WORD_BITS // BITS.get(array.dtype, _WORD_BITS)
    if array.order != tuple(reversed(range(len(array.shape)))):
        message = f"SMEM operand {array} is not row-major: {array.order}"
        raise LayoutError(message)
    elements = np.asarray(values, np.int64).reshape(array.shape)
    tiled = _tile_vector(elements, array, packing) if elements.ndim < 2 else _tile_matrix(elements, array, packing)
    bits = _WORD_BITS // packing
    masked = tiled & ((1 << bits) - 1)
    combined = sum(masked[:, row] << (bits * row) for row in range(packing))
    return [signed(int(word)) for word in np.asarray(combined).reshape(-1)]


def _tile_vector(elements: np.ndarray, array: Array, packing: int) -> np.ndarray:
    """`[groups, packing, 128]` of a scalar or vector: packed elements lie 128 apart."""
    flat = elements.reshape(-1)
    unit = array.tiles[0][0] if array.tiles else _LANES
    if packing > 1 and (not array.tiles or array.tiles[-1] != (packing, 1)):
        message = f"SMEM operand {array}: tiles {array.tiles} do not pack {packing} elements to a word"
        raise LayoutError(message)
    padded = np.pad(flat, (0, -len(flat) % max(unit, packing * _LANES)))
    return padded.reshape(-1, packing, _LANES)


def _tile_matrix(elements: np.ndarray, array: Array, packing: int) -> np.ndarray:
    """`[groups, packing, lanes]` of an array whose last two dimensions are tiled."""
    if not array.tiles or len(array.tiles[0]) != 2 or (packing > 1 and array.tiles[1:] != ((packing, 1),)):
        message = f"SMEM operand {array}: tiling {array.tiles} is not understood"
        raise LayoutError(message)
    rows, lanes = array.tiles[0]
    *leading, height, width = elements.shape
    stack = elements.reshape(math.prod(leading), height, width)
    stack = np.pad(stack, ((0, 0), (0, -height % rows), (0, -width % lanes)))
    depth, height, width = stack.shape
    tiles = stack.reshape(depth, height // rows, rows, width // lanes, lanes).transpose(0, 1, 3, 2, 4)
    return tiles.reshape(-1, packing, lanes)
