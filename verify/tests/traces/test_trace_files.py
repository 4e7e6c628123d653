"""Trace files of users: what is accepted, what it becomes, and what is refused with which words."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from verify.attention.problem import BF16
from verify.traces import TraceError, load_trace
from verify.traces.bits import to_bits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HEADS, KV_HEADS, TOKENS, HEAD_DIM = 4, 2, 5, 8


def tensors(seed: int = 0, *, batch: tuple[int, ...] = (), q_len: int = TOKENS) -> dict[str, np.ndarray]:
    """Random q, k, v as BF16."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (HEADS, q_len), "k": (KV_HEADS, TOKENS), "v": (KV_HEADS, TOKENS)}
    return {name: rng.standard_normal((*batch, *shape, HEAD_DIM)).astype(BF16) for name, shape in shapes.items()}


def words(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """BF16 arrays as their words."""
    return {name: to_bits(array) for name, array in arrays.items()}


def npz(folder: Path, arrays: dict[str, Any]) -> Path:
    """A `.npz` file."""
    path = folder / "mine.npz"
    np.savez(path, **arrays)
    return path


def safetensors(folder: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> Path:
    """A `.safetensors` file."""
    path = folder / "mine.safetensors"
    save_file(arrays, path, metadata=metadata)
    return path


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two BF16 arrays have one shape and the same words."""
    return left.dtype == right.dtype == BF16 and np.array_equal(to_bits(left), to_bits(right))


def test_npz_words_arrive_bit_for_bit(tmp_path: Path) -> None:
    """Uint16 words become the same BF16 words with a batch axis of one, causal, scale head_dim ** -0.5."""
    arrays = tensors()
    trace = load_trace(npz(tmp_path, words(arrays)))
    [(label, problem)] = trace.problems()
    assert label == trace.name == "mine"
    assert all(same_bits(getattr(problem, name), array[None]) for name, array in arrays.items())
    assert problem.causal is True
    assert problem.scale == HEAD_DIM**-0.5
    assert trace.provenance == {}


def test_every_word_but_nan_and_infinity_survives(tmp_path: Path) -> None:
    """Subnormal words, both zeros and the largest numbers pass through both formats unchanged."""
    every = np.arange(2**16, dtype=np.uint16)
    finite = every[(every & 0x7F80) != 0x7F80].reshape(1, -1, 1)
    trace = load_trace(npz(tmp_path, dict.fromkeys("qkv", finite)))
    assert np.array_equal(to_bits(trace.layers[0].v)[0], finite)
    trace = load_trace(safetensors(tmp_path, {name: finite.view(BF16).copy() for name in "qkv"}))
    assert np.array_equal(to_bits(trace.layers[0].v)[0], finite)


def test_exact_float32_equals_words(tmp_path: Path) -> None:
    """Float32 that BF16 holds exactly gives the same problem as the words."""
    arrays = tensors()
    trace = load_trace(npz(tmp_path, {name: array.astype(np.float32) for name, array in arrays.items()}))
    assert all(same_bits(getattr(trace.layers[0], name), array[None]) for name, array in arrays.items())


def test_safetensors_arrive_bit_for_bit(tmp_path: Path) -> None:
    """BF16 safetensors with metadata become layers with these bits, this scale and this mask."""
    arrays = {f"model.0.{name}": array for name, array in tensors(batch=(3,)).items()}
    metadata = {"scale": "0.25", "causal": "false", "format": "pt", "provenance": '{"model": "mine"}'}
    trace = load_trace(safetensors(tmp_path, arrays, metadata))
    [(label, problem)] = trace.problems()
    assert label == "mine/model.0"
    assert all(same_bits(getattr(problem, name[-1]), array) for name, array in arrays.items())
    assert (problem.causal, problem.scale) == (False, 0.25)
    assert trace.provenance == {"model": "mine"}


def test_layers_come_in_natural_order_and_keep_their_own_settings(tmp_path: Path) -> None:
    """layer2 comes before layer10; a layer's own scale and mask go before the file's, which go before the defaults."""
    arrays: dict[str, Any] = {"scale": 0.5, "layer2.scale": np.float32(0.75), "layer10.causal": False}
    for seed, layer in enumerate(("layer10", "layer2")):
        arrays |= {f"{layer}.{name}": array for name, array in words(tensors(seed)).items()}
    trace = load_trace(npz(tmp_path, arrays))
    found = [(layer.name, layer.scale, layer.causal) for layer in trace.layers]
    assert found == [("layer2", 0.75, True), ("layer10", 0.5, False)]
    assert same_bits(trace.layers[0].q, tensors(1)["q"][None])


def test_queries_may_be_fewer_than_keys(tmp_path: Path) -> None:
    """A decode step is a trace too: one query row sees all keys."""
    trace = load_trace(npz(tmp_path, words(tensors(q_len=1))))
    [(_, problem)] = trace.problems()
    assert problem.visible(0) == TOKENS


def changed(**changes: Any) -> dict[str, Any]:
    """A good file's arrays with some replaced; None takes one away."""
    arrays = words(tensors()) | changes
    return {name: array for name, array in arrays.items() if array is not None}


def with_value(name: str, index: tuple[int, ...], value: float) -> dict[str, Any]:
    """A good float32 file with one value replaced."""
    arrays = {key: array.astype(np.float32) for key, array in tensors().items()}
    arrays[name][index] = value
    return arrays


WRONG_NPZ: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no tensor": (
        lambda: {"scale": 1.0},
        r"mine\.npz: the content is without a tensor; names are q, k, v or <layer>\.q",
    ),
    "unknown name": (lambda: changed(query=np.zeros(3)), r"array 'query' is of no known name; names are q, k, v"),
    "blank in a layer name": (lambda: {"a b.q": np.zeros(3)}, r"array 'a b\.q' is of no known name"),
    "missing v": (lambda: changed(v=None), r"the trace is without v; a layer has all of q, k and v"),
    "missing k and v": (lambda: {"l1.q": words(tensors())["q"]}, r"layer 'l1' is without k and v; a layer has all"),
    "both forms": (
        lambda: changed() | {f"l1.{name}": array for name, array in words(tensors()).items()},
        r"the content is both bare q, k, v and a layer 'l1'; a file uses one of the two forms",
    ),
    "settings of no layer": (
        lambda: changed(**{"l1.scale": 1.0}),
        r"layer 'l1' is given settings but no tensor; names are",
    ),
    "float64": (
        lambda: changed(q=np.zeros((4, 5, 8))),
        r"tensor 'q' is float64 of shape \(4, 5, 8\); tensors in a \.npz are uint16 \(BF16 words\) or float32",
    ),
    "float16": (lambda: changed(k=np.zeros((2, 5, 8), np.float16)), r"tensor 'k' is float16 of shape"),
    "int16": (lambda: changed(k=np.zeros((2, 5, 8), np.int16)), r"tensor 'k' is int16 of shape"),
    "big endian": (lambda: changed(k=np.zeros((2, 5, 8), ">u2")), r"tensor 'k' is >u2 of shape"),
    "BF16 as numpy saves it": (
        lambda: changed(v=tensors()["v"]),
        r"tensor 'v' is \|V2 of shape .* \(numpy cannot store BF16 itself: save x\.view\(numpy\.uint16\)\)",
    ),
    "inexact float32": (
        lambda: with_value("k", (1, 4, 2), 0.1),
        r"tensor 'k' at \(1, 4, 2\) is 0\.10000000149011612; float32 must be exact in BF16, and 1 of 80 values are not",
    ),
    "NaN": (lambda: with_value("v", (0, 3, 1), np.nan), r"tensor 'v' at \(0, 3, 1\) is nan; every value is finite"),
    "infinite word": (
        lambda: changed(q=np.full((4, 5, 8), 0xFF80, np.uint16)),
        r"tensor 'q' at \(0, 0, 0\) is -inf; every value is finite",
    ),
    "rank 2": (
        lambda: changed(q=np.zeros((5, 8), np.uint16)),
        r"tensor 'q' is of shape \(5, 8\); the layout is \[heads, tokens, head_dim\] or \[batch,",
    ),
    "no tokens": (lambda: changed(q=np.zeros((4, 0, 8), np.uint16)), r"tensor 'q' is of shape \(4, 0, 8\); the layout"),
    "mixed rank": (
        lambda: changed(q=np.zeros((1, 4, 5, 8), np.uint16)),
        r"the trace is of mixed rank: q \(1, 4, 5, 8\), k \(2, 5, 8\), v \(2, 5, 8\); q, k and v all have a batch axis",
    ),
    "k and v differ": (
        lambda: changed(v=np.zeros((2, 6, 8), np.uint16)),
        r"the trace is no attention problem; k and v must have one shape, got \(1, 2, 5, 8\) and \(1, 2, 6, 8\)",
    ),
    "head_dim differs": (
        lambda: changed(q=np.zeros((4, 5, 16), np.uint16)),
        r"the trace is no attention problem; q and k must agree in batch and head_dim, got \(1, 4, 5, 16\)",
    ),
    "heads no multiple": (
        lambda: changed(q=np.zeros((3, 5, 8), np.uint16)),
        r"the trace is no attention problem; heads must be a multiple of kv_heads, got 3 and 2",
    ),
    "infinite scale": (lambda: changed(scale=np.inf), r"scale is inf; the scale of the logits is finite"),
    "scale no number": (lambda: changed(scale="0.5"), r"scale is <U3 of shape \(\); it is a 0-d real array"),
    "scale an array": (lambda: changed(scale=np.ones(2)), r"scale is float64 of shape \(2,\); it is a 0-d real array"),
    "causal a number": (lambda: changed(causal=1), r"causal is int64 of shape \(\); it is a 0-d bool array"),
    "provenance no text": (lambda: changed(provenance=1.0), r"provenance is float64 of shape \(\); it is a 0-d string"),
    "provenance no JSON": (lambda: changed(provenance="{"), r"provenance is not JSON \(.*\); it is a JSON object"),
    "provenance a list": (lambda: changed(provenance="[1]"), r"provenance is a JSON list; it is a JSON object"),
}


@pytest.mark.parametrize("case", WRONG_NPZ)
def test_wrong_npz_is_refused(case: str, tmp_path: Path) -> None:
    """The error names the file, the array, the value and the rule."""
    arrays, message = WRONG_NPZ[case]
    with pytest.raises(TraceError, match=message) as caught:
        load_trace(npz(tmp_path, arrays()))
    assert str(caught.value).startswith(str(tmp_path / "mine.npz") + ": ")


WRONG_SAFETENSORS: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "float32": ({"q": np.zeros((4, 5, 8), np.float32)}, {}, r"tensor 'q' is F32; tensors in a \.safetensors are BF16"),
    "words": ({"q": np.zeros((4, 5, 8), np.uint16)}, {}, r"tensor 'q' is U16; tensors in a \.safetensors are BF16"),
    "unknown tensor": ({"w": np.zeros((4, 5, 8), BF16)}, {}, r"tensor 'w' is of no known name; names are q, k, v"),
    "unknown metadata": ({}, {"casual": "true"}, r"metadata 'casual' is of no known name; names are q, k, v"),
    "scale no number": ({}, {"scale": "1/8"}, r"scale is '1/8'; it is a decimal number"),
    "scale NaN": ({}, {"l1.scale": "nan"}, r"l1\.scale is nan; the scale of the logits is finite"),
    "causal no flag": ({}, {"causal": "True"}, r"causal is 'True'; it is 'true' or 'false'"),
    "provenance no JSON": ({}, {"provenance": "mine"}, r"provenance is not JSON"),
    "NaN": ({"k": np.full((2, 5, 8), np.nan, BF16)}, {}, r"tensor 'k' at \(0, 0, 0\) is nan; every value is finite"),
}


@pytest.mark.parametrize("case", WRONG_SAFETENSORS)
def test_wrong_safetensors_are_refused(case: str, tmp_path: Path) -> None:
    """The error names the file, the tensor or the metadata key, the value and the rule."""
    arrays, metadata, message = WRONG_SAFETENSORS[case]
    with pytest.raises(TraceError, match=message) as caught:
        load_trace(safetensors(tmp_path, tensors() | arrays, metadata))
    assert str(caught.value).startswith(str(tmp_path / "mine.safetensors") + ": ")


def test_other_suffixes_and_missing_files_are_refused(tmp_path: Path) -> None:
    """A pickle is not even opened, and a file that is not there is said to be missing."""
    with pytest.raises(TraceError, match=r"the suffix is '\.pkl'; a trace is a \.npz or \.safetensors file"):
        load_trace(tmp_path / "mine.pkl")
    with pytest.raises(TraceError, match=r"absent\.npz: the file is not there; a trace is"):
        load_trace(tmp_path / "absent.npz")


class Bomb:
    """An object whose unpickling would be noticed."""

    exploded = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return explode, ()


def explode() -> None:
    """What an unpickled `Bomb` does."""
    Bomb.exploded = True


def test_pickles_are_refused_unread(tmp_path: Path) -> None:
    """An array of Python objects is refused, and nothing in it runs."""
    path = npz(tmp_path, changed(q=np.array([Bomb()], dtype=object)))
    with pytest.raises(TraceError, match=r"array 'q' is unreadable \(.*\); arrays are plain numbers, not pickled"):
        load_trace(path)
    assert not Bomb.exploded


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04garbage", b"\x93NUMPY\x01\x00"])
def test_files_that_are_no_archive_are_refused(content: bytes, tmp_path: Path) -> None:
    """Empty files, noise and torn headers are refused in either format, never with a foreign error."""
    for suffix, rule in (("npz", r"a \.npz file is what numpy"), ("safetensors", r"a \.safetensors file is what")):
        path = tmp_path / f"mine.{suffix}"
        path.write_bytes(content)
        with pytest.raises(TraceError, match=rf"the content is unreadable \(.*\); {rule}"):
            load_trace(path)


def test_an_array_file_is_no_archive(tmp_path: Path) -> None:
    """A `.npy` file under a `.npz` name is refused."""
    path = tmp_path / "mine.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(TraceError, match=r"the content is a single array; a \.npz file is what numpy\.savez writes"):
        load_trace(path)


def test_damage_is_refused(tmp_path: Path) -> None:
    """One changed byte inside an array breaks its checksum, and the array is named."""
    path = npz(tmp_path, changed())
    content = bytearray(path.read_bytes())
    content[content.index(to_bits(tensors()["k"]).tobytes()) + 7] ^= 1
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"array 'k' is unreadable \(Bad CRC-32"):
        load_trace(path)


def test_torn_files_are_refused(tmp_path: Path) -> None:
    """A file cut anywhere is refused."""
    for path in (npz(tmp_path, changed()), safetensors(tmp_path, tensors())):
        content = path.read_bytes()
        for length in range(0, len(content), 37):
            path.write_bytes(content[:length])
            with pytest.raises(TraceError, match=r"unreadable"):
                load_trace(path)


def test_members_that_are_no_arrays_are_refused(tmp_path: Path) -> None:
    """A zip member without the `.npy` suffix is refused by name."""
    path = npz(tmp_path, changed())
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("scale", json.dumps(0.5))
    with pytest.raises(TraceError, match=r"member 'scale' is no array; a \.npz file holds \.npy arrays alone"):
        load_trace(path)


def test_names_stated_twice_are_refused(tmp_path: Path) -> None:
    """A zip may hold one name twice; which of the two counts is not guessed."""
    path = npz(tmp_path, changed())
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr("q.npy", file.read("k.npy"))
    with pytest.raises(TraceError, match=r"the name 'q' is there more than once; each tensor and setting is stated"):
        load_trace(path)
