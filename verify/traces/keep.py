"""What a capture keeps of a model's tensors, and the file it becomes."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from verify.traces.bits import to_bits

if TYPE_CHECKING:
    from pathlib import Path

    from verify.traces.forward import Config

LOSS_LIMIT = 2.5
"""Largest mean next-token loss, in nats, of a capture that is written.

It parts a right forward pass from a wrong one: on the committed text the model's loss is 1.5, and with rotary pairs
taken half-split, q, k and v look as plausible and the loss is 4.6."""


class CaptureError(ValueError):
    """A capture that cannot be made, or whose result must not be written."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """What of the model's q, k, v goes into the trace.

    Attributes:
        layers: indices of the layers.  By default the first (no sink yet), one with logits beyond 30 nats but a weak
            sink, the one with the strongest sink and the largest logits, and the last.
        kv_heads: indices of the KV heads; each brings the query heads that read it.
        tokens: length of the text's beginning that is used; 384 is three blocks of 128.
    """

    layers: tuple[int, ...] = (0, 7, 18, 29)
    kv_heads: tuple[int, ...] = (1, 2)
    tokens: int = 384

    def query_heads(self, config: Config) -> list[int]:
        """The query heads that read the chosen KV heads, in order."""
        group = config.heads // config.kv_heads
        return [kv_head * group + member for kv_head in self.kv_heads for member in range(group)]

    def check(self, config: Config) -> None:
        """Compare with the model.

        Raises:
            CaptureError: an index is out of range or the order is not ascending, or the token count is impossible.
        """
        for name, chosen, count in (
            ("layers", self.layers, config.layers),
            ("KV heads", self.kv_heads, config.kv_heads),
        ):
            ascending = list(chosen) == sorted(set(chosen))
            if not (chosen and ascending and chosen[0] >= 0 and chosen[-1] < count):
                message = f"{name} must be ascending indices from 0 to {count - 1}, got {list(chosen)}"
                raise CaptureError(message)
        if not 2 <= self.tokens <= config.context:
            message = f"tokens must be from 2 to {config.context}, got {self.tokens}"
            raise CaptureError(message)


@dataclasses.dataclass(frozen=True, eq=False)
class Capture:
    """A finished capture.

    Attributes:
        tensors: BF16, `layerNN.q` `[heads, tokens, head_dim]`, `layerNN.k` and `layerNN.v`
            `[kv_heads, tokens, head_dim]`.
        scale: factor of the logits, head_dim ** -0.5.
        loss: mean next-token loss, in nats.
        provenance: where the tensors come from, as JSON can hold it.
    """

    tensors: dict[str, np.ndarray]
    scale: float
    loss: float
    provenance: dict[str, Any]

    def write(self, out: Path) -> None:
        """Write the `.npz` file, whole or not at all.

        Raises:
            CaptureError: the loss is above the limit, so that the tensors are not what the model computes; or the
                file's suffix is not `.npz`.
        """
        check_out(out)
        # Not (loss <= limit), so that a NaN is refused too.
        if not self.loss <= LOSS_LIMIT:
            message = (
                f"the mean next-token loss is {self.loss:.3f} nats, must be at most {LOSS_LIMIT}: the model does not"
                f" predict this text, so either the forward pass is wrong or the text is unlike what it was trained on;"
                f" {out} is not written"
            )
            raise CaptureError(message)
        part = out.with_name(out.name + ".part")
        arrays: dict[str, Any] = {name: to_bits(tensor) for name, tensor in self.tensors.items()}
        arrays |= {"scale": self.scale, "causal": True, "provenance": json.dumps(self.provenance, sort_keys=True)}
        try:
            with part.open("wb") as file:
                np.savez(file, **arrays)
            part.replace(out)
        finally:
            part.unlink(missing_ok=True)


def check_out(out: Path) -> None:
    """Refuse a file name that could not be loaded again."""
    if out.suffix != ".npz":
        message = f"the output must end in .npz, got {out.name}"
        raise CaptureError(message)
    if not out.parent.is_dir():
        message = f"the output's folder must exist, got {out.parent}"
        raise CaptureError(message)
