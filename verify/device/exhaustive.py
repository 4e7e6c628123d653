"""Every normal FP32 argument of a function, in blocks that are kept as they are done.

A function of one FP32 number has 2**32 arguments; with numpy's float64 function as the reference (see
`verify.device.envelopes` for what that is worth) they take minutes.  Subnormal arguments are left out, as every model
lets them be read as zero, and so are NaN and the infinities, about which no envelope speaks.

A block is one binade of one sign.  Its result is one line of the state file, written as soon as it is known: a run that
is stopped goes on where it was, and blocks that another machine, another jaxlib or another envelope gave are not used.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from verify.device.envelopes import FUNCTIONS, Envelope, Function, excess, fp32_envelope
from verify.records import RecordError, append_line, encode_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from verify.devices import DeviceModel

FORMAT = "flywheel-exhaustive/1"
BINADE = 1 << 23
PART = 1 << 17
"""Arguments handled at a time: their float64 numbers stay in the second-level cache."""


@dataclasses.dataclass(frozen=True)
class Block:
    """One binade of one sign.

    Attributes:
        function: its name.
        sign: 1 or -1.
        exponent: arguments are sign * [2**exponent, 2**(exponent + 1)).
    """

    function: str
    sign: int
    exponent: int

    def arguments(self) -> Iterator[np.ndarray]:
        """All FP32 numbers of the block, a part at a time."""
        first = (self.exponent + 127) << 23 | (1 << 31 if self.sign < 0 else 0)
        for offset in range(0, BINADE, PART):
            yield (np.uint32(first + offset) + np.arange(PART, dtype=np.uint32)).view(np.float32)


@dataclasses.dataclass(frozen=True)
class Found:
    """What one block gave: the largest error, as `verify.device.envelopes.excess` measures it, and its argument."""

    block: Block
    worst: float
    at: float


def blocks(function: Function) -> list[Block]:
    """All blocks of a function, the smallest arguments first."""
    last = 127 if function.largest is None else int(np.frexp(function.largest)[1]) - 2
    signs = (1, -1) if function.negative else (1,)
    return [Block(function.name, sign, exponent) for exponent in range(-126, last + 1) for sign in signs]


def measure_block(block: Block, model: DeviceModel, compiled: Callable[..., Any]) -> Found:
    """The largest error of one block."""
    function, worst, at = FUNCTIONS[block.function], 0.0, 0.0
    for x in block.arguments():
        error = excess(np.asarray(compiled(x)), x, function, model)
        position = int(error.argmax())
        if error[position] > worst:
            worst, at = float(error[position]), float(x[position])
    return Found(block, worst, at)


def measure_everywhere(
    name: str, model: DeviceModel, state: Path, *, progress: Callable[[float], None] | None = None
) -> Envelope:
    """The envelope of one function over every normal FP32 argument, from finished blocks and those still to do.

    Args:
        name: of the function.
        model: whose claim the result is compared with.
        state: file of finished blocks; it need not exist.
        progress: called with the part that is done.
    """
    function = FUNCTIONS[name]
    compiled = jax.jit(function.device)
    asked, key = blocks(function), conditions(model, function)
    done = finished(state, key)
    for number, block in enumerate(asked):
        if block not in done:
            done[block] = measure_block(block, model, compiled)
            append_line(state, _line(done[block], key))
        if progress is not None:
            progress((number + 1) / len(asked))
    worst = max((done[block] for block in asked), key=lambda found: found.worst)
    return fp32_envelope(function, model, len(asked) * BINADE, worst.worst, worst.at, exhaustive=True)


def conditions(model: DeviceModel, function: Function) -> dict[str, Any]:
    """What a block's result depends on."""
    return {
        "backend": jax.default_backend(),
        "machine": platform.machine(),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "numpy": np.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "absolute": function.absolute(model),
        "relative": function.relative(model),
    }


def finished(state: Path, key: dict[str, Any]) -> dict[Block, Found]:
    """Blocks of a state file that were measured under these conditions.

    Raises:
        RecordError: a line other than a torn last one is no block.
    """
    found: dict[Block, Found] = {}
    lines = state.read_text(encoding="utf-8").splitlines(keepends=True) if state.exists() else []
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            body = json.loads(line)
            block = Block(body["function"], body["sign"], body["exponent"])
            result = Found(block, float(body["worst"]), float.fromhex(body["at"]))
            fits = body["format"] == FORMAT and body["conditions"] == key
        except (ValueError, KeyError, TypeError) as error:
            message = f"{state}, line {number}: not a block of {FORMAT}: {error}"
            raise RecordError(message) from error
        if fits:
            found[block] = result
    return found


def _line(found: Found, key: dict[str, Any]) -> str:
    body = {
        "format": FORMAT,
        **dataclasses.asdict(found.block),
        "worst": encode_number(found.worst),
        "at": found.at.hex(),
        "conditions": key,
    }
    return json.dumps(body, allow_nan=False, separators=(",", ":"))
