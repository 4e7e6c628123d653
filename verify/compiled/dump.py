"""The text of libtpu's schedule dumps, read into instructions.

Two files describe one HLO operation (a Pallas kernel is one):

- the *bundles* after register allocation.  A bundle is one VLIW instruction, issued in one cycle; it still includes
  the empty bundles in which the kernel waits for a result, which the compiler later turns into delay counts;
- the *utilization*, a table with one row for each bundle: how many slots of each unit are busy in that cycle.  A
  `vmatmul` keeps its matrix unit busy for several cycles, so rows of empty bundles are not all zero.

The format is nobody's interface.  What is relied on is checked while reading (rows match bundles, every bundle has the
address that follows from its predecessor) and an unreadable dump raises `DumpError` with the line.
"""

from __future__ import annotations

import dataclasses
import gzip
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_BUNDLE = re.compile(r"^ *(?P<pc>0x[0-9a-f]+|0) *(?P<label>LH|LB|LE|PB|PF|CT)? *: *(?:> *)*\{")
_COMMENT = re.compile(r"/\*|\*/")
_NAME_COMMENT = re.compile(r"\w+=")
_REGION = re.compile(r"(Start/End empty|Start|End) region (\d+)")
_RESULT = re.compile(r"%(\w+) = (.*)$", re.DOTALL)
_OPCODE = re.compile(r"([a-z][\w.]*(?:\[\d+\](?:\.\w+)?)?)\s*(.*)$", re.DOTALL)
_PREDICATE = re.compile(r"\((!?)%(p\w+)(?:, *%(\w+))?\),?")
_NAMED = re.compile(r"@(\w+)=([^,\s]+(?: \+ [%$]?\w+\]+)?)")
_MRB = re.compile(r"\[\d+\]")


class DumpError(ValueError):
    """A dump does not read the way this reader understands dumps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One slot of a bundle.

    Attributes:
        result: name of the value it defines, as `s12_s3` (value 12 in scalar register 3); None if it defines none.
        opcode: with its suffixes (`vmatmul.mubr.bf16.gmra.mxu0`); the accumulator number of v7x (`mrb[4]`) is dropped.
        operands: the rest of the text, without predicate and comments; `/*size=*/4` reads `@size=4`.
        named: the named operands of the rest.
        predicate: name of the predicate that must hold, or None.
        negated: whether the predicate must be false instead.
        otherwise: name of the value that the result takes when the predicate does not hold, or None.
        comment: what the compiler remarked.
    """

    result: str | None
    opcode: str
    operands: str
    named: Mapping[str, str]
    predicate: str | None = None
    negated: bool = False
    otherwise: str | None = None
    comment: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """One VLIW instruction: one cycle.

    Attributes:
        pc: its address, counted in bundles.
        label: LB loop body, PF predicated fall-through and so on; None if unlabelled.
        instructions: its slots.
        starts: regions that begin here.
        ends: regions that end here.
    """

    pc: int
    label: str | None
    instructions: tuple[Instruction, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Utilization:
    """Busy slots of each unit in each bundle.

    Attributes:
        units: the compiler's names of the units.
        capacity: slots of each unit.
        rows: busy slots, one row for each bundle.
    """

    units: tuple[str, ...]
    capacity: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One HLO operation's schedule.

    Attributes:
        name: of the HLO operation.
        bundles: in order of address, from 0, without a gap.
        utilization: rows match bundles; None where the compiler wrote none.
    """

    name: str
    bundles: tuple[Bundle, ...]
    utilization: Utilization | None


def read_text(path: Path) -> str:
    """The text of a dump, compressed or not."""
    if path.suffix == ".gz":
        with gzip.open(path, "rt", errors="replace") as file:
            return file.read()
    return path.read_text(errors="replace")


def parse_schedule(name: str, bundles: str, utilization: str | None) -> Schedule:
    """Read one operation's dumps.

    Raises:
        DumpError: a text is not of the known form, or the two do not belong together.
    """
    parsed = tuple(_bundles(bundles))
    if not parsed:
        message = f"{name}: no bundle in the dump"
        raise DumpError(message)
    table = parse_utilization(utilization) if utilization is not None else None
    if table is not None and len(table.rows) != len(parsed):
        message = f"{name}: {len(parsed)} bundles, but {len(table.rows)} rows of utilization"
        raise DumpError(message)
    return Schedule(name, parsed, table)


def parse_utilization(text: str) -> Utilization:
    """Read a per-bundle utilization table.

    Raises:
        DumpError: the table has no header of the known form, or a row of another width.
    """
    lines = text.splitlines()
    header = 4
    if len(lines) < header or not lines[0].startswith("== CAPA") or not lines[3].startswith("== UTIL"):
        message = f"not a utilization table: {lines[:1]}"
        raise DumpError(message)
    units = tuple(unit.strip() for unit in lines[1].split(","))
    capacity = tuple(int(word) for word in lines[2].split())
    rows = tuple(tuple(int(word) for word in line.split()) for line in lines[header:] if line.strip())
    if any(len(row) != len(units) for row in (capacity, *rows)):
        message = f"a utilization row is not {len(units)} wide ({', '.join(units)})"
        raise DumpError(message)
    return Utilization(units, capacity, rows)


def _bundles(text: str) -> Iterator[Bundle]:
    for expected, chunk in enumerate(_chunks(text)):
        bundle = _bundle(chunk)
        if bundle.pc != expected:
            message = f"bundle {expected:#x} is missing before: {chunk[:120]!r}"
            raise DumpError(message)
        yield bundle


def _chunks(text: str) -> Iterator[str]:
    """The text of each bundle; comments may run over several lines."""
    current: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            if current:
                yield "\n".join(current)
            current = [line]
        elif current:
            current.append(line)
    if current:
        yield "\n".join(current)


def _bundle(chunk: str) -> Bundle:
    head = _BUNDLE.match(chunk)
    if head is None:
        message = f"not a bundle: {chunk[:120]!r}"
        raise DumpError(message)
    code, comments = _separate_comments(chunk[head.end() :])
    close = code.rfind("}")
    if close < 0:
        message = f"bundle without an end: {chunk[:120]!r}"
        raise DumpError(message)
    instructions, start = [], 0
    for piece in code[:close].split(";;"):
        end = start + len(piece)
        if piece.strip():
            remark = " ".join(text for place, text in comments if start <= place <= end and place <= close)
            instructions.append(_instruction(piece.strip(), remark))
        start = end + 2
    tail = " ".join(text for place, text in comments if place > close)
    marks = _REGION.findall(tail)
    return Bundle(
        pc=int(head["pc"], 16),
        label=head["label"],
        instructions=tuple(instructions),
        starts=tuple(int(number) for kind, number in marks if kind == "Start"),
        ends=tuple(int(number) for kind, number in marks if kind == "End"),
    )


def _separate_comments(text: str) -> tuple[str, list[tuple[int, str]]]:
    """The code, `/*name=*/` turned into `@name=`; and the other comments with their place in that code."""
    code: list[str] = []
    comments: list[tuple[int, str]] = []
    length = depth = position = begin = 0
    for match in _COMMENT.finditer(text):
        if match.group() == "/*":
            if depth == 0:
                code.append(text[position : match.start()])
                length += len(code[-1])
                begin = match.end()
            depth += 1
        elif depth:
            depth -= 1
            if depth == 0:
                comment = text[begin : match.start()]
                position = match.end()
                if _NAME_COMMENT.fullmatch(comment):
                    code.append("@" + comment)
                    length += len(code[-1])
                else:
                    comments.append((length, comment.strip()))
    if depth == 0:
        code.append(text[position:])
    return "".join(code), comments


def _instruction(text: str, comment: str) -> Instruction:
    match = _RESULT.match(text)
    result, rest = (match.group(1), match.group(2)) if match else (None, text)
    match = _OPCODE.match(rest)
    if match is None:
        message = f"no opcode in {text!r}"
        raise DumpError(message)
    opcode, operands = _MRB.sub("", match.group(1)), match.group(2)
    predicate, negated, otherwise = None, False, None
    guard = _PREDICATE.search(operands)
    if guard:
        negated, predicate, otherwise = bool(guard.group(1)), guard.group(2), guard.group(3)
        operands = operands[: guard.start()] + operands[guard.end() :]
    operands = operands.strip()
    named = dict(_NAMED.findall(operands)) if "@" in operands else {}
    return Instruction(result, opcode, operands, named, predicate, negated, otherwise, comment)
