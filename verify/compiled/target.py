"""What is compiled: a callable, its array arguments, its static options."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = MappingProxyType(
    {
        "bf16": "bfloat16",
        "f16": "float16",
        "f32": "float32",
        "i8": "int8",
        "s8": "int8",
        "u8": "uint8",
        "i16": "int16",
        "i32": "int32",
        "s32": "int32",
        "u32": "uint32",
        "bool": "bool",
        "pred": "bool",
        "f8_e4m3fn": "float8_e4m3fn",
        "f8_e5m2": "float8_e5m2",
    }
)

_ARGUMENT = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\](?:=(?P<value>-?\d+(?:,-?\d+)*))?"
)
_REFERENCE = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array argument.

    Attributes:
        shape: its extent.
        dtype: NumPy's name of its type.
        name: keyword it is passed by; None passes it by position.
        value: its elements in row-major order where they decide what the kernel does (lengths, page tables, masks), so
            that the scalar program can be executed; None if unknown or irrelevant.
    """

    shape: tuple[int, ...]
    dtype: str
    name: str | None = None
    value: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> Argument:
        """Read `[name=]dtype[shape][=values]`, as in `bf16[1,8,1024,128]` or `lengths=i32[3]=13,30,70`.

        Raises:
            ValueError: the text is not of that form, the type is unknown or the number of values is wrong.
        """
        match = _ARGUMENT.fullmatch(text.strip())
        if match is None:
            message = f"an argument reads [name=]dtype[shape][=values], as in bf16[1,8,1024,128]; got {text!r}"
            raise ValueError(message)
        if match["dtype"] not in DTYPES:
            message = f"dtype must be one of {', '.join(DTYPES)}, got {match['dtype']!r} in {text!r}"
            raise ValueError(message)
        shape = tuple(int(extent) for extent in match["shape"].split(",") if extent.strip())
        value = tuple(int(word) for word in match["value"].split(",")) if match["value"] else None
        size = 1
        for extent in shape:
            size *= extent
        if value is not None and len(value) != size:
            message = f"{text!r} has {size} elements, got {len(value)} values"
            raise ValueError(message)
        return cls(shape, DTYPES[match["dtype"]], match["name"], value)


@dataclasses.dataclass(frozen=True)
class Target:
    """A callable to compile.

    Attributes:
        reference: `package.module:callable` or `path/file.py:callable`.
        arguments: its array arguments; none for a factory.
        options: keyword arguments that are not arrays (they must be representable in JSON).
        factory: the callable takes the options alone and returns `(function, arguments)` or
            `(function, arguments, {index of an array leaf: value})`, arguments being `jax.ShapeDtypeStruct`s.
        path: directories to put on the import path, for packages that are not installed.
    """

    reference: str
    arguments: tuple[Argument, ...] = ()
    options: Mapping[str, object] = dataclasses.field(default=MappingProxyType({}), hash=False)
    factory: bool = False
    path: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if _REFERENCE.fullmatch(self.reference) is None:
            message = f"a target reads package.module:callable or path/file.py:callable, got {self.reference!r}"
            raise ValueError(message)
        place = self.reference.rpartition(":")[0]
        if place.endswith(".py") and not Path(place).is_file():
            message = f"target {self.reference!r}: there is no file {place}"
            raise ValueError(message)
        if self.factory and self.arguments:
            message = f"a factory makes its own arguments, got {len(self.arguments)} shapes for {self.reference!r}"
            raise ValueError(message)
        if not self.factory and not self.arguments:
            message = f"{self.reference!r} needs the shapes of its array arguments"
            raise ValueError(message)
