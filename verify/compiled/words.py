"""The named values of a schedule, and how an operand's text reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from verify.compiled import scalar

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.compiled.scalar import Word

_INTEGER = re.compile(r"-?(?:0x[0-9a-f]+|\d+)")
_FLOAT = re.compile(r"-?(?:\d+\.\d*(?:e[+-]?\d+)?|inf|nan)")
_ANNOTATION = re.compile(r"(?<=[\w\]]) \[#\w+\]$|\[(?:resolvable|thread)[^\]]*\] *")
_ARGUMENT_NAME = re.compile(r"^@\w+=")
_ALLOCATION_SPACING = 20


class Words:
    """Values by name, constants and allocations, each in a slot of one list.

    Attributes:
        values: the words; None is unknown.
    """

    def __init__(self) -> None:
        self.values: list[Word] = []
        self._slots: dict[str | int, int] = {}
        self._allocations: dict[str, int] = {}

    def slot(self, key: str | int) -> int:
        """Where a named value or a constant is kept."""
        if key not in self._slots:
            self._slots[key] = len(self.values)
            self.values.append(key if isinstance(key, int) else None)
        return self._slots[key]

    def operand(self, text: str) -> int:
        """Slot of an operand; what cannot be read is an unknown value."""
        text = _ANNOTATION.sub("", _ARGUMENT_NAME.sub("", text.strip())).strip().removeprefix("$")
        if text.startswith("%"):
            return self.slot(text[1:])
        if _INTEGER.fullmatch(text):
            return self.slot(scalar.signed(int(text, 0)))
        if _FLOAT.fullmatch(text):
            return self.slot(scalar.float_word(float(text)))
        if text in {"true", "false"}:
            return self.slot(int(text == "true"))
        if text.startswith("#") or (text.startswith("[#") and " + " not in text):
            return self.slot(self.allocation(text.strip("[]")))
        return self.slot(f"?{text}")

    def allocation(self, name: str) -> int:
        """A made-up address of a named allocation, far from every other."""
        if name not in self._allocations:
            self._allocations[name] = (len(self._allocations) + 1) << _ALLOCATION_SPACING
        return self._allocations[name]

    def reader(self, text: str) -> Callable[[], Word]:
        """An address or operand that may be a sum, as `[#allocation3 + $0x1]`."""
        text = _ANNOTATION.sub("", _ARGUMENT_NAME.sub("", text.strip()))
        slots = [self.operand(part) for part in text.strip("[]").split(" + ")] if text else [self.slot("?")]
        words = self.values
        if len(slots) == 1:
            only = slots[0]
            return lambda: words[only]

        return lambda: scalar.total([words[slot] for slot in slots])
