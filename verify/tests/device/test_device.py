"""Device models and the command that measures the machine."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verify import backend
from verify.device import envelopes, fit
from verify.device.__main__ import main
from verify.device.envelopes import FUNCTIONS, bf16_arguments, measure_bf16, measure_fp32, measure_widened
from verify.devices import CPU_INTERPRET, MODELS, V6E, DeviceModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.smoke
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_every_figure_of_a_model_has_a_source(model: DeviceModel) -> None:
    """Each figure says whether it is measured, documented or inferred; a model of a TPU claims nothing as measured."""
    figures = {field.name for field in dataclasses.fields(model)} - {"name", "kinds", "sources"}
    assert set(model.sources) == figures
    if model.kinds:
        assert not any("measured" in source for source in model.sources.values())


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite", "TPU7x"])
def test_a_tpu_is_recognised_by_its_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What JAX calls a generation finds its model, and a generation without one is refused."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"device_kind": kind})()])
    backend.device_model.cache_clear()
    expected = {"TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU7x": "v7x"}[kind]
    try:
        assert backend.device_model().name == expected
        backend.device_model.cache_clear()
        monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"device_kind": "TPU v3"})()])
        with pytest.raises(backend.BackendUnsoundError, match="no device model describes 'tpu v3'"):
            backend.device_model()
    finally:
        backend.device_model.cache_clear()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_bf16_argument_stays_within_the_envelope(name: str) -> None:
    """All BF16 arguments, in FP32 and in BF16: the claims hold, and the arguments were all of them."""
    function = FUNCTIONS[name]
    widened, narrow = (measure(function, CPU_INTERPRET) for measure in (measure_widened, measure_bf16))
    assert widened.holds, widened
    assert narrow.holds, narrow
    assert widened.exhaustive
    assert widened.count == narrow.count == (2 * 254 * 128 if function.negative else 254 * 128)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sample_of_fp32_arguments_stays_within_the_envelope(name: str) -> None:
    """Every 4099th FP32 number of each binade; the command takes more, or all."""
    envelope = measure_fp32(FUNCTIONS[name], CPU_INTERPRET, stride=4099)
    assert envelope.holds, envelope
    assert not envelope.exhaustive


@pytest.mark.deep
def test_exp2_envelope_holds_everywhere() -> None:
    """exp2 at every FP32 argument whose result is normal."""
    envelope = measure_fp32(FUNCTIONS["exp2"], CPU_INTERPRET, stride=1)
    assert envelope.exhaustive
    assert envelope.count > 6e8
    assert envelope.holds, envelope


@pytest.mark.smoke
def test_an_envelope_that_is_too_narrow_is_left() -> None:
    """A model that claims less than the machine does is told so, with the worst argument, in both formats."""
    bold = dataclasses.replace(CPU_INTERPRET, exp2_relative=2.0**-24, bf16_ulp={**CPU_INTERPRET.bf16_ulp, "exp2": 0.5})
    function = FUNCTIONS["exp2"]
    for envelope in (measure_widened(function, bold), measure_bf16(function, bold)):
        assert not envelope.holds
        assert math.isfinite(envelope.at)
    got = float(jax.jit(jnp.exp2)(np.float32(measure_widened(function, bold).at)))
    error = abs(got / 2.0 ** measure_widened(function, bold).at - 1.0)
    assert error == pytest.approx(measure_widened(function, bold).worst, rel=2.0**-20)


@pytest.mark.smoke
def test_a_function_that_gives_nan_leaves_every_envelope(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is no small error."""
    broken = dataclasses.replace(FUNCTIONS["exp"], device=lambda x: jnp.where(x == 1.0, jnp.nan, jnp.exp(x)))
    monkeypatch.setitem(FUNCTIONS, "exp", broken)
    found = measure_widened(envelopes.FUNCTIONS["exp"], CPU_INTERPRET)
    assert found.worst == math.inf
    assert found.at == 1.0


@pytest.mark.smoke
def test_bf16_arguments_are_the_normal_numbers() -> None:
    """254 exponents, 128 fractions, and a sign where the function takes one."""
    x = bf16_arguments(FUNCTIONS["log"]).astype(np.float64)
    assert x.size == 254 * 128
    assert x.min() == 2.0**-126
    assert x.max() == (2 - 2.0**-7) * 2.0**127


@pytest.mark.smoke
def test_properties_tell_the_models_apart() -> None:
    """The CPU fits its own model; a TPU's model disagrees on the operands of an FP32 product."""
    properties = fit.probe_properties()
    assert properties.disagreements(CPU_INTERPRET) == []
    assert properties.disagreements(V6E) == [
        "operands of an FP32 product at default precision: model bf16, measured fp32"
    ]
    fused = dataclasses.replace(properties, fused_multiply_add=True, rounds_bf16=False, copies="lost")
    assert len(fused.disagreements(CPU_INTERPRET)) == 3


def test_measure_names_the_model_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says which model describes the machine, and writes strict JSON."""
    monkeypatch.setattr(fit, "SAMPLE", 65537)
    path = tmp_path / "device.json"
    assert main(["measure", "--json", str(path)]) == 0
    assert "this machine is described by: cpu-interpret" in capsys.readouterr().out
    found = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert found["models"]["cpu-interpret"]["fits"]
    assert not found["models"]["v6e"]["fits"]
    assert len(found["models"]["cpu-interpret"]["envelopes"]) == 3 * len(FUNCTIONS)


@pytest.mark.smoke
def test_a_machine_without_a_model_is_unsound(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no model fits, the command says so and exits with 1."""
    monkeypatch.setattr(backend, "flush_to_zero", lambda: "subnormal results are kept, which no TPU does")
    assert main(["measure"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "backend unsound: no device model describes this machine" in text
    assert "not cpu-interpret: subnormal results become zero: model True, measured False" in text


@pytest.mark.smoke
def test_show_prints_every_source(capsys: pytest.CaptureFixture[str]) -> None:
    """What a model claims is shown with its ground."""
    assert main(["show", "v5e"]) == 0
    text = capsys.readouterr().out
    assert "device model v5e" in text
    assert "log_relative" in text
    assert "4030.5" in text
