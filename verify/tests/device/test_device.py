"""Device models and the command that measures the machine."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from verify import backend
from verify.device import envelopes, exhaustive, fit
from verify.device.__main__ import main
from verify.device.envelopes import FUNCTIONS, bf16_arguments, excess, measure_bf16, measure_fp32, measure_widened
from verify.device.exhaustive import BINADE, Block, Found, blocks, measure_everywhere
from verify.devices import CPU_INTERPRET, MODELS, V6E, DeviceModel
from verify.records import RecordError

if TYPE_CHECKING:
    from pathlib import Path


RECORDED = {
    body["name"]: body
    for body in json.loads(fit.MEASURED.read_text(encoding="utf-8"))["models"]["cpu-interpret"]["envelopes"]
    if body["arguments"] == "FP32"
}
EXACT = {
    "exp2": lambda x: mpmath.mpf(2) ** x,
    "exp": mpmath.exp,
    "log": mpmath.log,
    "tanh": mpmath.tanh,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "sin": mpmath.sin,
    "cos": mpmath.cos,
}


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
    found = [measure_widened(function, CPU_INTERPRET)]
    if name in CPU_INTERPRET.bf16_ulp:
        found.append(measure_bf16(function, CPU_INTERPRET))
    for envelope in found:
        assert envelope.holds, envelope
        assert envelope.exhaustive
    exponents = 254 if function.largest is None else 146
    ends = 0 if function.largest is None else 2  # +-2^20 itself
    assert {e.count for e in found} == {(2 if function.negative else 1) * exponents * 128 + ends}
    assert len(found) == (1 if name in ("sin", "cos") else 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sample_of_fp32_arguments_stays_within_the_envelope(name: str) -> None:
    """Every 4099th FP32 number of each binade; the command takes more, or all."""
    envelope = measure_fp32(FUNCTIONS[name], CPU_INTERPRET, stride=4099)
    assert envelope.holds, envelope
    assert not envelope.exhaustive


@pytest.mark.deep
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_envelope_holds_everywhere(name: str, tmp_path: Path) -> None:
    """Every normal FP32 argument: the claim holds, and the largest error is the one that the model's source states.

    Where it depends on the processor, the claim alone.
    """
    envelope = measure_everywhere(name, CPU_INTERPRET, tmp_path / "state.jsonl")
    assert envelope.exhaustive
    assert envelope.count == len(blocks(FUNCTIONS[name])) * BINADE
    assert envelope.holds, envelope
    assert FUNCTIONS[name].by_processor or envelope.worst == RECORDED[name]["worst"]


@pytest.mark.smoke
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_recorded_run_is_the_source_of_the_model(name: str) -> None:
    """The committed run tried every argument; its figure stands in the source, and its worst argument gives it.

    On another processor than the run's that argument need not be the worst, where the function depends on it: there the
    claim must hold.
    """
    recorded, function = RECORDED[name], FUNCTIONS[name]
    assert recorded["exhaustive"]
    assert recorded["count"] == len(blocks(function)) * BINADE
    figure = f"{recorded['worst'] / recorded['unit']:.4g}"
    source = CPU_INTERPRET.sources[f"{name}_{'absolute' if name in ('sin', 'cos') else 'relative'}"]
    assert "measured over every normal FP32 argument" in source
    assert figure in source
    assert recorded["claimed"] == function.claimed(CPU_INTERPRET)[0]
    x = np.array([recorded["at"]], np.float32)
    again = float(excess(np.asarray(jax.jit(function.device)(x)), x, function, CPU_INTERPRET)[0])
    if function.by_processor:
        assert again <= recorded["claimed"]
    else:
        assert again == pytest.approx(recorded["worst"], abs=2.0**-48)


@pytest.mark.smoke
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished blocks are not measured again; those of other conditions, and a torn line, are."""
    monkeypatch.setattr(exhaustive, "BINADE", 2 * exhaustive.PART)
    state, measured = tmp_path / "state.jsonl", []
    real = exhaustive.measure_block

    def stop_after(count: int) -> None:
        def measure(block: Block, *rest: Any) -> Found:
            if len(measured) == count:
                raise KeyboardInterrupt
            measured.append(block)
            return real(block, *rest)

        monkeypatch.setattr(exhaustive, "measure_block", measure)

    monkeypatch.setitem(FUNCTIONS, "exp", dataclasses.replace(FUNCTIONS["exp"], largest=2.0**-122))
    asked = blocks(FUNCTIONS["exp"])
    assert len(asked) == 8
    stop_after(3)
    with pytest.raises(KeyboardInterrupt):
        measure_everywhere("exp", CPU_INTERPRET, state)
    state.write_text(state.read_text(encoding="utf-8") + '{"format":', encoding="utf-8")
    stop_after(100)
    envelope = measure_everywhere("exp", CPU_INTERPRET, state)
    assert measured == asked
    assert envelope.count == 8 * 2 * exhaustive.PART
    other = dataclasses.replace(CPU_INTERPRET, exp_relative=1e-3)
    measure_everywhere("exp", other, state)
    assert measured == asked * 2
    state.write_text('{"format": "flywheel-exhaustive/1"}\n', encoding="utf-8")
    with pytest.raises(RecordError, match="line 1: not a block of flywheel-exhaustive/1"):
        measure_everywhere("exp", CPU_INTERPRET, state)


@pytest.mark.smoke
def test_blocks_cover_every_normal_argument_once() -> None:
    """The first and last words of neighbouring blocks follow each other; both signs, all binades, and no more."""
    found = [block for block in blocks(FUNCTIONS["tanh"]) if block.sign < 0]
    assert len(found) == 254
    ends = [list(block.arguments()) for block in found[:2]]
    words = [np.concatenate(parts).view(np.uint32) for parts in ends]
    assert words[0][0] == 0x80800000
    assert (np.diff(np.concatenate(words).astype(np.int64)) == 1).all()
    assert [block.exponent for block in blocks(FUNCTIONS["sin"])][-1] == 19
    assert {block.sign for block in blocks(FUNCTIONS["log"])} == {1}


@pytest.mark.smoke
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_reference_is_as_good_as_stated(name: str) -> None:
    """numpy's float64 function at FP32 numbers of every binade, against 200 bits: within 2**-50 of the value."""
    function, rng = FUNCTIONS[name], np.random.default_rng(5)
    exponents = np.repeat(np.arange(-126, 127 if function.largest is None else 20), 4)
    x = np.ldexp(1.0 + rng.integers(0, 1 << 23, exponents.size) * 2.0**-23, exponents)
    if function.negative:
        x *= rng.choice([-1.0, 1.0], x.size)
    with np.errstate(all="ignore"):
        got = function.exact(x)
    counts = np.isfinite(got) & (np.abs(got) >= 2.0**-149) & (np.abs(got) < 2.0**128)
    assert counts.sum() > x.size / 3
    with mpmath.workprec(200):
        for value, argument in zip(got[counts].tolist(), x[counts].tolist(), strict=True):
            exact = EXACT[name](mpmath.mpf(argument))
            size = 1 if name in ("sin", "cos") else abs(exact)
            assert abs(value - exact) <= 2.0**-50 * size, argument


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
    monkeypatch.setitem(fit.measure_fp32.__kwdefaults__, "stride", 65537)
    path = tmp_path / "device.json"
    assert main(["measure", "--json", str(path)]) == 0
    assert "this machine is described by: cpu-interpret" in capsys.readouterr().out
    found = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert found["models"]["cpu-interpret"]["fits"]
    assert not found["models"]["v6e"]["fits"]
    assert len(found["models"]["cpu-interpret"]["envelopes"]) == 2 * len(FUNCTIONS) + 7


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
