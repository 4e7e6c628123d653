"""Numerics models of the machines that run the kernels, as data.

The contract's bounds take a model as an argument.  Every figure has a source: *measured* ones were measured on the
backend itself (`python -m verify.device measure --exhaustive` does it again), *documented* ones stand in JAX's accuracy
document (docs.jax.dev, "Numerical accuracy", reviewed 2026-09-18: the largest error over every argument of XLA's
function on that generation), *inferred* ones are neither and say why they are believed.
"""

from __future__ import annotations

import dataclasses

BF16_UNIT_ROUNDOFF = 2.0**-8
"""8 significant bits, round to nearest even: |bf16(x) - x| <= 2**-8 |x| (1 + 2**-8 rounds to 1)."""

ULP = 2.0**-23
"""The largest FP32 ulp relative to its value."""

ULP_BELOW_ONE = 2.0**-24
"""The FP32 ulp of the largest numbers below 1."""

DOCUMENT = "documented: JAX's accuracy page"


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """What one backend may do to an FP32 operation.

    The relative errors hold where argument and result are normal numbers; an argument or a result below
    `smallest_normal` may be read as, or become, zero.  |f - exact| <= relative |exact| + absolute.

    Attributes:
        name: the record's name.
        kinds: what `jax.Device.device_kind` says on such a machine, in lower case; empty if it is no TPU.
        unit_roundoff: of FP32 add, subtract and multiply: |fl(x) - x| <= u |x|.
        dot_unit_roundoff: of one addition in a matrix product with FP32 accumulation (BF16 products are exact).
        exp2_relative: relative error of exp2 for arguments in (-126, 128), result normal.
        exp_relative: the same for the natural exponential.
        log_relative: relative error of the natural logarithm ...
        log_absolute: ... plus this much absolute error (arguments near 1).
        tanh_relative: relative error of tanh ...
        tanh_absolute: ... plus this much absolute error.
        rsqrt_relative: relative error of 1 / sqrt(x).
        reciprocal_relative: relative error of 1 / x and of 0.5 / x, result normal.
        sigmoid_relative: relative error of 1 / (1 + exp(-x)), result normal.
        sin_absolute: absolute error of the sine for arguments of up to 2**20 in size (radians) ...
        cos_absolute: ... and of the cosine; results are at most 1 in size, where an ulp is 2**-24.
        smallest_normal: results below it may become zero, and inputs below it may be read as zero.
        flushes: subnormal results do become zero.
        fused_multiply_add: x * y + z may round once.
        default_dot: what a product of FP32 matrices at default precision multiplies: "fp32" or "bf16" operands.
        bf16_roundings: how many roundings an elementwise BF16 value may have behind it and still be what the model says
            on every machine of the kind; a longer chain is rounded after every step here and in one go there.
        bf16_ulp: largest error in BF16 ulp of each function on BF16 arguments, computed in BF16.
        sources: where each figure comes from.
    """

    name: str
    kinds: tuple[str, ...]
    unit_roundoff: float
    dot_unit_roundoff: float
    exp2_relative: float
    exp_relative: float
    log_relative: float
    log_absolute: float
    tanh_relative: float
    tanh_absolute: float
    rsqrt_relative: float
    reciprocal_relative: float
    sigmoid_relative: float
    sin_absolute: float
    cos_absolute: float
    smallest_normal: float
    flushes: bool
    fused_multiply_add: bool
    default_dot: str
    bf16_roundings: int
    bf16_ulp: dict[str, float]
    sources: dict[str, str]


def _documented(name: str, ulps: float) -> str:
    return f"{DOCUMENT}, FP32 table, {name}: {ulps:g} ulp at most over every argument"


_TRIG = f"{DOCUMENT}, FP32 table, sin and cos, {{}}: {{}} ulp; inferred for Pallas, which lowers the same functions"
_NATIVE_BF16 = "inferred: a BF16 vector unit rounds every operation; the rounding of each step is charged only once"
_CONTRACTION = "inferred: the vector unit has no fused multiply-add instruction in the compiler's listings"
_DEFAULT_DOT = "documented: jax.lax.Precision.DEFAULT computes FP32 products in BF16 on a TPU"
_ACCUMULATION = "inferred: FP32 accumulation with either rounding or truncation"
_FLUSHES = f"{DOCUMENT}: subnormal inputs and outputs are typically flushed to zero"

_MEASURED = "measured over every normal FP32 argument, in 2**-23 of the value"
"""The run stands in verify/data/device-cpu-interpret.json."""

CPU_INTERPRET = DeviceModel(
    name="cpu-interpret",
    kinds=(),
    unit_roundoff=2.0**-24,
    dot_unit_roundoff=2.0**-24,
    exp2_relative=36 * ULP,
    exp_relative=1.5 * ULP,
    log_relative=4 * ULP,
    log_absolute=2 * ULP,
    tanh_relative=5 * ULP,
    tanh_absolute=2.0**-126,
    rsqrt_relative=2 * ULP,
    reciprocal_relative=2.0**-24,
    sigmoid_relative=2.5 * ULP,
    sin_absolute=ULP_BELOW_ONE,
    cos_absolute=ULP_BELOW_ONE,
    smallest_normal=2.0**-126,
    flushes=True,
    fused_multiply_add=False,
    default_dot="fp32",
    bf16_roundings=1,
    bf16_ulp={
        "exp2": 101.0,
        "exp": 0.5,
        "log": 0.5,
        "tanh": 0.5,
        "rsqrt": 0.5,
        "reciprocal": 0.5,
        "sigmoid": 2.5,
    },
    sources={
        "unit_roundoff": "IEEE 754 addition and multiplication, round to nearest",
        "dot_unit_roundoff": "the same; the order of the sum is left open",
        "exp2_relative": f"{_MEASURED}: 34.5; nearly all of it is the rounding of x ln 2",
        "exp_relative": f"{_MEASURED}: 0.6864; documented: JAX's accuracy page, 1.5 ulp",
        "log_relative": f"{_MEASURED}: 0.4726 beyond the absolute part; documented: JAX's accuracy page, 1.5 ulp",
        "log_absolute": "the same; room for arguments near 1",
        "tanh_relative": f"{_MEASURED}: 3.441; documented: JAX's accuracy page, 5 ulp",
        "tanh_absolute": "subnormal arguments and results are flushed",
        "rsqrt_relative": f"{_MEASURED}: 1.585, on one processor; documented: JAX's accuracy page, 1 to 2 ulp by "
        "processor",
        "reciprocal_relative": f"IEEE 754 division; {_MEASURED}: 0.5",
        "sigmoid_relative": f"{_MEASURED}: 1.241; documented: JAX's accuracy page, logistic, 2.5 ulp",
        "sin_absolute": f"{_MEASURED} of up to 2**20 in size: 0.5472 (here of 2**-24); twice the page's 0.5 ulp",
        "cos_absolute": f"{_MEASURED} of up to 2**20 in size: 0.5472 (here of 2**-24); twice the page's 0.5 ulp",
        "smallest_normal": "XLA:CPU flushes subnormals and reads them as zero: measured by `python -m verify.device "
        "measure`",
        "flushes": "measured by `python -m verify.device measure`",
        "fused_multiply_add": "measured by `python -m verify.device measure`; the flag xla_cpu_max_isa=AVX sees to it",
        "default_dot": "measured by `python -m verify.device measure`",
        "bf16_roundings": "measured by `python -m verify.device measure`: every BF16 step is rounded, given the flag "
        "xla_allow_excess_precision=false",
        "bf16_ulp": "documented: JAX's accuracy page, BF16 table; measured here over all 2**16 arguments: below it",
    },
)

V5E = DeviceModel(
    name="v5e",
    kinds=("tpu v5 lite", "tpu v5e"),
    unit_roundoff=2.0**-24,
    dot_unit_roundoff=2.0**-23,
    exp2_relative=141.5 * ULP,
    exp_relative=116.0 * ULP,
    log_relative=4030.5 * ULP,
    log_absolute=2.0**-126,
    tanh_relative=1365.5 * ULP,
    tanh_absolute=2.0**-126,
    rsqrt_relative=2.5 * ULP,
    reciprocal_relative=198.0 * ULP,
    sigmoid_relative=243.0 * ULP,
    sin_absolute=3.5 * ULP_BELOW_ONE,
    cos_absolute=3.5 * ULP_BELOW_ONE,
    smallest_normal=2.0**-126,
    flushes=True,
    fused_multiply_add=False,
    default_dot="bf16",
    bf16_roundings=1,
    bf16_ulp={
        "exp2": 44.0,
        "exp": 1.0,
        "log": 1.0,
        "tanh": 0.5,
        "rsqrt": 0.5,
        "reciprocal": 1.0,
        "sigmoid": 1.0,
    },
    sources={
        "unit_roundoff": "inferred: correctly rounded FP32 addition and multiplication",
        "dot_unit_roundoff": _ACCUMULATION,
        "exp2_relative": _documented("exp2, TPU v2-v5e", 141.5),
        "exp_relative": _documented("exp, TPU v2-v5e", 116.0),
        "log_relative": _documented("log, TPU v2-v5e", 4030.5),
        "log_absolute": "covered by the relative figure, which is of the value's own ulp",
        "tanh_relative": _documented("tanh, TPU v2-v5e", 1365.5),
        "tanh_absolute": "flushing alone",
        "rsqrt_relative": _documented("rsqrt, TPU v2-v5e", 2.5),
        "reciprocal_relative": _documented("reciprocal, TPU v2-v5e", 198.0),
        "sigmoid_relative": _documented("logistic, TPU v2-v5e", 243.0),
        "sin_absolute": _TRIG.format("TPU v2-v5e", "3.5"),
        "cos_absolute": _TRIG.format("TPU v2-v5e", "3.5"),
        "smallest_normal": _FLUSHES,
        "flushes": _FLUSHES,
        "fused_multiply_add": _CONTRACTION,
        "default_dot": _DEFAULT_DOT,
        "bf16_roundings": "inferred: there is no BF16 vector unit, so a chain is computed in FP32 and rounded when it "
        "is stored, or after every step: the compiler chooses",
        "bf16_ulp": f"{DOCUMENT}, BF16 table, TPU v2-v5e",
    },
)

V6E = DeviceModel(
    name="v6e",
    kinds=("tpu v6 lite", "tpu v6e"),
    unit_roundoff=2.0**-24,
    dot_unit_roundoff=2.0**-23,
    exp2_relative=4 * ULP,
    exp_relative=64.5 * ULP,
    log_relative=8 * ULP,
    log_absolute=4 * ULP,
    tanh_relative=1.5 * ULP,
    tanh_absolute=2.0**-126,
    rsqrt_relative=1.5 * ULP,
    reciprocal_relative=4 * ULP,
    sigmoid_relative=65.5 * ULP,
    sin_absolute=3.5 * ULP_BELOW_ONE,
    cos_absolute=3.5 * ULP_BELOW_ONE,
    smallest_normal=2.0**-126,
    flushes=True,
    fused_multiply_add=False,
    default_dot="bf16",
    bf16_roundings=1,
    bf16_ulp={
        "exp2": 44.0,
        "exp": 1.0,
        "log": 0.5,
        "tanh": 0.5,
        "rsqrt": 0.5,
        "reciprocal": 0.5,
        "sigmoid": 0.5,
    },
    sources={
        "unit_roundoff": "inferred: correctly rounded FP32 addition and multiplication",
        "dot_unit_roundoff": _ACCUMULATION,
        "exp2_relative": "inferred: one vpow2 of an exact argument; JAX's accuracy page gives 90 ulp for XLA's exp2, "
        "nearly all of it from rounding the argument, which Pallas does not do",
        "exp_relative": _documented("exp", 64.5),
        "log_relative": "inferred from JAX's accuracy page (2.5 ulp), with room",
        "log_absolute": "inferred, room for arguments near 1",
        "tanh_relative": _documented("tanh", 1.5),
        "tanh_absolute": "flushing alone",
        "rsqrt_relative": _documented("rsqrt", 1.5),
        "reciprocal_relative": "JAX's accuracy page: 1.5 ulp, with room for vrcp without a Newton step (inferred)",
        "sigmoid_relative": _documented("logistic", 65.5),
        "sin_absolute": _TRIG.format("TPU v6e", "3.5"),
        "cos_absolute": _TRIG.format("TPU v6e", "3.5"),
        "smallest_normal": _FLUSHES,
        "flushes": _FLUSHES,
        "fused_multiply_add": _CONTRACTION,
        "default_dot": _DEFAULT_DOT,
        "bf16_roundings": _NATIVE_BF16,
        "bf16_ulp": f"{DOCUMENT}, BF16 table, TPU v6e",
    },
)

V7X = DeviceModel(
    name="v7x",
    kinds=("tpu7x", "tpu v7x"),
    unit_roundoff=2.0**-24,
    dot_unit_roundoff=2.0**-23,
    exp2_relative=90.0 * ULP,
    exp_relative=65.0 * ULP,
    log_relative=2.5 * ULP,
    log_absolute=2.0**-126,
    tanh_relative=1.5 * ULP,
    tanh_absolute=2.0**-126,
    rsqrt_relative=1.0 * ULP,
    reciprocal_relative=1.5 * ULP,
    sigmoid_relative=64.0 * ULP,
    sin_absolute=3.5 * ULP_BELOW_ONE,
    cos_absolute=3.5 * ULP_BELOW_ONE,
    smallest_normal=2.0**-126,
    flushes=True,
    fused_multiply_add=False,
    default_dot="bf16",
    bf16_roundings=1,
    bf16_ulp={
        "exp2": 75.0,
        "exp": 1.0,
        "log": 0.5,
        "tanh": 0.5,
        "rsqrt": 0.5,
        "reciprocal": 0.5,
        "sigmoid": 63.0,
    },
    sources={
        "unit_roundoff": "inferred: correctly rounded FP32 addition and multiplication",
        "dot_unit_roundoff": _ACCUMULATION,
        "exp2_relative": _documented("exp2, TPU 7x", 90.0),
        "exp_relative": _documented("exp, TPU 7x", 65.0),
        "log_relative": _documented("log, TPU 7x", 2.5),
        "log_absolute": "covered by the relative figure, which is of the value's own ulp",
        "tanh_relative": _documented("tanh, TPU 7x", 1.5),
        "tanh_absolute": "flushing alone",
        "rsqrt_relative": _documented("rsqrt, TPU 7x", 1.0),
        "reciprocal_relative": _documented("reciprocal, TPU 7x", 1.5),
        "sigmoid_relative": _documented("logistic, TPU 7x", 64.0),
        "sin_absolute": _TRIG.format("TPU 7x", "3.0 and 3.5"),
        "cos_absolute": _TRIG.format("TPU 7x", "3.0 and 3.5"),
        "smallest_normal": _FLUSHES,
        "flushes": _FLUSHES,
        "fused_multiply_add": "inferred: as on v6e; no listing of this generation was read for it",
        "default_dot": _DEFAULT_DOT,
        "bf16_roundings": _NATIVE_BF16,
        "bf16_ulp": f"{DOCUMENT}, BF16 table, TPU 7x",
    },
)

MODELS = {model.name: model for model in (CPU_INTERPRET, V5E, V6E, V7X)}
