"""The code's constants in the languages of the tools, written afresh for every check and never committed."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction
from typing import TYPE_CHECKING

from proofs import constants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_GAPPA_BITS = 64
_EXPRESSION = re.compile(r"<<(.+?)>>")


def dyadic(value: Fraction) -> tuple[int, int]:
    """(m, e) with value = m 2**e and m odd or 0.

    Raises:
        ValueError: the value is no dyadic number.
    """
    if value.denominator & (value.denominator - 1):
        message = f"{value} is no dyadic number"
        raise ValueError(message)
    m, e = value.numerator, -(value.denominator.bit_length() - 1)
    while m and m % 2 == 0:
        m, e = m // 2, e + 1
    return m, e if m else 0


def coq_name(name: str) -> str:
    """`budget.BIAS` is BIAS there, `devices.exp2_relative` exp2_relative; others keep their module's name."""
    module, attribute = name.split(".")
    return attribute if module in {"budget", "devices"} else f"{module}_{attribute}"


def coq_constants(names: Iterable[str]) -> str:
    """A Coq module that defines each constant as a real, with its dyadic form, and as an integer if it is one."""
    lines = [
        "(* Written by `python -m proofs` from the code. *)",
        "From Coq Require Import ZArith Reals Lra.",
        "From Flocq Require Import Core.",
        "Open Scope R_scope.",
    ]
    for name in sorted(set(names)):
        value, c = constants.value_of(name), coq_name(name)
        m, e = dyadic(value)
        real = f"IZR ({value.numerator})" + ("" if value.denominator == 1 else f" / IZR {value.denominator}")
        if value.denominator == 1:
            lines.append(f"Definition {c}_Z : Z := ({value.numerator})%Z.")
        lines += [
            f"Definition {c}_m : Z := ({m})%Z.",
            f"Definition {c}_e : Z := ({e})%Z.",
            f"Definition {c} : R := {real}.",
            f"Lemma {c}_dyadic : {c} = IZR {c}_m * bpow radix2 {c}_e.",
            f"Proof. unfold {c}, {c}_m, {c}_e. simpl. lra. Qed.",
        ]
    return "\n".join(lines) + "\n"


def gappa_script(template: str) -> str:
    """A script from its template: every `<<expression>>` of constants becomes its value, rounded up if need be."""
    return _EXPRESSION.sub(lambda match: _gappa_number(evaluate(match[1])), template)


def names_in(template: str) -> set[str]:
    """The constants that a Gappa template names."""
    found: set[str] = set()
    for expression in _EXPRESSION.findall(template):
        found |= {ast.unparse(node) for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Attribute)}
    return found


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of integers, constants (`devices.exp2_relative`), + - * / and **."""
    return _evaluate(ast.parse(expression, mode="eval").body)


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.Attribute):
        return constants.value_of(ast.unparse(node))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _evaluate(node.left) ** int(_evaluate(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    message = f"no arithmetic of constants: {ast.unparse(node)}"
    raise ValueError(message)


def _gappa_number(value: Fraction) -> str:
    """m b e, the smallest such number of 64 bits that is at least the value."""
    scale = 0
    while abs(value) * Fraction(2) ** scale < 2**_GAPPA_BITS and (value * Fraction(2) ** scale).denominator != 1:
        scale += 1
    scaled = value * Fraction(2) ** scale
    return f"{-(-scaled.numerator // scaled.denominator)}b{-scale}"
