"""Traces as attention problems: q, k, v of a real model, from the committed file or a user's own.

`verify.traces.read` states the file formats.  Defaults where a file states nothing: causal attention, and
scale = head_dim ** -0.5.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verify.attention.problem import AttentionProblem
from verify.traces.read import NAMES, RawTrace, read, refuse

if TYPE_CHECKING:
    import numpy as np

PARTS = ("q", "k", "v")
CAUSAL = True
"""What a file that does not state `causal` means."""


@dataclasses.dataclass(frozen=True, eq=False)
class TraceLayer:
    """One attention call of a model.

    Attributes:
        name: the layer's name in the file; "" for a file with bare `q`, `k`, `v`.
        q: BF16 `[batch, heads, q_len, head_dim]`, after the rotary step, unscaled.
        k: BF16 `[batch, kv_heads, kv_len, head_dim]`, after the rotary step.
        v: BF16 `[batch, kv_heads, kv_len, head_dim]`.
        causal: bottom-right aligned causal mask, as in `AttentionProblem`.
        scale: factor of the natural-log logits.
    """

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool
    scale: float

    def problem(self) -> AttentionProblem:
        """The layer as the oracles and kernels take it."""
        return AttentionProblem(self.q, self.k, self.v, causal=self.causal, scale=self.scale)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """A trace file.

    Attributes:
        name: the file's name without suffix.
        layers: its attention calls, in natural order of their names (layer2 before layer10).
        provenance: the file's own account of where it comes from; empty if it has none.
    """

    name: str
    layers: tuple[TraceLayer, ...]
    provenance: dict[str, Any]

    def problems(self) -> list[tuple[str, AttentionProblem]]:
        """Each layer as (`<trace>/<layer>`, problem); `<trace>` alone for a file with bare `q`, `k`, `v`."""
        return [(f"{self.name}/{layer.name}".rstrip("/"), layer.problem()) for layer in self.layers]


def committed_trace() -> Path:
    """The trace that comes with the project (see the README.md beside it)."""
    return Path(__file__).parent / "data" / "smollm2-135m.npz"


def load_trace(path: str | Path) -> Trace:
    """Load a trace file.

    Args:
        path: a `.npz` or `.safetensors` file in the format of `verify.traces.read`.

    Raises:
        verify.traces.read.TraceError: the file breaks the format, or its tensors do not fit together; the message
            names the file, the tensor, the value and the rule.
    """
    path = Path(path)
    raw = read(path)
    if not raw.tensors:
        raise refuse(path, "the content", "without a tensor", NAMES)
    if "" in raw.tensors and len(raw.tensors) > 1:
        named = next(name for name in raw.tensors if name)
        raise refuse(
            path, "the content", f"both bare q, k, v and a layer {named!r}", "a file uses one of the two forms"
        )
    for name in raw.scale | raw.causal:
        if name and name not in raw.tensors:
            raise refuse(path, f"layer {name!r}", "given settings but no tensor", NAMES)
    layers = tuple(layer(path, raw, name) for name in sorted(raw.tensors, key=natural))
    return Trace(path.stem, layers, raw.provenance)


def natural(name: str) -> list[tuple[int, str]]:
    """Sorting key that reads runs of digits as numbers."""
    return [(int(run), "") if run.isdecimal() else (-1, run) for run in re.split(r"(\d+)", name)]


def stated[T](values: dict[str, T], name: str, default: T) -> T:
    """The layer's own value, else the file's, else the default."""
    return values[name] if name in values else values.get("", default)


def layer(path: Path, raw: RawTrace, name: str) -> TraceLayer:
    """One layer, once its tensors are sure to fit together."""
    tensors = raw.tensors[name]
    label = f"layer {name!r}" if name else "the trace"
    missing = [part for part in PARTS if part not in tensors]
    if missing:
        raise refuse(path, label, f"without {' and '.join(missing)}", "a layer has all of q, k and v")
    q, k, v = (tensors[part] for part in PARTS)
    if not q.ndim == k.ndim == v.ndim:
        shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
        raise refuse(path, label, f"of mixed rank: {shapes}", "q, k and v all have a batch axis or all have none")
    if q.ndim == 3:
        q, k, v = q[None], k[None], v[None]
    scale = stated(raw.scale, name, q.shape[-1] ** -0.5)
    result = TraceLayer(name, q, k, v, causal=stated(raw.causal, name, CAUSAL), scale=scale)
    try:
        result.problem()
    except ValueError as error:
        raise refuse(path, label, "no attention problem", str(error)) from error
    return result
