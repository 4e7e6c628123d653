"""The optimised HLO around a kernel: which operations XLA put there, and which of them only move activations.

A kernel does not run alone.  If its operands are wanted in another layout, order or type than the caller has them, XLA
adds copies, transposes and converts, each a pass over memory, and they do not show in any figure of the kernel itself.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-<>]+) \(.*\) -> .*\{$")
_OPERATION = re.compile(r"^  (?:ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)$", re.DOTALL)
_KIND = re.compile(r"(?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\((?P<tail>.*)$", re.DOTALL)
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_TILE = re.compile(r"\((\d+(?:,\d+)*)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_CALLS = re.compile(r"(?:calls|to_apply)=%([\w.\-<>]+)")
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[(.*?)\]')
_SCOPED_VMEM = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')
_STACK = re.compile(r"stack_frame_id=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")

BITS = MappingProxyType(
    {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64}
    | {"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8}
)
VMEM_SPACE, SEMAPHORE_SPACE = 1, 2

_FREE = frozenset({"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"})
_MOVES = frozenset(
    {"copy", "transpose", "reshape", "convert", "broadcast", "slice", "dynamic-slice", "pad", "concatenate", "gather"}
    | {"reverse", "dynamic-update-slice", "bitcast-convert"}
)


class Role(enum.Enum):
    """What an operation of the entry computation is there for."""

    KERNEL = "kernel"
    MOVE = "move"
    """It only moves, reorders or converts: a copy, transpose, retile, convert, or a fusion of nothing else."""
    PREFETCH = "prefetch"
    """It brings an array from HBM to VMEM or back, layout unchanged; it may overlap other work."""
    COMPUTE = "compute"
    FREE = "free"
    """No code: parameters, constants, views."""


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an operation.

    Attributes:
        dtype: XLA's name of its type.
        shape: its extent.
        order: dimensions from minor to major.
        tiles: its tiling, outermost first; `(8, 128), (2, 1)` is the usual one of BF16.
        space: memory space; 0 is HBM, 1 VMEM.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...]
    space: int

    @property
    def bytes(self) -> int:
        """Size without padding."""
        return math.ceil(math.prod(self.shape) * BITS.get(self.dtype, 32) / 8)

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype.startswith(("f", "bf"))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One HLO operation.

    Attributes:
        name: unique in the module.
        opcode: HLO's.
        results: its arrays (several for tuples).
        operands: names of the operations it reads.
        text: the whole line.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str

    @property
    def is_kernel(self) -> bool:
        """Whether it is a Pallas (Mosaic) kernel."""
        return self.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in self.text

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from; empty if XLA does not say."""
        found = _OP_NAME.search(self.text)
        return found.group(1) if found else ""

    @property
    def scoped_vmem_bytes(self) -> int | None:
        """VMEM that the operation allocates for itself, double buffers included; None if XLA does not say."""
        configs = _SCOPED.search(self.text)
        sizes = _SCOPED_VMEM.findall(configs.group(1)) if configs else []
        return sum(map(int, sizes)) if sizes else None


@dataclasses.dataclass(frozen=True)
class Module:
    """An optimised module.

    Attributes:
        entry: operations of the entry computation in schedule order.
        computations: operations of the other computations.
    """

    entry: tuple[Operation, ...]
    computations: Mapping[str, tuple[Operation, ...]]

    @functools.cached_property
    def by_name(self) -> dict[str, Operation]:
        """Entry operations by name."""
        return {operation.name: operation for operation in self.entry}

    @property
    def kernels(self) -> tuple[Operation, ...]:
        """The Pallas kernels, in order."""
        return tuple(operation for operation in self.entry if operation.is_kernel)

    def operand(self, operation: Operation, index: int) -> Operation | None:
        """The operation that makes an operand."""
        names = operation.operands
        return self.by_name.get(names[index]) if index < len(names) else None

    def inputs(self, operation: Operation) -> tuple[Array, ...]:
        """Arrays that an operation reads."""
        found: list[Array] = []
        for name in operation.operands:
            source = self.by_name.get(name)
            if source is not None:
                found += source.results
        return tuple(found)

    def role(self, operation: Operation) -> Role:
        """What an entry operation is there for."""
        if operation.is_kernel:
            return Role.KERNEL
        if operation.opcode in _FREE or operation.opcode.endswith("-done"):
            return Role.FREE
        if operation.opcode in {"copy-start", "copy"} and self._only_changes_space(operation):
            return Role.PREFETCH
        opcodes = self._opcodes(operation)
        if opcodes and opcodes <= _MOVES | _FREE and opcodes & _MOVES:
            return Role.MOVE
        return Role.COMPUTE

    def _opcodes(self, operation: Operation) -> set[str]:
        called = _CALLS.search(operation.text)
        if operation.opcode != "fusion" or called is None:
            return {operation.opcode.removesuffix("-start")}
        inside = self.computations.get(called.group(1), ())
        return set().union(*(self._opcodes(each) for each in inside)) if inside else {"unknown"}

    def _only_changes_space(self, operation: Operation) -> bool:
        source = self.operand(operation, 0)
        if source is None or not source.results or not operation.results:
            return False
        before, after = source.results[0], operation.results[0]
        return dataclasses.replace(before, space=0) == dataclasses.replace(after, space=0)

    def moved_activations(self, smallest_bytes: int = 0) -> tuple[Operation, ...]:
        """Entry operations that only move floating-point arrays of more than `smallest_bytes`.

        An array is an activation if it is of rank two or more; scales, tables and masks of integers are none.
        """

        def is_activation(array: Array) -> bool:
            return array.is_floating and len(array.shape) > 1 and array.bytes > smallest_bytes

        return tuple(
            operation
            for operation in self.entry
            if self.role(operation) is Role.MOVE and any(map(is_activation, operation.results))
        )


def parse_array(text: str) -> Array:
    """Read `bf16[4,1024,128]{2,1,0:T(8,128)(2,1)S(1)}`.

    Raises:
        ValueError: the text is no array.
    """
    match = _ARRAY.match(text)
    if match is None:
        message = f"not an array: {text!r}"
        raise ValueError(message)
    shape = tuple(int(word) for word in match["shape"].split(",") if word)
    order_text, _, rest = (match["layout"] or "").partition(":")
    order = tuple(int(word) for word in order_text.split(",") if word) or tuple(reversed(range(len(shape))))
    space = _SPACE.search(rest)
    tiling = _SPACE.sub("", rest)
    tiles = tuple(tuple(map(int, tile.split(","))) for tile in _TILE.findall(tiling)) if "T(" in tiling else ()
    return Array(match["dtype"], shape, order, tiles, int(space.group(1)) if space else 0)


def parse_module(text: str) -> Module:
    """Read an optimised module.

    Raises:
        ValueError: there is no entry computation.
    """
    computations: dict[str, tuple[Operation, ...]] = {}
    entry = None
    name, lines, is_entry = None, [], False
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            name, lines, is_entry = head["name"], [], bool(head["entry"])
        elif line.rstrip() == "}" and name is not None:
            operations = _operations(lines)
            computations[name] = operations
            entry = operations if is_entry else entry
            name = None
        elif name is not None:
            lines.append(line)
    if entry is None:
        message = "no entry computation in the HLO text"
        raise ValueError(message)
    return Module(entry, computations)


def _operations(lines: list[str]) -> tuple[Operation, ...]:
    """Operations of one computation; attributes may run over several lines."""
    texts: list[str] = []
    for line in lines:
        if _OPERATION.match(line):
            texts.append(line)
        elif texts:
            texts[-1] += "\n" + line
    return tuple(operation for text in texts if (operation := _operation(text)))


def _operation(text: str) -> Operation | None:
    head = _OPERATION.match(text)
    kind = _KIND.match(head["rest"]) if head else None
    if head is None or kind is None:
        return None
    results = tuple(parse_array(match.group()) for match in _ARRAY.finditer(kind["type"]))
    arguments = _until_close(kind["tail"])
    return Operation(head["name"], kind["opcode"], results, tuple(_OPERAND.findall(arguments)), text.strip())


def _until_close(text: str) -> str:
    """The text before the parenthesis that closes an already open one."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter in "({") - (letter in ")}")
        if depth == 0:
            return text[:place]
    return text
