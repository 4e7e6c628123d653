"""Matrices of the chunk's inverse in words: L_ij = beta_i (k_i . k_j) a_(j+1) .. a_i for i > j, in FP32.

Keys are BF16, beta and the decay factors a are FP32.  A family and a few numbers give them; a search that has moved the
words writes them out (`keys`, `betas`).  Everything is computed in float64 in a fixed order, so that the bits are the
same everywhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz.gdn import written
from verify.attention.cases import CaseError, base_values
from verify.attention.problem import BF16

if TYPE_CHECKING:
    from jaxtyping import Float32, Float64

FORMAT = "flywheel-inverse-case/1"
CHUNK = 64
FAMILIES = ("repeated", "near-duplicate", "alternating", "periodic", "low-rank", "random")
BETAS = ("constant", "uniform", "ends")
"""How write strengths are drawn: all the largest, anywhere up to it, or at random 0 or the largest."""

_KEYS, _NOISE, _BETA, _DECAY = range(4)


@dataclasses.dataclass(frozen=True, eq=False)
class InverseProblem:
    """What an inverse is asked for.

    Attributes:
        lower: FP32, strictly lower triangular.
        beta: FP32 write strengths that went into it.
    """

    lower: Float32[np.ndarray, "64 64"]
    beta: Float32[np.ndarray, " 64"]


@dataclasses.dataclass(frozen=True)
class InverseCase:
    """One matrix in words.

    Attributes:
        name: says what is special.
        width: of the keys.
        family: one of `FAMILIES`.
        period: of periodic keys, rank of low-rank ones.
        noise: log2 of what near-duplicates differ by, relative to the common key.
        beta_kind: one of `BETAS`.
        beta_max: largest write strength, a hexadecimal float (FP32).
        decay: factor per token, a hexadecimal float in [0, 1]; `random` in (0, 1].
        seed: of what is drawn.
        keys: instead of the family: 64 rows of BF16 words in hexadecimal.
        betas: instead of the kind: 64 FP32 numbers, hexadecimal floats.
        provenance: how the case was found.
    """

    name: str
    width: int = 8
    family: str = "repeated"
    period: int = 1
    noise: int = -3
    beta_kind: str = "constant"
    beta_max: str = "0x1p+0"
    decay: str = "0x1p+0"
    seed: int = 0
    keys: tuple[str, ...] = ()
    betas: tuple[str, ...] = ()
    provenance: str = ""

    def key_words(self) -> np.ndarray:
        """BF16 keys `[64, width]`: of norm 1 up to rounding, unless they are written out."""
        if self.keys:
            rows = [[int(row[n : n + 4], 16) for n in range(0, len(row), 4)] for row in self.keys]
            return np.array(rows, dtype=np.uint16).view(BF16)
        return unit(_directions(self))

    def beta(self) -> Float32[np.ndarray, " 64"]:
        """Write strengths."""
        if self.betas:
            return np.array([float.fromhex(x) for x in self.betas], dtype=np.float32)
        largest = float.fromhex(self.beta_max)
        uniform = _uniform(self, _BETA)
        share = {"constant": np.ones(CHUNK), "uniform": uniform, "ends": (uniform > 0.5).astype(np.float64)}
        return (largest * share[self.beta_kind]).astype(np.float32)

    def decays(self) -> Float64[np.ndarray, " 64"]:
        """Factors per token."""
        if self.decay == "random":
            return _uniform(self, _DECAY).astype(np.float32).astype(np.float64)
        return np.full(CHUNK, float.fromhex(self.decay))

    def build(self) -> InverseProblem:
        """The matrix."""
        beta = self.beta()
        return InverseProblem(lower(self.key_words().astype(np.float64), beta.astype(np.float64), self.decays()), beta)

    def to_json(self, *, sha256: str | None = None) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return written.write(self, FORMAT, digest(self.build()) if sha256 is None else sha256)

    @staticmethod
    def from_json(body: dict[str, Any]) -> InverseCase:
        """Read a case, and check its bits; a CaseError says what is wrong (`fuzz.gdn.written.read`)."""
        return written.read(InverseCase, FORMAT, body, lambda case: digest(case.build()))

    def written_out(self, keys: np.ndarray, beta: np.ndarray, name: str) -> InverseCase:
        """The same with these words instead of the family's."""
        rows = tuple("".join(f"{word:04x}" for word in row) for row in keys.astype(BF16).view(np.uint16).tolist())
        betas = tuple(float(x).hex() for x in beta.astype(np.float32))
        return dataclasses.replace(self, name=name, keys=rows, betas=betas, width=keys.shape[1], provenance="")


def lower(keys: np.ndarray, beta: np.ndarray, decays: np.ndarray) -> Float32[np.ndarray, "*batch 64 64"]:
    """L of float64 keys `[.., 64, width]`, beta `[.., 64]` and decays `[64]`, summed lane by lane."""
    dots = np.zeros((*keys.shape[:-1], keys.shape[-2]))
    for lane in range(keys.shape[-1]):
        dots += keys[..., :, None, lane] * keys[..., None, :, lane]
    factor = np.zeros((CHUNK, CHUNK))
    column = np.zeros(CHUNK)
    for i in range(CHUNK):
        column = column * decays[i]
        factor[i] = column
        column[i] = 1.0
    return (beta[..., :, None] * dots * factor).astype(np.float32)


def unit(directions: np.ndarray) -> np.ndarray:
    """Rows scaled to norm 1 and rounded to BF16; a zero row stays zero."""
    norm = np.sqrt((directions * directions).sum(axis=-1, keepdims=True))
    return (directions / np.where(norm > 0, norm, 1.0)).astype(BF16)


def digest(problem: InverseProblem) -> str:
    """SHA-256 of the matrix's words."""
    words = np.ascontiguousarray(problem.lower).view(np.uint32).astype("<u4").tobytes()
    return hashlib.sha256(b"inverse" + words + np.ascontiguousarray(problem.beta).astype("<f4").tobytes()).hexdigest()


def _normal(case: InverseCase, stream: int, rows: int) -> np.ndarray:
    return base_values((rows, case.width), 4 * case.seed + stream, 0).astype(np.float64)


def _uniform(case: InverseCase, stream: int) -> np.ndarray:
    """In (0, 1), from the bell-shaped generator by its own distribution function, roughly."""
    bell = base_values((CHUNK,), 4 * case.seed + stream, 0).astype(np.float64)
    return np.array([0.5 * math.erfc(-x / math.sqrt(2.0)) for x in bell])


def _directions(case: InverseCase) -> np.ndarray:
    """Keys before they are normalised."""
    common = _normal(case, _KEYS, 1)
    index = np.arange(CHUNK)
    if case.family == "repeated":
        return np.repeat(common, CHUNK, axis=0)
    if case.family == "near-duplicate":
        size = np.sqrt((common * common).sum() / case.width)
        return common + np.ldexp(size, case.noise) * _normal(case, _NOISE, CHUNK)
    if case.family == "alternating":
        return common * np.where(index % 2, -1.0, 1.0)[:, None]
    if case.family == "periodic":
        return _normal(case, _KEYS, max(case.period, 1))[index % max(case.period, 1)]
    if case.family == "low-rank":
        rank = max(min(case.period, case.width), 1)
        return _normal(case, _NOISE, CHUNK)[:, :rank] @ _normal(case, _KEYS, rank)
    if case.family == "random":
        return _normal(case, _NOISE, CHUNK)
    message = f"family must be one of {', '.join(FAMILIES)}, got {case.family!r}"
    raise CaseError(message)
