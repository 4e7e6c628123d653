"""Trace files as they lie on disk: names, dtypes and settings, checked before anything is computed from them.

Tensors are named `q`, `k`, `v` (one layer) or `<layer>.q`, `<layer>.k`, `<layer>.v`; layer names are made of letters,
digits, `_`, `-` and `.`.  Settings are `scale` (a finite real number) and `causal` (a boolean) for the whole file, or
`<layer>.scale`, `<layer>.causal` for one layer.  `provenance` is a JSON object, kept and never interpreted.

| | `.npz` | `.safetensors` |
| --- | --- | --- |
| tensors | uint16 (BF16 words), or float32 that BF16 holds exactly | BF16 |
| `scale` | 0-d real array | metadata, a decimal number |
| `causal` | 0-d bool array | metadata, `true` or `false` |
| `provenance` | 0-d string array | metadata |

The metadata key `format`, which other libraries write into safetensors files, is accepted and ignored.  Any other name
or dtype is refused, and so is every value that is NaN or infinite.  Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import safetensors

from verify.attention.problem import BF16
from verify.traces.bits import from_bits

if TYPE_CHECKING:
    from pathlib import Path

LAYER = r"[A-Za-z0-9_.-]+"
TENSOR_NAME = re.compile(rf"(?:(?P<layer>{LAYER})\.)?(?P<part>[qkv])")
SETTING_NAME = re.compile(rf"(?:(?P<layer>{LAYER})\.)?(?P<part>scale|causal)")
NAMES = (
    "names are q, k, v or <layer>.q, <layer>.k, <layer>.v, with optional scale, causal, <layer>.scale, <layer>.causal"
    " and provenance"
)
RANKS = (3, 4)


class TraceError(ValueError):
    """A trace file that breaks the format; the message names the file, the tensor, the value and the rule."""


@dataclasses.dataclass(frozen=True, eq=False)
class RawTrace:
    """Checked contents of one file, not yet assembled into layers.

    Attributes:
        tensors: layer name ("" for the bare `q`, `k`, `v`) -> part -> BF16 array of rank 3 or 4.
        scale: layer name ("" for the whole file) -> factor of the logits, where the file states it.
        causal: layer name ("" for the whole file) -> causal mask or none, where the file states it.
        provenance: the file's own account of where it comes from; empty if it has none.
    """

    tensors: dict[str, dict[str, np.ndarray]]
    scale: dict[str, float]
    causal: dict[str, bool]
    provenance: dict[str, Any]

    @classmethod
    def empty(cls) -> RawTrace:
        """A trace to be filled."""
        return cls({}, {}, {}, {})


def refuse(path: Path, what: str, got: object, rule: str) -> TraceError:
    """The error of a value that breaks a rule."""
    return TraceError(f"{path}: {what} is {got}; {rule}")


def read(path: Path) -> RawTrace:
    """Read a `.npz` or `.safetensors` file.

    Raises:
        TraceError: the file is missing, unreadable, or breaks a rule of the module's docstring.
    """
    readers = {".npz": read_npz, ".safetensors": read_safetensors}
    reader = readers.get(path.suffix)
    if reader is None:
        raise refuse(path, "the suffix", repr(path.suffix), "a trace is a .npz or .safetensors file")
    if not path.is_file():
        raise refuse(path, "the file", "not there", "a trace is a .npz or .safetensors file")
    return reader(path)


def read_npz(path: Path) -> RawTrace:
    """Read a `.npz` file, with pickles refused."""
    rule = "a .npz file is what numpy.savez writes"
    raw = RawTrace.empty()
    # Opened here, because numpy leaves a file that is no archive open.
    with path.open("rb") as stream:
        try:
            file = np.load(stream, allow_pickle=False)
        except (zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
            raise refuse(path, "the content", f"unreadable ({error})", rule) from error
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise refuse(path, "the content", "a single array", rule)
        with file:
            for name in unique(path, file.files):
                add_npz_member(path, raw, name, npz_member(path, name, file))
    return raw


def npz_member(path: Path, name: str, file: np.lib.npyio.NpzFile) -> np.ndarray:
    """One array of a `.npz` file; numpy raises ValueError for an array of Python objects, unread."""
    try:
        # numpy hands members that are no .npy out as bytes, which its annotation does not say.
        value = cast("object", file[name])
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise refuse(
            path, f"array {name!r}", f"unreadable ({error})", "arrays are plain numbers, not pickled"
        ) from error
    if not isinstance(value, np.ndarray):
        raise refuse(path, f"member {name!r}", "no array", "a .npz file holds .npy arrays alone")
    return value


def unique(path: Path, names: list[str]) -> list[str]:
    """The names, once it is sure that none comes twice (a zip may hold two members of one name)."""
    for name in names:
        if names.count(name) > 1:
            raise refuse(path, f"the name {name!r}", "there more than once", "each tensor and setting is stated once")
    return names


def add_npz_member(path: Path, raw: RawTrace, name: str, value: np.ndarray) -> None:
    """Check one array of a `.npz` file and file it under its layer."""
    if match := TENSOR_NAME.fullmatch(name):
        tensor = npz_tensor(path, name, value)
        raw.tensors.setdefault(match["layer"] or "", {})[match["part"]] = checked_tensor(path, name, tensor)
    elif match := SETTING_NAME.fullmatch(name):
        layer = match["layer"] or ""
        if match["part"] == "scale":
            raw.scale[layer] = npz_scale(path, name, value)
        else:
            raw.causal[layer] = npz_causal(path, name, value)
    elif name == "provenance":
        if value.ndim != 0 or value.dtype.kind != "U":
            raise refuse(path, "provenance", describe(value), "it is a 0-d string array that holds a JSON object")
        raw.provenance.update(parse_provenance(path, value.item()))
    else:
        raise refuse(path, f"array {name!r}", "of no known name", NAMES)


def describe(value: np.ndarray) -> str:
    """Dtype and shape, for messages."""
    return f"{value.dtype} of shape {value.shape}"


def npz_tensor(path: Path, name: str, value: np.ndarray) -> np.ndarray:
    """A tensor of a `.npz` file as BF16."""
    if value.dtype == np.uint16:
        return from_bits(value)
    if value.dtype == np.float32:
        return exact_bf16(path, name, value)
    rule = (
        "tensors in a .npz are uint16 (BF16 words) or float32 that BF16 holds exactly"
        " (numpy cannot store BF16 itself: save x.view(numpy.uint16))"
    )
    raise refuse(path, f"tensor {name!r}", describe(value), rule)


def exact_bf16(path: Path, name: str, value: np.ndarray) -> np.ndarray:
    """Float32 numbers as BF16, refused when that would round."""
    words = np.ascontiguousarray(value).view(np.uint32)
    lost = (words & 0xFFFF) != 0
    if lost.any():
        index = tuple(int(i) for i in np.argwhere(lost)[0])
        rule = (
            f"float32 must be exact in BF16, and {int(lost.sum())} of {lost.size} values are not (round them yourself)"
        )
        raise refuse(path, f"tensor {name!r} at {index}", repr(float(value[index])), rule)
    return from_bits((words >> 16).astype(np.uint16))


def npz_scale(path: Path, name: str, value: np.ndarray) -> float:
    """A scale of a `.npz` file."""
    if value.ndim != 0 or value.dtype.kind not in "fiu":
        raise refuse(path, name, describe(value), "it is a 0-d real array")
    return finite_scale(path, name, float(value))


def npz_causal(path: Path, name: str, value: np.ndarray) -> bool:
    """A causal flag of a `.npz` file."""
    if value.ndim != 0 or value.dtype != np.bool_:
        raise refuse(path, name, describe(value), "it is a 0-d bool array")
    return bool(value)


def read_safetensors(path: Path) -> RawTrace:
    """Read a `.safetensors` file."""
    raw = RawTrace.empty()
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            for key, text in (file.metadata() or {}).items():
                add_metadata(path, raw, key, text)
            for name in file.keys():  # noqa: SIM118 (a safe_open handle is not iterable)
                add_safetensor(path, raw, name, file)
    except (safetensors.SafetensorError, OSError) as error:
        rule = "a .safetensors file is what safetensors writes"
        raise refuse(path, "the content", f"unreadable ({error})", rule) from error
    return raw


def add_safetensor(path: Path, raw: RawTrace, name: str, file: safetensors.safe_open) -> None:
    """Check one tensor of a `.safetensors` file and file it under its layer."""
    match = TENSOR_NAME.fullmatch(name)
    if match is None:
        raise refuse(path, f"tensor {name!r}", "of no known name", NAMES)
    dtype = file.get_slice(name).get_dtype()
    if dtype != "BF16":
        raise refuse(path, f"tensor {name!r}", dtype, "tensors in a .safetensors are BF16")
    # safetensors hands BF16 over as ml_dtypes' type, whose words these are.
    tensor = file.get_tensor(name).view(BF16)
    raw.tensors.setdefault(match["layer"] or "", {})[match["part"]] = checked_tensor(path, name, tensor)


def add_metadata(path: Path, raw: RawTrace, key: str, text: str) -> None:
    """Check one metadata entry of a `.safetensors` file."""
    if match := SETTING_NAME.fullmatch(key):
        layer = match["layer"] or ""
        if match["part"] == "scale":
            raw.scale[layer] = text_scale(path, key, text)
        else:
            raw.causal[layer] = text_causal(path, key, text)
    elif key == "provenance":
        raw.provenance.update(parse_provenance(path, text))
    elif key != "format":
        raise refuse(path, f"metadata {key!r}", "of no known name", NAMES)


def text_scale(path: Path, name: str, text: str) -> float:
    """A scale written as text."""
    try:
        value = float(text)
    except ValueError as error:
        raise refuse(path, name, repr(text), "it is a decimal number") from error
    return finite_scale(path, name, value)


def text_causal(path: Path, name: str, text: str) -> bool:
    """A causal flag written as text."""
    flags = {"true": True, "false": False}
    if text not in flags:
        raise refuse(path, name, repr(text), "it is 'true' or 'false'")
    return flags[text]


def finite_scale(path: Path, name: str, value: float) -> float:
    """The scale, once it is sure to be finite."""
    if not math.isfinite(value):
        raise refuse(path, name, value, "the scale of the logits is finite")
    return value


def parse_provenance(path: Path, text: str) -> dict[str, Any]:
    """The JSON object of a `provenance` entry."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise refuse(path, "provenance", f"not JSON ({error})", "it is a JSON object") from error
    if not isinstance(value, dict):
        raise refuse(path, "provenance", f"a JSON {type(value).__name__}", "it is a JSON object")
    return value


def checked_tensor(path: Path, name: str, tensor: np.ndarray) -> np.ndarray:
    """The tensor, once its rank and its values are sure to be those of a problem inside the domain."""
    if tensor.ndim not in RANKS or 0 in tensor.shape:
        rule = "the layout is [heads, tokens, head_dim] or [batch, heads, tokens, head_dim], no extent zero"
        raise refuse(path, f"tensor {name!r}", f"of shape {tensor.shape}", rule)
    finite = np.isfinite(tensor)
    if not finite.all():
        index = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise refuse(path, f"tensor {name!r} at {index}", float(tensor[index]), "every value is finite")
    return tensor
