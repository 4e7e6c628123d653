"""Calls of a Gated DeltaNet layer in words: families of keys, strengths and decays, packing, slots, and poison."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from fuzz.gdn import written
from verify.attention.cases import CaseError
from verify.gdn.cases import BETAS, DECAYS, KEYS, GdnCase
from verify.gdn.problem import BF16, PADDED, GdnProblem, Sequences

FORMAT = "flywheel-layer-case/1"
GATES = {
    "ordinary": None,
    "a_log 88, dt -200": (88.0, -200.0),
    "a_log 88, dt 5": (88.0, 5.0),
    "a_log -80": (-80.0, 1.0),
}
"""(a_log, dt_bias) of every head, or as drawn: where exp(a_log) overflows before its product with softplus."""

NORMS = {"eps 1e-6": 1e-6, "eps 0": 0.0, "none": None}
"""What stands beside the sum of squares under the root; none: no norm at all."""

SPOILT = ("tokens", "conv state", "state")
"""Where a sequence may be non-finite from: its own rows, or what its slot holds for it."""


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """One call.

    Attributes:
        name: says what is special.
        keys, beta, decay: families of `verify.gdn.cases`.
        seed: of what is drawn.
        lengths: of the packed sequences.
        padding: tokens behind the last sequence.
        heads: n_kq, n_v.
        width: taps of the convolution.
        size: log2 of the projection's scale.
        biased: with a bias of the convolution.
        norm: one of `NORMS`.
        activation: of the convolution, `silu` or `none`.
        doubled: write strengths are twice a sigmoid, up to 2.
        gates: one of `GATES`.
        initial: per sequence 1 if its initial state counts.
        reads, writes: slot of each sequence's initial and final states; -1 reads zeros, writes nowhere.
        slots: how many slots there are.
        poison: NaN in the padding, in slots that no sequence reads, and in initial states that do not count.
        spoilt: a sequence that is NaN by itself, which no other may notice; -1: none is.
        spoilt_by: one of `SPOILT`.
        provenance: how the case was found.
    """

    name: str
    keys: str = "random"
    beta: str = "up to 1"
    decay: str = "0"
    seed: int = 0
    lengths: tuple[int, ...] = (64,)
    padding: int = 0
    heads: tuple[int, int] = (1, 1)
    width: int = 4
    size: int = 0
    biased: bool = False
    norm: str = "eps 1e-6"
    activation: str = "silu"
    doubled: bool = False
    gates: str = "ordinary"
    initial: tuple[int, ...] = (1,)
    reads: tuple[int, ...] = (0,)
    writes: tuple[int, ...] = (0,)
    slots: int = 1
    poison: bool = False
    spoilt: int = -1
    spoilt_by: str = "tokens"
    provenance: str = ""

    def build(self) -> GdnProblem:
        """The problem."""
        for name, table in _TABLES.items():
            if getattr(self, name) not in table:
                message = f"{name} must be one of {', '.join(table)}, got {getattr(self, name)!r}"
                raise CaseError(message)
        # What lies behind the last sequence is drawn as a sequence of its own, then belongs to none.
        lengths = (*self.lengths, *([self.padding] if self.padding else []), *([0] * self.slots))
        drawn = GdnCase(self.keys, self.beta, self.decay, self.seed, lengths, (*self.heads, 128, 128))
        whole = drawn.layer(width=self.width, size=2.0**self.size, negative=self.doubled, biased=self.biased)
        last = sum(self.lengths)
        sequences = Sequences(
            np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64),
            np.array(self.reads, dtype=np.int64),
            np.array(self.writes, dtype=np.int64),
            np.array(self.initial, dtype=bool),
        )
        state, conv = whole.state[: self.slots].copy(), whole.conv_state[: self.slots].copy()
        qkv, a, b = whole.qkv.copy(), whole.a.copy(), whole.b.copy()
        if self.poison:
            for x in (qkv, a, b):
                x[last:] = np.array(np.nan).astype(BF16)
            counted = {slot for slot, on in zip(self.reads, self.initial, strict=True) if on and slot != PADDED}
            for slot in set(range(self.slots)) - counted:
                state[slot], conv[slot] = np.nan, np.array(np.nan).astype(BF16)
        self._spoil(qkv, state, conv)
        changes: dict[str, Any] = {"norm_eps": NORMS[self.norm], "activation": self.activation}
        extreme = GATES[self.gates]
        if extreme is not None:
            changes |= {
                "a_log": np.full_like(whole.a_log, extreme[0]),
                "dt_bias": np.full_like(whole.dt_bias, extreme[1]),
            }
        return dataclasses.replace(
            whole, qkv=qkv, a=a, b=b, state=state, conv_state=conv, sequences=sequences, **changes
        )

    def _spoil(self, qkv: np.ndarray, state: np.ndarray, conv: np.ndarray) -> None:
        """Put NaN into one sequence, or into what it starts from."""
        if self.spoilt < 0:
            return
        first = sum(self.lengths[: self.spoilt])
        slot = self.reads[self.spoilt]
        if self.spoilt_by == "tokens":
            qkv[first : first + self.lengths[self.spoilt]] = np.array(np.nan).astype(BF16)
        elif slot != PADDED:
            target = state if self.spoilt_by == "state" else conv
            target[slot] = np.array(np.nan).astype(target.dtype)

    def to_json(self, *, sha256: str | None = None) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return written.write(self, FORMAT, digest(self.build()) if sha256 is None else sha256)

    @staticmethod
    def from_json(body: dict[str, Any]) -> LayerCase:
        """Read a case, and check its bits; a CaseError says what is wrong (`fuzz.gdn.written.read`)."""
        return written.read(LayerCase, FORMAT, body, lambda case: digest(case.build()))


_TABLES: dict[str, Any] = {
    "keys": KEYS,
    "beta": BETAS,
    "decay": DECAYS,
    "gates": GATES,
    "norm": NORMS,
    "spoilt_by": SPOILT,
}
"""What a field that names a family may say."""


def digest(problem: GdnProblem) -> str:
    """SHA-256 of everything that a call is given."""
    h = hashlib.sha256(
        f"layer {problem.heads} {problem.scale.hex()} {problem.beta_scale} {problem.activation}".encode()
    )
    if problem.norm_eps != NORMS["eps 1e-6"]:  # files from before it was drawn keep their digests
        h.update(f"eps {problem.norm_eps}".encode())
    for name in ("qkv", "taps", "bias", "b", "a", "a_log", "dt_bias", "conv_state", "state"):
        x = getattr(problem, name)
        if x is not None:
            words = np.uint16 if x.dtype == BF16 else np.uint32
            h.update(f"{name} {x.shape}".encode() + np.ascontiguousarray(x).view(words).tobytes())
    s = problem.sequences
    for x in (s.boundaries, s.read_slots, s.write_slots, s.has_initial):
        h.update(np.ascontiguousarray(x).astype("<i8").tobytes())
    return h.hexdigest()
