"""Numerics models of the machines that run the kernels, as data.

The contract's bounds take a model as an argument.  Every number has a source; *measured* figures were measured on the
backend itself, *inferred* ones were not and say so.  `python -m verify devices` measures the machine it runs on and
compares.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """What one backend may do to an FP32 operation.

    Attributes:
        name: the record's name.
        unit_roundoff: of FP32 add, subtract and multiply: |fl(x) - x| <= u |x|.
        dot_unit_roundoff: of one addition in a matrix product with FP32 accumulation (BF16 products are exact).
        exp2_relative: relative error of exp2 for arguments in (-126, 128), result normal.
        log_relative: relative error of the natural logarithm ...
        log_absolute: ... plus this much absolute error (arguments near 1).
        reciprocal_relative: relative error of 0.5 / x, result normal.
        smallest_normal: results below it may become zero, and inputs below it may be read as zero.
        sources: where each figure comes from.
    """

    name: str
    unit_roundoff: float
    dot_unit_roundoff: float
    exp2_relative: float
    log_relative: float
    log_absolute: float
    reciprocal_relative: float
    smallest_normal: float
    sources: dict[str, str]


BF16_UNIT_ROUNDOFF = 2.0**-8
"""8 significant bits, round to nearest even: |bf16(x) - x| <= 2**-8 |x| (1 + 2**-8 rounds to 1)."""

ULP = 2.0**-23
"""The largest FP32 ulp relative to its value."""

CPU_INTERPRET = DeviceModel(
    name="cpu-interpret",
    unit_roundoff=2.0**-24,
    dot_unit_roundoff=2.0**-24,
    exp2_relative=36 * ULP,
    log_relative=4 * ULP,
    log_absolute=2 * ULP,
    reciprocal_relative=2.0**-24,
    smallest_normal=2.0**-126,
    sources={
        "exp2_relative": "measured over every FP32 argument in (-126, 128), 34.5 * 2**-23 at most: `python -m verify "
        "devices --exhaustive`; nearly all of it is the rounding of x ln 2",
        "log_relative": "measured, XLA:CPU",
        "reciprocal_relative": "IEEE 754 division",
        "smallest_normal": "XLA:CPU runs with flush-to-zero and denormals-are-zero: measured by `verify.backend`",
    },
)

V6E = DeviceModel(
    name="v6e",
    unit_roundoff=2.0**-24,
    dot_unit_roundoff=2.0**-23,
    exp2_relative=4 * ULP,
    log_relative=8 * ULP,
    log_absolute=4 * ULP,
    reciprocal_relative=4 * ULP,
    smallest_normal=2.0**-126,
    sources={
        "dot_unit_roundoff": "inferred: FP32 accumulation with either rounding or truncation",
        "exp2_relative": "inferred: one vpow2 of an exact argument; JAX's accuracy page gives 90 ulp for XLA's exp2, "
        "nearly all of it from rounding the argument, which Pallas does not do",
        "log_relative": "inferred from JAX's accuracy page, with room",
        "reciprocal_relative": "JAX's accuracy page: 1.5 ulp, with room for vrcp without a Newton step",
    },
)

MODELS = {model.name: model for model in (CPU_INTERPRET, V6E)}
