"""The capture's parts that need no model: rounding, rotary pairs, the forward pass, and what is written."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import mpmath
import numpy as np
import pytest

from verify.attention.problem import BF16
from verify.traces import load_trace
from verify.traces.__main__ import main
from verify.traces.bits import from_bits, round_to_bf16, to_bits
from verify.traces.forward import Config, forward, mean_loss, rms_norm, rotate
from verify.traces.keep import Capture, CaptureError, Selection

if TYPE_CHECKING:
    from pathlib import Path

    from verify.traces.forward import Rotary

U = 2.0**-53


def nearest_bf16(x: float) -> int:
    """The word nearest to a non-negative x, by search in the list of all non-negative words, ties to even."""
    values = from_bits(np.arange(0x7F80, dtype=np.uint16)).astype(np.float64)
    below = int(np.searchsorted(values, x, side="right")) - 1
    above = 2.0**128 if below == 0x7F7F else values[below + 1]
    down, up = x - values[below], above - x
    return below + int(up < down or (up == down and below % 2))


def test_rounding_to_bf16_is_correct() -> None:
    """Ties go to even, nothing is rounded twice, subnormals have their fixed spacing, overflow gives infinity."""
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-140, 127.9, 2000))
    words = rng.integers(0, 0x7F7F, 500, dtype=np.uint16)
    low, high = (from_bits(w).astype(np.float64) for w in (words, words + np.uint16(1)))
    ties = (low + high) / 2
    x = np.concatenate([spread, low, ties, ties * (1 + 2.0**-40), ties * (1 - 2.0**-40), [0.0, 2.0**-133, 2.0**-134]])
    expected = [nearest_bf16(value) for value in x]
    assert to_bits(round_to_bf16(x)).tolist() == expected
    assert to_bits(round_to_bf16(-x)).tolist() == [word | 0x8000 for word in expected]
    # 1 + 2^-8 + 2^-40 is above the tie; by way of FP32 it would be one, and fall to 1.
    assert float(round_to_bf16(np.array([1 + 2.0**-8 + 2.0**-40]))[0]) == 1 + 2.0**-7


def test_rotation_is_that_of_the_formula() -> None:
    """Pair i at position p turns by p * base^(-2i / head_dim), to the rounding of the angle and of four operations.

    Angle: power (2 u), quotient, product, and the exponent's quotient, together at most 5 u relative; sine and cosine
    pass the absolute error on and add u; two products and a sum add 2 u: |a| + |b| times (5 angle + 4) u.
    """
    x = np.random.default_rng(1).standard_normal((1, 40, 8))
    turned = rotate(x, 1e5, "interleaved")
    with mpmath.workdps(40):
        for position in range(40):
            for pair in range(4):
                angle = position * mpmath.mpf(10) ** (-5 * mpmath.mpf(2 * pair) / 8)
                a, b = (float(value) for value in x[0, position, 2 * pair : 2 * pair + 2])
                expected = (
                    a * mpmath.cos(angle) - b * mpmath.sin(angle),
                    a * mpmath.sin(angle) + b * mpmath.cos(angle),
                )
                bound = (abs(a) + abs(b)) * (5 * angle + 4) * U
                for lane in range(2):
                    assert abs(mpmath.mpf(float(turned[0, position, 2 * pair + lane])) - expected[lane]) <= bound


def test_rotary_kinds_are_one_under_the_permutation_of_weights() -> None:
    """Half-split pairs on permuted components are interleaved pairs, bit for bit; unpermuted they differ."""
    x = np.random.default_rng(2).standard_normal((3, 17, 8))
    halves = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    turned = rotate(x, 1e5, "interleaved")
    split = rotate(halves, 1e5, "half-split")
    assert np.array_equal(np.concatenate([turned[..., 0::2], turned[..., 1::2]], axis=-1), split)
    assert not np.allclose(turned, rotate(x, 1e5, "half-split"))


CONFIG = Config(layers=2, heads=4, kv_heads=2, head_dim=4, rms_epsilon=1e-2, rotary_base=100.0, context=64)
WIDTH, INNER, VOCABULARY = 16, 12, 11
TOKENS = np.array([3, 7, 7, 1, 10, 0, 4])


def small_model(seed: int = 3) -> dict[str, np.ndarray]:
    """Random weights under their GGUF names."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    heads, kv_heads = CONFIG.heads * CONFIG.head_dim, CONFIG.kv_heads * CONFIG.head_dim
    for layer in range(CONFIG.layers):
        of_layer = {
            "attn_norm": (WIDTH,),
            "attn_q": (heads, WIDTH),
            "attn_k": (kv_heads, WIDTH),
            "attn_v": (kv_heads, WIDTH),
            "attn_output": (WIDTH, heads),
            "ffn_norm": (WIDTH,),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def run(
    weights: dict[str, np.ndarray], tokens: np.ndarray = TOKENS, config: Config = CONFIG, rotary: Rotary = "interleaved"
) -> tuple[np.ndarray, list[tuple[np.ndarray, ...]]]:
    """The forward pass, with what it showed of every layer."""
    seen: list[tuple[np.ndarray, ...]] = []
    hidden = forward(config, weights.__getitem__, tokens, lambda _index, *qkv: seen.append(qkv), rotary)
    return hidden, seen


def plain_forward(weights: dict[str, np.ndarray]) -> np.ndarray:
    """The same model written token by token, with complex rotations and its key-value cache as lists."""

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / (sum(v * v for v in x) / len(x) + CONFIG.rms_epsilon) ** 0.5

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        pairs = x.reshape(-1, CONFIG.head_dim // 2, 2)
        steps = CONFIG.rotary_base ** (-2.0 * np.arange(CONFIG.head_dim // 2) / CONFIG.head_dim)
        z = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * position * steps)
        return np.stack([z.real, z.imag], axis=-1).reshape(-1, CONFIG.head_dim)

    keys: list[list[np.ndarray]] = [[] for _ in range(CONFIG.layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(CONFIG.layers)]
    rows = []
    for position, token in enumerate(TOKENS):
        x = weights["token_embd"][token]
        for layer in range(CONFIG.layers):
            w = {name.removeprefix(f"blk.{layer}."): weight for name, weight in weights.items()}
            h = norm(x, w["attn_norm"])
            q = turned(w["attn_q"] @ h, position)
            keys[layer].append(turned(w["attn_k"] @ h, position))
            values[layer].append((w["attn_v"] @ h).reshape(-1, CONFIG.head_dim))
            out = []
            for head in range(CONFIG.heads):
                kv = head // 2
                p = np.exp([k[kv] @ q[head] / CONFIG.head_dim**0.5 for k in keys[layer]])
                out.append(sum(a * v[kv] for a, v in zip(p / p.sum(), values[layer], strict=True)))
            x = x + w["attn_output"] @ np.concatenate(out)
            h = norm(x, w["ffn_norm"])
            gate = w["ffn_gate"] @ h
            x = x + w["ffn_down"] @ (gate / (1 + np.exp(-gate)) * (w["ffn_up"] @ h))
        rows.append(norm(x, weights["output_norm"]))
    return np.array(rows)


def test_forward_is_the_model() -> None:
    """The pass agrees with the model written token by token, at least 2^20 times closer than with any planted fault.

    Faults: the other rotary pairs, another rotary base, another epsilon, one KV head for all, no mask (a later token
    changed), each of which must show.
    """
    weights = small_model()
    expected = plain_forward(weights)
    right, _ = run(weights)
    one_kv_head = {
        name: np.tile(weight[:4], (2, 1)) if name.endswith(("attn_k", "attn_v")) else weight
        for name, weight in weights.items()
    }
    faults = {
        "half-split": run(weights, rotary="half-split")[0],
        "base": run(weights, config=dataclasses.replace(CONFIG, rotary_base=101.0))[0],
        "epsilon": run(weights, config=dataclasses.replace(CONFIG, rms_epsilon=1.01e-2))[0],
        "one KV head": run(one_kv_head)[0],
        "a token": run(weights, np.array([3, 7, 7, 1, 10, 0, 5]))[0],
    }
    error = np.abs(right - expected).max()
    distances = {name: np.abs(wrong - expected).max() for name, wrong in faults.items()}
    assert error * 2**20 < min(distances.values())


def test_forward_is_causal() -> None:
    """A changed last token leaves the hidden states of all others as they are, to rounding that 2^-40 covers."""
    weights = small_model()
    before, _ = run(weights)
    after, _ = run(weights, np.array([3, 7, 7, 1, 10, 0, 5]))
    assert np.abs(before - after)[:-1].max() <= 2.0**-40 * np.abs(before).max()
    assert np.abs(before - after)[-1].max() > 0.1


def test_observed_tensors_have_the_layout_of_a_trace() -> None:
    """Every layer is shown once, in order: q [heads, tokens, head_dim], k and v [kv_heads, tokens, head_dim]."""
    _, seen = run(small_model())
    assert [tuple(x.shape for x in qkv) for qkv in seen] == [((4, 7, 4), (2, 7, 4), (2, 7, 4))] * CONFIG.layers


def test_rms_norm_of_a_constant_row() -> None:
    """A row of equal numbers becomes its sign over sqrt(1 + eps / x^2), times the weight; a zero row stays zero."""
    x = np.array([[-2.0, -2.0, -2.0], [0.0, 0.0, 0.0]])
    found = rms_norm(x, np.array([1.0, 2.0, 4.0]), 4.0)
    assert found[0] == pytest.approx(-np.array([1.0, 2.0, 4.0]) / np.sqrt(2.0), rel=8 * U)
    assert not found[1].any()


def test_loss_of_a_uniform_and_of_a_sure_prediction() -> None:
    """Equal logits cost ln(vocabulary) nats; a logit that is ahead by 1000 costs nothing if right and 1000 if wrong."""
    tokens = np.array([0, 1, 0])
    assert mean_loss(np.zeros((3, 2)), np.ones((11, 2)), tokens) == pytest.approx(np.log(11), rel=8 * U)
    head = np.eye(2) * 1000
    right = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert mean_loss(right, head, tokens) == 0.0
    assert mean_loss(right[:, ::-1], head, tokens) == 1000.0


def finished(loss: float) -> Capture:
    """A capture with arbitrary tensors."""
    rng = np.random.default_rng(4)
    shapes = {"layer00.q": (4, 6, 8), "layer00.k": (2, 6, 8), "layer00.v": (2, 6, 8)}
    tensors = {name: rng.standard_normal(shape).astype(BF16) for name, shape in shapes.items()}
    return Capture(tensors, 0.5, loss, {"model": "none"})


def test_a_written_capture_loads_bit_for_bit(tmp_path: Path) -> None:
    """What is written is what the loader gives back, and writing it twice gives the same bytes."""
    out = tmp_path / "mine.npz"
    capture = finished(1.0)
    capture.write(out)
    first = out.read_bytes()
    trace = load_trace(out)
    layer = trace.layers[0]
    for name, tensor in capture.tensors.items():
        assert np.array_equal(to_bits(getattr(layer, name[-1]))[0], to_bits(tensor))
    assert (layer.scale, layer.causal, trace.provenance) == (0.5, True, {"model": "none"})
    capture.write(out)
    assert out.read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["mine.npz"]


@pytest.mark.parametrize("loss", [2.5000001, 4.58, np.inf, np.nan])
def test_a_capture_with_a_large_loss_is_not_written(loss: float, tmp_path: Path) -> None:
    """Above 2.5 nats, or with a loss that is no number, nothing is written and an older file stays."""
    out = tmp_path / "mine.npz"
    out.write_bytes(b"older")
    with pytest.raises(
        CaptureError, match=r"the mean next-token loss is \S+ nats, must be at most 2\.5: .* not written"
    ):
        finished(loss).write(out)
    assert out.read_bytes() == b"older"


def test_a_broken_write_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails half-way leaves the older file and no fragment."""
    out = tmp_path / "mine.npz"
    out.write_bytes(b"older")

    def torn(file: object, **_arrays: object) -> None:
        file.write(b"half")  # pyright: ignore[reportAttributeAccessIssue]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.savez", torn)
    with pytest.raises(OSError, match="No space left"):
        finished(1.0).write(out)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"older"]


def test_output_names_are_checked(tmp_path: Path) -> None:
    """The output is a `.npz` in a folder that exists."""
    with pytest.raises(CaptureError, match=r"the output must end in \.npz, got mine\.dat"):
        finished(1.0).write(tmp_path / "mine.dat")
    with pytest.raises(CaptureError, match=r"the output's folder must exist, got .*absent"):
        finished(1.0).write(tmp_path / "absent" / "mine.npz")


def test_selections_are_checked() -> None:
    """Layers and KV heads are ascending indices of the model, tokens fit its context; else the value is named."""
    Selection((0, 1), (0, 1), 64).check(CONFIG)
    wrong = {
        r"layers must be ascending indices from 0 to 1, got \[0, 2\]": Selection((0, 2), (0,), 8),
        r"layers must be ascending indices from 0 to 1, got \[1, 0\]": Selection((1, 0), (0,), 8),
        r"layers must be ascending indices from 0 to 1, got \[1, 1\]": Selection((1, 1), (0,), 8),
        r"layers must be ascending indices from 0 to 1, got \[\]": Selection((), (0,), 8),
        r"KV heads must be ascending indices from 0 to 1, got \[-1, 1\]": Selection((0,), (-1, 1), 8),
        r"tokens must be from 2 to 64, got 1": Selection((0,), (0,), 1),
        r"tokens must be from 2 to 64, got 65": Selection((0,), (0,), 65),
    }
    for message, selection in wrong.items():
        with pytest.raises(CaptureError, match=message):
            selection.check(CONFIG)


def test_query_heads_follow_their_kv_heads() -> None:
    """KV head 1 of two brings query heads 2 and 3 of four."""
    assert Selection(kv_heads=(1,)).query_heads(CONFIG) == [2, 3]
    assert Selection(kv_heads=(0, 1)).query_heads(CONFIG) == [0, 1, 2, 3]


def test_capture_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the packages of group `traces` the command ends with code 2 and names the group."""
    for module in ("verify.traces.capture", "verify.traces.model"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["capture", "--out", str(tmp_path / "mine.npz")]) == 2
    assert "capture needs the dependency group `traces` (uv sync --group traces)" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["capture", "--layers", "0,x"], ["capture", "--tokens", "many"], ["show"], []])
def test_wrong_command_lines_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What is no index, no number or no command ends with argparse's code 2 and its usage line."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: python -m verify.traces" in capsys.readouterr().err
