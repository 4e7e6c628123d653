"""The TPU generations that can be compiled for: how the compiler names them, and the figures a model needs.

Every rate is per *device*, the thing one compiled program runs on: a chip on v5e and v6e, both TensorCores of a chip on
v5p (megacore), one of the two TensorCores of a chip on v7x.

Where the figures come from:

- peak, HBM bandwidth, VMEM, matrix units: the published specifications of the chip, divided by its devices;
- `vmatmul_cycles`: read off dense schedules, where one `vmatmul` of 16 BF16 rows follows the next on its matrix unit
  after 16 cycles (128-wide units of v5e and v5p) or 8 cycles (256-wide units of v6e and v7x);
- clock: inferred, as the published peak divided by the FLOP per cycle that the two lines above give;
- delay slots: the bundles after a branch that are always executed, read off the region marks of the dumps (every dump
  that is read is checked against it).
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation.

    Attributes:
        name: how people call it, and the key of `GENERATIONS`.
        topology: the name libtpu knows a single chip by.
        chips: that topology's extent.
        accelerator_type: value of TPU_ACCELERATOR_TYPE.
        device_kind: what JAX calls the device.
        cores: TensorCores of one device (2 where the compiler may split a grid over a megacore).
        peak_flops: dense BF16 FLOP per second of the device.
        mxu_count: matrix units of one core.
        mxu_size: rows and columns of one matrix unit.
        vmatmul_cycles: how long one `vmatmul` of 16 BF16 rows holds its matrix unit.
        hbm_bytes_per_second: nominal bandwidth of the device.
        vmem_bytes: VMEM of one core.
        delay_slots: bundles after a branch that are always executed.
    """

    name: str
    topology: str
    chips: tuple[int, int, int]
    accelerator_type: str
    device_kind: str
    cores: int
    peak_flops: float
    mxu_count: int
    mxu_size: int
    vmatmul_cycles: int
    hbm_bytes_per_second: float
    vmem_bytes: int
    delay_slots: int

    @property
    def flop_per_cycle(self) -> int:
        """Dense BF16 FLOP per cycle of one core."""
        rows_per_cycle = VMATMUL_ROWS_BF16 / self.vmatmul_cycles
        return int(2 * rows_per_cycle * self.mxu_size**2 * self.mxu_count)

    @property
    def clock_hz(self) -> float:
        """Inferred, never measured: published peak / FLOP per cycle."""
        return self.peak_flops / (self.flop_per_cycle * self.cores)

    @property
    def hbm_bytes_per_cycle(self) -> float:
        """Nominal HBM bytes per cycle, shared by the cores of the device."""
        return self.hbm_bytes_per_second / self.clock_hz

    def seconds(self, cycles: float) -> float:
        """Modelled time of that many cycles."""
        return cycles / self.clock_hz


VMATMUL_ROWS_BF16 = 16
MIB = 2**20

GENERATIONS = MappingProxyType(
    {
        generation.name: generation
        for generation in (
            Generation(
                name="v5e",
                topology="v5e:1x1",
                chips=(1, 1, 1),
                accelerator_type="v5litepod-1",
                device_kind="TPU v5 lite",
                cores=1,
                peak_flops=197e12,
                mxu_count=4,
                mxu_size=128,
                vmatmul_cycles=16,
                hbm_bytes_per_second=819e9,
                vmem_bytes=128 * MIB,
                delay_slots=4,
            ),
            Generation(
                name="v5p",
                topology="v5p:1x1x1",
                chips=(1, 1, 1),
                accelerator_type="v5p-8",
                device_kind="TPU v5",
                cores=2,
                peak_flops=459e12,
                mxu_count=4,
                mxu_size=128,
                vmatmul_cycles=16,
                hbm_bytes_per_second=2765e9,
                vmem_bytes=64 * MIB,
                delay_slots=4,
            ),
            Generation(
                name="v6e",
                topology="v6e:1x1",
                chips=(1, 1, 1),
                accelerator_type="v6e-1",
                device_kind="TPU v6 lite",
                cores=1,
                peak_flops=918e12,
                mxu_count=2,
                mxu_size=256,
                vmatmul_cycles=8,
                hbm_bytes_per_second=1640e9,
                vmem_bytes=128 * MIB,
                delay_slots=4,
            ),
            Generation(
                name="v7x",
                topology="tpu7x:1x1x1",
                chips=(1, 1, 1),
                accelerator_type="tpu7x-1",
                device_kind="TPU7x",
                cores=1,
                peak_flops=2307e12 / 2,
                mxu_count=2,
                mxu_size=256,
                vmatmul_cycles=8,
                hbm_bytes_per_second=7380e9 / 2,
                vmem_bytes=64 * MIB,
                delay_slots=6,
            ),
        )
    }
)


def generation(name: str) -> Generation:
    """The generation of that name.

    Raises:
        ValueError: nobody knows that name.
    """
    if name not in GENERATIONS:
        message = f"generation must be one of {', '.join(GENERATIONS)}, got {name!r}"
        raise ValueError(message)
    return GENERATIONS[name]
