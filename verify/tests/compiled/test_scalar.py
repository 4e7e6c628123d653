"""What scalar instructions compute."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.compiled import scalar

WORDS = st.integers(-(2**31), 2**31 - 1)
EDGES = [0, 1, -1, 2**31 - 1, -(2**31), 0x7FFF, -0x8000]


@given(WORDS | st.sampled_from(EDGES), WORDS | st.sampled_from(EDGES))
def test_wrapping_arithmetic_is_that_of_int32(a: int, b: int) -> None:
    """Add, subtract, multiply, shifts and bit operations agree with NumPy's 32-bit integers."""
    x, y = np.int32(a), np.int32(b)
    with np.errstate(over="ignore"):
        expected = {
            "sadd.s32": x + y,
            "ssub.s32": x - y,
            "smul.u32": x * y,
            "sand.u32": x & y,
            "sor.u32": x | y,
            "sxor.u32": x ^ y,
            "sshll.u32": np.int32(x << np.int32(b & 31)),
            "sshra.s32": x >> np.int32(b & 31),
            "sshrl.u32": (np.uint32(a & 0xFFFFFFFF) >> np.uint32(b & 31)).astype(np.int32),
            "smulhi.u32": np.int64(((a & 0xFFFFFFFF) * (b & 0xFFFFFFFF)) >> 32).astype(np.int32),
            "smin.u32": min((x, y), key=lambda word: int(word) & 0xFFFFFFFF),
            "smax.s32": max(x, y),
        }
    for opcode, word in expected.items():
        meaning = scalar.binary(opcode)
        assert meaning is not None
        assert meaning(a, b) == int(word), opcode


@given(WORDS, WORDS.filter(bool))
def test_division_truncates_towards_zero(a: int, b: int) -> None:
    """Quotient and remainder are those of C, and a division by zero is unknown rather than an exception."""
    quotient, remainder = scalar.binary("sdiv.s32"), scalar.binary("srem.s32")
    assert quotient is not None
    assert remainder is not None
    assert quotient(a, b) == scalar.signed(int(np.trunc(np.longdouble(a) / np.longdouble(b))))
    assert scalar.signed((quotient(a, b) or 0) * b + (remainder(a, b) or 0)) == a
    assert quotient(a, 0) is None


@pytest.mark.parametrize("relation", ["lt", "le", "gt", "ge", "eq", "ne"])
@given(WORDS | st.sampled_from(EDGES), WORDS | st.sampled_from(EDGES))
def test_comparisons_by_sign(relation: str, a: int, b: int) -> None:
    """Signed and unsigned comparisons differ exactly where the sign bit says so."""
    holds = getattr(operator, relation)
    for kind, read in (("s32", int), ("u32", lambda word: word & 0xFFFFFFFF)):
        meaning = scalar.binary(f"scmp.{relation}.{kind}.totalorder")
        assert meaning is not None
        assert meaning(a, b) == int(holds(read(a), read(b)))


def test_unknown_operands() -> None:
    """An unknown operand makes the result unknown, unless the other one decides alone."""
    decided = {"sand.u32": (0, 0), "sor.u32": (-1, -1), "pand": (0, 0), "por": (1, 1), "pnand": (0, 1), "pnor": (1, 0)}
    for opcode, (known, result) in decided.items():
        meaning = scalar.binary(opcode)
        assert meaning is not None
        assert meaning(None, known) == meaning(known, None) == result
    add = scalar.binary("sadd.s32")
    assert add is not None
    assert add(None, 0) is None
    assert scalar.select(None, 3, 3) == 3
    assert scalar.select(None, 3, 4) is None


@given(st.floats(width=32), st.floats(width=32))
def test_comparisons_of_floats(a: float, b: float) -> None:
    """FP32 comparisons read the words' bits; a NaN is unequal to everything and ordered with nothing."""
    for relation in ("lt", "ge", "eq", "ne"):
        meaning = scalar.binary(f"scmp.{relation}.f32.partialorder")
        assert meaning is not None
        assert meaning(scalar.float_word(a), scalar.float_word(b)) == int(getattr(operator, relation)(a, b))


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_arithmetic_of_floats(a: float, b: float) -> None:
    """FP32 operations round once, as NumPy's do, and are never taken for the integer ones of the same name."""
    with np.errstate(all="ignore"):
        x, y = np.float32(a), np.float32(b)
        expected = {"sadd.f32": x + y, "smul.f32": x * y, "smax.f32": max(x, y), "smin.f32": min(x, y)}
    for opcode, value in expected.items():
        meaning = scalar.binary(opcode)
        assert meaning is not None
        word = meaning(scalar.float_word(a), scalar.float_word(b))
        if word is None:
            assert np.isinf(value)
        else:
            np.testing.assert_equal(np.float32(scalar.float_value(word)), value)
    assert scalar.binary("sdiv.f32") is None


def test_what_is_not_modelled_is_not_guessed() -> None:
    """Unknown opcodes have no meaning here."""
    assert scalar.binary("sfoo.s32") is None
    assert scalar.unary("spop") is None
