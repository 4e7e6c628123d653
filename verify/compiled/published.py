"""Published timings of Pallas kernels on real TPUs, with the exact configurations that were run.

Tokamax ships its autotuning results in its wheel: for each argument shape and configuration, five measured times.  They
are read from the environment that holds the package; nothing of them is copied into this project.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

from verify.compiled.compile import CompilerMissingError

TABLE = Path("data/autotuning")
FLASH_TABLE = "pallas_mosaic_tpu_flash_attention.json"
DIRECTORIES = {"v5e": "tpu_v5_lite", "v5p": "tpu_v5", "v6e": "tpu_v6_lite", "v7x": "tpu7x"}

_SHAPE = re.compile(r"bf16\[([\d,]+)\]")


@dataclasses.dataclass(frozen=True)
class Timing:
    """One measured call of Tokamax's dense attention.

    Attributes:
        generation: the TPU it ran on.
        query: `[batch, tokens, heads, head_dim]`.
        key: the same for the keys.
        value: the same for the values.
        causal: whether it was masked.
        residuals: whether it also returned the softmax residuals.
        config: the kernel's configuration.
        seconds: median of the published times.
    """

    generation: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    causal: bool
    residuals: bool
    config: dict[str, Any]
    seconds: float

    @property
    def name(self) -> str:
        """Short name of the case."""
        batch, tokens, heads, head_dim = self.query
        kind = ("causal" if self.causal else "full") + (", residuals" if self.residuals else "")
        return f"{batch} x {tokens} x {heads} x {head_dim} {kind}"

    def options(self) -> dict[str, Any]:
        """Options of `verify.compiled.peers.tokamax_flash` for this call."""
        return {
            "query": list(self.query),
            "key": list(self.key),
            "value": list(self.value),
            "causal": self.causal,
            "residuals": self.residuals,
            "config": self.config,
        }


def package_directory(interpreter: str, package: str) -> Path:
    """Where a package lies in another environment; it is found, not imported.

    Raises:
        CompilerMissingError: the interpreter does not start or has no such package.
    """
    script = f"import importlib.util as u; s = u.find_spec({package!r}); print(s.origin if s else '')"
    try:
        done = subprocess.run([interpreter, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        message = f"cannot ask {interpreter} for {package}: {error}"
        raise CompilerMissingError(message) from error
    origin = done.stdout.strip()
    if not origin:
        message = f"{package} is not installed in {interpreter}"
        raise CompilerMissingError(message)
    return Path(origin).parent


def tokamax_timings(package: Path, generation: str) -> list[Timing]:
    """Published timings of one generation; empty where Tokamax has none."""
    path = package / TABLE / DIRECTORIES[generation] / FLASH_TABLE
    if not path.exists():
        return []
    return parse_timings(path.read_text(), generation)


def parse_timings(text: str, generation: str) -> list[Timing]:
    """Read one autotuning table; calls that the splash kernel's wrapper does not take are left out."""
    found = []
    for key, configurations in json.loads(text).items():
        call = json.loads(key)
        shapes = [_SHAPE.fullmatch(call[name]) for name in ("query", "key", "value") if name in call] or [
            _SHAPE.fullmatch(call[name]) for name in ("q", "k", "v")
        ]
        mask = call.get("mask") or {}
        plain = all(call.get(name) is None for name in ("bias", "logits_soft_cap", "dropout_mask", "paging_info"))
        if None in shapes or not plain or any(mask.get(name) for name in ("bool_mask", "q_start", "k_start")):
            continue
        query, key_shape, value = (tuple(map(int, shape.group(1).split(","))) for shape in shapes if shape)
        found += [
            Timing(
                generation=generation,
                query=query,
                key=key_shape,
                value=value,
                causal=bool(mask.get("causal_mask")) or bool(mask.get("is_causal")),
                residuals=bool(call.get("return_residuals")),
                config=json.loads(config),
                seconds=statistics.median(measured["evaluation_times_ms"]) / 1e3,
            )
            for config, measured in configurations.items()
            if config != "{}"
        ]
    return found
