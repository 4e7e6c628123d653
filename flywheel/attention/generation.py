"""Which TPU a call is traced for, as far as the choice of blocks depends on it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

from jax.experimental.pallas import tpu as pltpu

_MIB = 2**20


class Hardware(NamedTuple):
    """One TPU core.

    Attributes:
        name: the generation, if there are measurements or models of it.
        mxu_width: rows and columns of a matrix unit.
        vmem_bytes: VMEM.
        cores: cores that share a call.
    """

    name: str | None
    mxu_width: int
    vmem_bytes: int
    cores: int = 1


KNOWN = MappingProxyType(
    {
        "v5e": Hardware("v5e", 128, 128 * _MIB),
        "v6e": Hardware("v6e", 256, 128 * _MIB),
        "v7x": Hardware("v7x", 256, 64 * _MIB),
    }
)
"""What the published specifications say of the generations that the blocks are tabulated for."""

_VERSIONS = MappingProxyType(
    {
        pltpu.ChipVersion.TPU_V5E: "v5e",
        pltpu.ChipVersion.TPU_V6E: "v6e",
        pltpu.ChipVersion.TPU_7: "v7x",
        pltpu.ChipVersion.TPU_7X: "v7x",
    }
)

ABSENT = Hardware(None, 256, 64 * _MIB)
"""Without a TPU: the width of the present generations, the smallest VMEM."""


def hardware(generation: Any) -> Hardware:  # noqa: ANN401  anything a caller may pass
    """The core that a call is traced for: of a generation by name, or (None) the one that JAX would run on.

    Raises:
        ValueError: no known generation.
    """
    if generation is not None:
        if not isinstance(generation, str) or generation not in KNOWN:
            message = f"config.generation must be None or one of {tuple(KNOWN)}, got {generation!r}"
            raise ValueError(message)
        return KNOWN[generation]
    try:
        info = pltpu.get_tpu_info()
    except ValueError:
        return ABSENT
    name = _VERSIONS.get(info.chip_version)  # type: ignore[arg-type]
    if name is not None:
        return KNOWN[name]
    return Hardware(None, info.mxu_column_size, info.vmem_capacity_bytes, info.num_cores)
