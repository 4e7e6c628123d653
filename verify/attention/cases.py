"""Cases: small readable descriptions from which the exact bits of q, k, v follow on any machine.

A case is a shape, a seed, and a list of edits.  The base values come from a counter-based generator defined here, in
integers, so that they depend on no library's version; edits set, scale or copy words.  A case file holds
`AttentionCase.to_json`, which names the generator and carries the digest of the bits it must build, and the versions at
which it was written.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from verify.attention.paged import PagedProblem, paginate
from verify.attention.problem import BF16, AttentionProblem
from verify.attention.ragged import RaggedProblem
from verify.records import encode_number

if TYPE_CHECKING:
    from pathlib import Path

    from jaxtyping import Float64

FORMAT = "flywheel-attention-case/1"
TENSORS = ("q", "k", "v")

GENERATOR = "splitmix64-irwin-hall-4"
"""What `base_values` draws with: the name changes when its bits do."""

MOST_KEPT = 1 << 17
"""Values of a tensor that are kept for the next case of its seed."""

_ABOUT_THE_FILE = ("format", "generator", "dtype", "versions", "sha256")


class CaseError(ValueError):
    """A case file that cannot be read, or that does not build the bits it promises."""


@dataclasses.dataclass(frozen=True)
class Edit:
    """One change of one tensor, applied to `heads` (None: all) and to tokens start, start+step, .. < stop.

    Attributes:
        tensor: q, k or v.
        op: `set` every word of the lanes to `value`; `scale` by 2**value; `mod`: token t holds t mod value;
            `copy`: tokens hold what token `value` holds.
        value: a hexadecimal float, `nan`, `inf`, `-inf`, or an integer.
        heads: heads of the tensor (KV heads for k and v).
        start, stop, step: tokens, as in a slice.
        lanes: (start, stop) along head_dim; None: all.
    """

    tensor: str
    op: str
    value: str
    heads: tuple[int, ...] | None = None
    start: int = 0
    stop: int | None = None
    step: int = 1
    lanes: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """An attention problem in words; dense unless it names sequences.

    Attributes:
        name: says what is special about the case.
        shape: batch, heads, kv_heads, q_len, kv_len, head_dim.
        causal: bottom-right aligned.
        scale: hexadecimal float; None is 1 / sqrt(head_dim).
        seed: of the base values.
        exponents: log2 of the base values' standard deviation, for q, k, v; None: the tensor starts as zero.
        edits: applied in order.
        config: (block_q, block_kv, fragment) that the case was found with; 0 leaves one to the kernel.
        provenance: how the case was found, when, at which versions.
        v_dim: width of the values; None is head_dim.
        window: (left, right), each None or at least 0.
        softcap: hexadecimal float.
        sinks: per head a hexadecimal float that FP32 holds, `nan`, `inf` or `-inf`.
        q_segments: runs (id, tokens) that cover q_len, the same in every batch entry; with k_segments.
        k_segments: runs that cover kv_len.
        cu_seqlens_q: makes the case a ragged batch (batch 1): first token of each sequence, and the end of the last;
            with cu_seqlens_k.  Tokens after the last sequence are padding, which `build` cuts off.
        cu_seqlens_k: the same for keys.
        page_size: makes a ragged case a paged one.
    """

    name: str
    shape: tuple[int, int, int, int, int, int]
    causal: bool = True
    scale: str | None = None
    seed: int = 0
    exponents: tuple[int | None, int | None, int | None] = (0, 0, 0)
    edits: tuple[Edit, ...] = ()
    config: tuple[int, int, int] = (0, 0, 0)
    provenance: str = ""
    v_dim: int | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: str | None = None
    sinks: tuple[str, ...] | None = None
    q_segments: tuple[tuple[int, int], ...] | None = None
    k_segments: tuple[tuple[int, int], ...] | None = None
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None
    page_size: int | None = None

    @property
    def scale_value(self) -> float:
        """The factor of the logits."""
        return 1.0 / math.sqrt(self.shape[5]) if self.scale is None else float.fromhex(self.scale)

    def build(self) -> AttentionProblem:
        """The problem; bit for bit the same everywhere.  Of a ragged or paged case, the dense problem with its f."""
        ragged = self.ragged()
        if ragged is not None:
            return ragged.dense()
        batch, _, _, q_len, kv_len, _ = self.shape
        ids: dict[str, Any] = {
            name: None if runs is None else np.tile(_ids(name, runs, tokens), (batch, 1))
            for name, runs, tokens in (("q_segments", self.q_segments, q_len), ("k_segments", self.k_segments, kv_len))
        }
        q, k, v = self._tensors()
        return AttentionProblem(q, k, v, self.causal, self.scale_value, **self._features(), **ids)

    def features_json(self) -> dict[str, Any]:
        """`features_json` of what the case builds."""
        return features_json(self.build())

    def ragged(self) -> RaggedProblem | None:
        """The ragged batch that the case describes; None if it is a dense one."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            if self.cu_seqlens_q is not self.cu_seqlens_k or self.page_size is not None:
                message = "a ragged case needs cu_seqlens_q and cu_seqlens_k, and a paged one too"
                raise CaseError(message)
            return None
        if self.shape[0] != 1 or self.q_segments is not None or self.k_segments is not None:
            message = f"a ragged case must have batch 1 and no segments, got batch {self.shape[0]}"
            raise CaseError(message)
        lengths = [np.array(cu, dtype=np.int32) for cu in (self.cu_seqlens_q, self.cu_seqlens_k)]
        tensors = [x[0] for x in self._tensors()]
        return RaggedProblem(*tensors, *lengths, causal=self.causal, scale=self.scale_value, **self._features())

    def paged(self) -> PagedProblem | None:
        """The paged call that the case describes, its pages scattered by the seed; None if it is none."""
        ragged = self.ragged()
        return None if ragged is None or self.page_size is None else paginate(ragged, self.page_size, seed=self.seed)

    def _tensors(self) -> list[np.ndarray]:
        batch, heads, kv_heads, q_len, kv_len, head_dim = self.shape
        shapes = {
            "q": (batch, heads, q_len, head_dim),
            "k": (batch, kv_heads, kv_len, head_dim),
            "v": (batch, kv_heads, kv_len, head_dim if self.v_dim is None else self.v_dim),
        }
        arrays = {
            name: base_values(shapes[name], self.seed * len(TENSORS) + stream, exponent)
            for stream, (name, exponent) in enumerate(zip(TENSORS, self.exponents, strict=True))
        }
        for edit in self.edits:
            _apply(edit, arrays[edit.tensor])
        return [arrays[name] for name in TENSORS]

    def _features(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "softcap": None if self.softcap is None else float.fromhex(self.softcap),
            "sinks": None if self.sinks is None else np.array([_fp32(x) for x in self.sinks], dtype=np.float32),
        }

    def to_json(self, *, sha256: str | None = None) -> dict[str, Any]:
        """A JSON object that `from_json` reads back; defaults are left out.

        Args:
            sha256: `digest` of what the case builds, from a caller that has built it; None builds it.
        """
        body: dict[str, Any] = {"format": FORMAT, "generator": GENERATOR, "dtype": str(BF16)}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "edits":
                value = [_edit_to_json(edit) for edit in value]
            if field.name in ("name", "shape", "causal") or value not in (field.default, []):
                body[field.name] = _as_list(value)
        body["sha256"] = digest(self.build()) if sha256 is None else sha256
        return body

    @staticmethod
    def from_json(body: dict[str, Any]) -> AttentionCase:
        """Read a case and check that it builds the bits that it was written with.

        Raises:
            CaseError: wrong format, unknown or missing fields, or other bits.
        """
        if body.get("format") != FORMAT:
            message = f"format must be {FORMAT}, got {body.get('format')!r}"
            raise CaseError(message)
        for key, only in (("generator", GENERATOR), ("dtype", str(BF16))):
            if body.get(key, only) != only:
                message = f"{key} must be {only}, got {body[key]!r}"
                raise CaseError(message)
        fields = {key: value for key, value in body.items() if key not in _ABOUT_THE_FILE}
        try:
            fields["edits"] = tuple(_edit_from_json(edit) for edit in fields.get("edits", ()))
            for key, value in fields.items():
                if isinstance(value, list):
                    fields[key] = tuple(value)
            for key in ("q_segments", "k_segments"):
                if fields.get(key) is not None:
                    fields[key] = tuple((int(segment), int(tokens)) for segment, tokens in fields[key])
            case = AttentionCase(**fields)
            found = digest(case.build())
        except (TypeError, ValueError, KeyError, IndexError) as error:
            message = f"case {body.get('name')!r} cannot be built: {error}"
            raise CaseError(message) from error
        if "sha256" in body and body["sha256"] != found:
            message = (
                f"case {case.name!r} builds other bits than it was written with: {found} instead of {body['sha256']}"
            )
            raise CaseError(message)
        return case


def save_case(case: AttentionCase, path: Path) -> None:
    """Write a case file; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    body = case.to_json() | {"versions": {name: importlib.metadata.version(name) for name in ("jax", "numpy")}}
    partial.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def load_case(path: Path) -> AttentionCase:
    """Read a case file.

    Raises:
        CaseError: names the file and what is wrong with it.
    """
    try:
        return AttentionCase.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, CaseError) as error:
        message = f"{path}: {error}"
        raise CaseError(message) from error


def digest(problem: AttentionProblem) -> str:
    """SHA-256 over the shapes and words of q, k and v, the mask, the scale, and whatever else the problem has."""
    h = hashlib.sha256()
    for x in (problem.q, problem.k, problem.v):
        h.update(repr(x.shape).encode())
        h.update(np.ascontiguousarray(x).view(np.uint16).astype("<u2").tobytes())
    h.update(f"{problem.causal} {float(problem.scale).hex()}".encode())
    if problem.window is not None:
        h.update(f" window {problem.window}".encode())
    if problem.softcap is not None:
        h.update(f" softcap {float(problem.softcap).hex()}".encode())
    if problem.sinks is not None:
        h.update(b" sinks " + np.ascontiguousarray(problem.sinks).astype("<f4").tobytes())
    for name in ("q_segments", "k_segments", "q_positions"):
        x = getattr(problem, name)
        if x is not None:
            h.update(f" {name} ".encode() + np.ascontiguousarray(x).astype("<i8").tobytes())
    return h.hexdigest()


def features_json(problem: AttentionProblem) -> dict[str, Any]:
    """What a call asks for beyond plain dense attention, as strict JSON; empty if nothing."""
    body: dict[str, Any] = {}
    if problem.v_dim != problem.head_dim:
        body["v_dim"] = problem.v_dim
    if problem.window is not None:
        body["window"] = list(problem.window)
    if problem.softcap is not None:
        body["softcap"] = problem.softcap
    if problem.sinks is not None:
        body["sinks"] = [encode_number(sink) for sink in problem.sinks]
    if problem.q_segments is not None and problem.k_segments is not None:
        body["segments"] = {"q": np.unique(problem.q_segments).size, "k": np.unique(problem.k_segments).size}
    if problem.q_positions is not None and problem.q_positions.size:
        body["positions"] = [int(x) for x in (problem.q_positions.min(), problem.q_positions.max())]
    return body


def base_values(shape: tuple[int, ...], stream: int, exponent: int | None) -> np.ndarray:
    """Bell-shaped BF16 values with standard deviation 2**exponent: sums of four 16-bit uniforms (Irwin-Hall).

    The words come from SplitMix64 (Steele, Lea, Flood 2014) in counter mode, the rest is exact.
    """
    if exponent is None:
        return np.zeros(shape, BF16)
    count = math.prod(shape)
    wide = _kept_bell(count, stream) if count <= MOST_KEPT else _bell(count, stream)
    return np.ldexp(wide, exponent).reshape(shape).astype(BF16)


@functools.lru_cache(maxsize=16)
def _kept_bell(count: int, stream: int) -> Float64[np.ndarray, " count"]:
    """As `_bell`: a search varies exponents and edits of one seed."""
    return _bell(count, stream)


def _bell(count: int, stream: int) -> Float64[np.ndarray, " count"]:
    """The values of one stream with standard deviation 1."""
    with np.errstate(over="ignore"):
        z = np.arange(count, dtype=np.uint64) + np.uint64((stream * 0xD1342543DE82EF95 + 1) % 2**64)
        z *= np.uint64(0x9E3779B97F4A7C15)
        shifted = z >> np.uint64(30)
        z ^= shifted
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= np.right_shift(z, np.uint64(27), out=shifted)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= np.right_shift(z, np.uint64(31), out=shifted)
    # Add the four 16-bit parts of each word: two pairs in one go, then the pairs.
    np.right_shift(z, np.uint64(16), out=shifted)
    shifted &= np.uint64(0x0000FFFF0000FFFF)
    z &= np.uint64(0x0000FFFF0000FFFF)
    z += shifted
    np.right_shift(z, np.uint64(32), out=shifted)
    z &= np.uint64(0xFFFFFFFF)
    z += shifted
    wide = z.astype(np.float64)
    wide -= 2.0 * 65535.0
    # Four uniforms on [0, 65535] have standard deviation 65536 / sqrt(3); 1.75 stands for sqrt(3).
    wide *= 1.75 / 65536.0
    wide.flags.writeable = False
    return wide


def _apply(edit: Edit, x: np.ndarray) -> None:
    lanes = slice(None) if edit.lanes is None else slice(*edit.lanes)
    tokens = slice(edit.start, edit.stop, edit.step)
    # Views [batch, heads, tokens, lanes] and [batch, tokens, lanes]; of all heads in one, which is the common case.
    heads = [x] if edit.heads is None else [x[:, head] for head in edit.heads]
    for head in heads:
        part = head[..., tokens, lanes]
        if edit.op == "set":
            part[...] = _bf16(edit.value)
        elif edit.op == "scale":
            part[...] = np.ldexp(part.astype(np.float64), int(edit.value)).astype(BF16)
        elif edit.op == "mod":
            part[...] = (np.arange(x.shape[2])[tokens] % int(edit.value)).astype(BF16)[:, None]
        elif edit.op == "copy":
            part[...] = head[..., [int(edit.value)], lanes].copy()
        else:
            message = f"op must be set, scale, mod or copy, got {edit.op!r}"
            raise CaseError(message)


@functools.lru_cache(maxsize=256)
def _bf16(value: str) -> np.ndarray:
    """A BF16 word from its hexadecimal text; a number that BF16 cannot hold is refused, not rounded."""
    wide = float(value) if value in ("nan", "inf", "-inf") else float.fromhex(value)
    word = np.array(wide).astype(ml_dtypes.bfloat16)
    if not math.isnan(wide) and float(word) != wide:
        message = f"value must be a BF16 number, got {value} (nearest: {float(word).hex()})"
        raise CaseError(message)
    return word


def _fp32(value: str) -> float:
    """An FP32 number from its hexadecimal text; a number that FP32 cannot hold is refused, not rounded."""
    wide = float(value) if value in ("nan", "inf", "-inf") else float.fromhex(value)
    with np.errstate(over="ignore"):
        word = float(np.float32(wide))
    if not math.isnan(wide) and word != wide:
        message = f"a sink must be an FP32 number, got {value} (nearest: {word.hex()})"
        raise CaseError(message)
    return wide


def _ids(name: str, runs: tuple[tuple[int, int], ...], tokens: int) -> np.ndarray:
    """Segment ids from runs (id, tokens)."""
    ids = np.concatenate([np.zeros(0, np.int64), *(np.full(count, segment, np.int64) for segment, count in runs)])
    if len(ids) != tokens:
        message = f"{name} must cover {tokens} tokens, got runs {list(runs)} of {len(ids)}"
        raise CaseError(message)
    return ids


def _as_list(value: Any) -> Any:  # noqa: ANN401  any field of a case
    return [_as_list(item) for item in value] if isinstance(value, tuple) else value


def _edit_to_json(edit: Edit) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for field in dataclasses.fields(edit):
        value = getattr(edit, field.name)
        if field.name in ("tensor", "op", "value") or value != field.default:
            body[field.name] = list(value) if isinstance(value, tuple) else value
    return body


def _edit_from_json(body: dict[str, Any]) -> Edit:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in body.items()}
    return Edit(**fields)
