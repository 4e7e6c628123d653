"""Which device model describes the backend this process runs on."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from verify import backend
from verify.device.envelopes import FUNCTIONS, Envelope, measure_bf16, measure_fp32, measure_widened
from verify.device.exhaustive import measure_everywhere
from verify.records import encode_number

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from verify.devices import DeviceModel

FORMAT = "flywheel-device/1"

STATE = Path("exhaustive.jsonl")
"""In the working directory."""

MEASURED = Path(__file__).parents[1] / "data" / "device-cpu-interpret.json"
"""What `python -m verify.device measure --exhaustive --json FILE` found: the source of the model cpu-interpret."""


@dataclasses.dataclass(frozen=True)
class Properties:
    """What the backend does apart from its functions, each by one probe.

    Attributes:
        flushes: a subnormal FP32 product becomes zero.
        fused_multiply_add: x * y + z is rounded once.
        default_dot: operands of an FP32 matrix product at default precision: "fp32" or "bf16".
        rounds_bf16: every elementwise BF16 operation is rounded to BF16.
        rounds_to_nearest: 1 + 3 * 2**-25 becomes 1 + 2**-23 (half-way and above goes up), 1 + 2**-25 stays 1.
        copies: what is wrong with a Pallas kernel that copies its input; None if nothing is.
    """

    flushes: bool
    fused_multiply_add: bool
    default_dot: str
    rounds_bf16: bool
    rounds_to_nearest: bool
    copies: str | None

    def disagreements(self, model: DeviceModel) -> list[str]:
        """What the model says otherwise."""
        pairs = (
            ("subnormal results become zero", model.flushes, self.flushes),
            ("x * y + z rounds once", model.fused_multiply_add, self.fused_multiply_add),
            ("operands of an FP32 product at default precision", model.default_dot, self.default_dot),
        )
        found = [f"{what}: model {said}, measured {seen}" for what, said, seen in pairs if said != seen]
        if not self.rounds_to_nearest:
            found.append("FP32 addition does not round to nearest")
        if not self.rounds_bf16:
            found.append("BF16 operations keep excess precision")
        if self.copies is not None:
            found.append(self.copies)
        return found


def probe_properties() -> Properties:
    """Probe the backend."""
    return Properties(
        flushes=backend.flush_to_zero() is None,
        fused_multiply_add=backend.contraction() is not None,
        default_dot=_default_dot(),
        rounds_bf16=backend.excess_precision() is None,
        rounds_to_nearest=_rounds_to_nearest(),
        copies=backend.copies(),
    )


def _default_dot() -> str:
    """1 + 2**-9 is no BF16 number: a product that rounds its operands loses the last bit."""
    x = jnp.full((8, 8), 1.0 + 2.0**-9, jnp.float32)
    got = jax.jit(jnp.dot)(x, jnp.eye(8, dtype=jnp.float32))
    return "fp32" if bool((got == x).all()) else "bf16"


def _rounds_to_nearest() -> bool:
    add = jax.jit(jnp.add)
    one = jnp.float32(1.0)
    return (
        float(add(one, jnp.float32(3 * 2.0**-25))) == 1.0 + 2.0**-23 and float(add(one, jnp.float32(2.0**-25))) == 1.0
    )


@dataclasses.dataclass(frozen=True)
class Fit:
    """How one model compares with what was measured.

    Attributes:
        model: the model.
        disagreements: properties it states otherwise, and envelopes that were left.
        envelopes: every measured envelope against the model's claim.
    """

    model: DeviceModel
    disagreements: tuple[str, ...]
    envelopes: tuple[Envelope, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing disagrees."""
        return not self.disagreements


def fit(
    model: DeviceModel,
    properties: Properties,
    *,
    exhaustive: Collection[str] = (),
    state: Path = STATE,
    progress: Callable[[str, float], None] | None = None,
) -> Fit:
    """Compare one model with the backend; a model whose properties disagree is not measured further.

    Args:
        model: the model.
        properties: of `probe_properties`.
        exhaustive: names of functions to measure at every normal FP32 argument (minutes each) instead of a sample.
        state: where finished blocks of those lie, so that a stopped run goes on (`verify.device.exhaustive`).
        progress: called with a function's name and the part that is done.
    """
    disagreements = properties.disagreements(model)
    if disagreements:
        return Fit(model, tuple(disagreements), ())
    found: list[Envelope] = []
    for name, function in FUNCTIONS.items():

        def report(done: float, name: str = name) -> None:
            if progress is not None:
                progress(name, done)

        found.append(measure_widened(function, model))
        if name in model.bf16_ulp:
            found.append(measure_bf16(function, model))
        if name in exhaustive:
            found.append(measure_everywhere(name, model, state, progress=report))
        else:
            found.append(measure_fp32(function, model, progress=report))
    left = [
        f"{e.name} ({e.arguments}): {e.worst_ulp:.4g} ulp at {e.at:.9g}, the model claims {e.claimed_ulp:.4g}"
        for e in found
        if not e.holds
    ]
    return Fit(model, tuple(left), tuple(found))


def to_json(properties: Properties, fits: Collection[Fit]) -> dict[str, Any]:
    """What was measured, as strict JSON."""
    return {
        "format": FORMAT,
        "backend": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "properties": dataclasses.asdict(properties),
        "models": {
            f.model.name: {
                "fits": f.fits,
                "disagreements": list(f.disagreements),
                "envelopes": [
                    {key: encode_number(x) if isinstance(x, float) else x for key, x in dataclasses.asdict(e).items()}
                    for e in f.envelopes
                ],
            }
            for f in fits
        },
    }
