"""What the scalar unit's instructions compute, on 32-bit words of which some are unknown.

A word is a Python integer in two's complement range, a predicate is 0 or 1, and None is a value that cannot be known
here: it came from the vector unit, from an operand whose contents were not given, or from an instruction that is not
modelled.  An instruction with an unknown operand gives an unknown result, except where the known operand alone decides.
"""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

type Word = int | None

_BITS = 32
_MASK = 0xFFFFFFFF
_SIGN = 0x80000000


def signed(value: int) -> int:
    """The word that holds `value` modulo 2^32, as a signed number."""
    return ((value + _SIGN) & _MASK) - _SIGN


def unsigned(word: int) -> int:
    """The same word read without a sign."""
    return word & _MASK


def float_word(value: float) -> int:
    """The word that holds an FP32 number."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def float_value(word: int) -> float:
    """The FP32 number that a word holds."""
    return struct.unpack("<f", struct.pack("<i", word))[0]


def total(words: Sequence[Word]) -> Word:
    """The sum of words; unknown if one is."""
    result = 0
    for word in words:
        if word is None:
            return None
        result += word
    return signed(result)


def _count_leading_zeros(word: int) -> int:
    return _BITS - unsigned(word).bit_length()


def _quotient(a: int, b: int) -> Word:
    if b == 0:
        return None
    magnitude = abs(a) // abs(b)
    return signed(magnitude if (a < 0) == (b < 0) else -magnitude)


def _remainder(a: int, b: int) -> Word:
    quotient = _quotient(a, b)
    return None if quotient is None else signed(a - quotient * b)


def _unsigned_quotient(a: int, b: int) -> Word:
    return None if b == 0 else signed(unsigned(a) // unsigned(b))


def _unsigned_remainder(a: int, b: int) -> Word:
    return None if b == 0 else signed(unsigned(a) % unsigned(b))


UNARY: MappingProxyType[str, Callable[[int], Word]] = MappingProxyType(
    {
        "smov": lambda a: a,
        "pmov": lambda a: a,
        "pneg": lambda a: 1 - a,
        "sclz": _count_leading_zeros,
        "scount_leading_zeros": _count_leading_zeros,
        "sneg": lambda a: signed(-a),
        "snot": lambda a: signed(~a),
    }
)

BINARY: MappingProxyType[str, Callable[[int, int], Word]] = MappingProxyType(
    {
        "sadd": lambda a, b: signed(a + b),
        "ssub": lambda a, b: signed(a - b),
        "smul": lambda a, b: signed(a * b),
        "smulhi.u32": lambda a, b: signed((unsigned(a) * unsigned(b)) >> _BITS),
        "smulhi.s32": lambda a, b: signed((a * b) >> _BITS),
        "sshll": lambda a, b: signed(a << (b & 31)),
        "sshrl": lambda a, b: signed(unsigned(a) >> (b & 31)),
        "sshra": lambda a, b: a >> (b & 31),
        "sxor": lambda a, b: signed(a ^ b),
        "pxor": lambda a, b: a ^ b,
        "smin.s32": min,
        "smax.s32": max,
        "smin.u32": lambda a, b: a if unsigned(a) < unsigned(b) else b,
        "smax.u32": lambda a, b: b if unsigned(a) < unsigned(b) else a,
        "sdiv.s32": _quotient,
        "sdivrem.s32": _quotient,
        "srem.s32": _remainder,
        "sdiv.u32": _unsigned_quotient,
        "sdivrem.u32": _unsigned_quotient,
        "srem.u32": _unsigned_remainder,
        "sc.u32": lambda a, b: (unsigned(a) + unsigned(b)) >> _BITS,
    }
)


def _fp32(function: Callable[[float, float], float]) -> Callable[[int, int], Word]:
    """An FP32 operation on words, rounded once; unknown where Python's overflow says nothing of the hardware's."""

    def operation(a: int, b: int) -> Word:
        try:
            return float_word(function(float_value(a), float_value(b)))
        except OverflowError:
            return None

    return operation


FLOATING: MappingProxyType[str, Callable[[int, int], Word]] = MappingProxyType(
    {
        "sadd.f32": _fp32(lambda a, b: a + b),
        "ssub.f32": _fp32(lambda a, b: a - b),
        "smul.f32": _fp32(lambda a, b: a * b),
        "smin.f32": _fp32(min),
        "smax.f32": _fp32(max),
    }
)

_COMPARISON: MappingProxyType[str, Callable[[float, float], bool]] = MappingProxyType(
    {
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
    }
)


def bit_and(a: Word, b: Word) -> Word:
    """Bitwise and; nothing and anything is nothing."""
    if a == 0 or b == 0:
        return 0
    return None if a is None or b is None else signed(a & b)


def bit_or(a: Word, b: Word) -> Word:
    """Bitwise or; all ones and anything is all ones."""
    if a == -1 or b == -1:
        return -1
    return None if a is None or b is None else signed(a | b)


def predicate_and(a: Word, b: Word) -> Word:
    """Both."""
    if a == 0 or b == 0:
        return 0
    return None if a is None or b is None else 1


def predicate_or(a: Word, b: Word) -> Word:
    """Either."""
    if a == 1 or b == 1:
        return 1
    return None if a is None or b is None else 0


def predicate_not(a: Word) -> Word:
    """The other one."""
    return None if a is None else 1 - a


def select(predicate: Word, a: Word, b: Word) -> Word:
    """`a` if the predicate holds, else `b`; known also where both agree."""
    if predicate is None:
        return a if a == b else None
    return a if predicate else b


PARTIAL: MappingProxyType[str, Callable[[Word, Word], Word]] = MappingProxyType(
    {
        "sand": bit_and,
        "sor": bit_or,
        "pand": predicate_and,
        "por": predicate_or,
        "pnand": lambda a, b: predicate_not(predicate_and(a, b)),
        "pnor": lambda a, b: predicate_not(predicate_or(a, b)),
    }
)


def _total(function: Callable[[int, int], Word]) -> Callable[[Word, Word], Word]:
    return lambda a, b: None if a is None or b is None else function(a, b)


def comparison(opcode: str) -> Callable[[Word, Word], Word] | None:
    """Meaning of a `scmp.<relation>.<type>...`; None if the opcode is no such thing."""
    match opcode.split("."):
        case ["scmp", relation, "s32", *_] if relation in _COMPARISON:
            holds = _COMPARISON[relation]
            return _total(lambda a, b: int(holds(a, b)))
        case ["scmp", relation, "u32", *_] if relation in _COMPARISON:
            holds = _COMPARISON[relation]
            return _total(lambda a, b: int(holds(unsigned(a), unsigned(b))))
        case ["scmp", relation, "f32", *_] if relation in _COMPARISON:
            # Python's comparisons with NaN are those of the hardware's partial order: all false but `ne`.
            holds = _COMPARISON[relation]
            return _total(lambda a, b: int(holds(float_value(a), float_value(b))))
        case _:
            return None


def binary(opcode: str) -> Callable[[Word, Word], Word] | None:
    """Meaning of an instruction of two operands; None if it is not modelled."""
    head = opcode.split(".", maxsplit=1)[0]
    if head in PARTIAL:
        return PARTIAL[head]
    floating = ".f32" in opcode and head != "scmp"
    function = FLOATING.get(opcode) if floating else BINARY.get(opcode) or BINARY.get(head)
    return _total(function) if function else comparison(opcode)


def unary(opcode: str) -> Callable[[Word], Word] | None:
    """Meaning of an instruction of one operand; None if it is not modelled."""
    function = UNARY.get(opcode.split(".", maxsplit=1)[0])
    return (lambda a: None if a is None else function(a)) if function else None
