"""Adversarial Gated DeltaNet problems, drawn from named families of keys, write strengths and decays.

A case is its names, sizes and seed; everything else follows.  Families put the benign value first.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.problem import BF16, DeltaRuleProblem, GdnProblem, Sequences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jaxtyping import Float64

    Draw = Callable[[np.random.Generator, int], np.ndarray]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)


def _direction(rng: np.random.Generator, d: int) -> np.ndarray:
    return _unit(rng.standard_normal((1, d)))


def _near_duplicates(rng: np.random.Generator, tokens: int, d: int) -> np.ndarray:
    spread = rng.choice([1e-3, 1e-2, 0.1, 0.3])
    return _unit(_direction(rng, d) + spread * _unit(rng.standard_normal((tokens, d))))


def _periodic(rng: np.random.Generator, tokens: int, d: int) -> np.ndarray:
    period = int(rng.integers(2, 9))
    return _unit(rng.standard_normal((period, d)))[np.arange(tokens) % period]


def _low_rank(rng: np.random.Generator, tokens: int, d: int) -> np.ndarray:
    rank = min(int(rng.integers(2, 4)), d)
    return _unit(rng.standard_normal((tokens, rank)) @ rng.standard_normal((rank, d)))


def _alternating(rng: np.random.Generator, tokens: int, d: int) -> np.ndarray:
    return _direction(rng, d) * ((-1.0) ** np.arange(tokens))[:, None]


def _norms_above_one(rng: np.random.Generator, tokens: int, d: int) -> np.ndarray:
    """BF16 vectors that unit vectors may round to, and that are longer: |k|^2 about 1.0034 (1.0078 at most)."""
    return _unit(rng.standard_normal((tokens, d))) * 1.0017


KEYS: dict[str, Callable[[np.random.Generator, int, int], Float64[np.ndarray, "tokens d_k"]]] = {
    "random": lambda rng, tokens, d: _unit(rng.standard_normal((tokens, d))),
    "identical": lambda rng, tokens, d: np.repeat(_direction(rng, d), tokens, axis=0),
    "near-duplicate": _near_duplicates,
    "periodic": _periodic,
    "low-rank": _low_rank,
    "alternating": _alternating,
    "zero": lambda rng, tokens, d: _unit(rng.standard_normal((tokens, d))) * (rng.random((tokens, 1)) < 0.5),
    "norms-above-one": _norms_above_one,
}

BETAS: dict[str, Draw] = {
    "up to 1": lambda rng, n: rng.uniform(0.0, 1.0, n),
    "1": lambda _, n: np.ones(n),
    "constant": lambda rng, n: np.full(n, rng.choice([0.5, 0.58, 0.835])),
    "1 to 2": lambda rng, n: rng.uniform(1.0, 2.0, n),
    "2": lambda _, n: np.full(n, 2.0),
    "tiny or 1": lambda rng, n: rng.choice([2.0**-20, 1.0], n),
}


def _with(rng: np.random.Generator, n: int, value: float) -> np.ndarray:
    g = -np.abs(rng.standard_normal(n)) * 0.05
    if n:
        g[rng.integers(0, n, max(n // 8, 1))] = value
    return g


DECAYS: dict[str, Draw] = {
    "0": lambda _, n: np.zeros(n),
    "mild": lambda rng, n: -np.abs(rng.standard_normal(n)) * 0.05,
    "partly 0": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.05),
    "resets": lambda rng, n: _with(rng, n, -np.inf),
    "huge": lambda rng, n: _with(rng, n, float(rng.choice([-700.0, -1e4, -1e30]))),
    "strong": lambda rng, n: np.full(n, -5.0) * rng.uniform(0.9, 1.1),
    "far below -88.7": lambda rng, n: -rng.uniform(0.0, 30.0, n),
}


@dataclasses.dataclass(frozen=True)
class GdnCase:
    """One case.

    Attributes:
        keys, beta, decay: names of families.
        seed: of all draws.
        lengths: of the packed sequences.
        heads: (n_kq, n_v, d_k, d_v).
        per_channel: each key channel decays on its own.
        initial: False: the slots hold states that must not be used.
    """

    keys: str
    beta: str
    decay: str
    seed: int = 0
    lengths: tuple[int, ...] = (64,)
    heads: tuple[int, int, int, int] = (1, 1, 16, 8)
    per_channel: bool = False
    initial: bool = True

    @property
    def name(self) -> str:
        """Its names and numbers."""
        return f"{self.keys}, beta {self.beta}, decay {self.decay}, {self.lengths}, {self.heads}, seed {self.seed}"

    def _sequences(self) -> Sequences:
        packed = Sequences.packed(list(self.lengths))
        return dataclasses.replace(packed, has_initial=np.full(packed.count, self.initial))

    def rule(self, dtype: np.dtype = BF16) -> DeltaRuleProblem:
        """Queries, keys and values of `dtype` and gates: what the delta rule reads."""
        rng = np.random.default_rng(self.seed)
        n_kq, n_v, d_k, d_v = self.heads
        tokens = sum(self.lengths)
        k = np.stack([KEYS[self.keys](rng, tokens, d_k) for _ in range(n_kq)], axis=1)
        q = _unit(rng.standard_normal((tokens, n_kq, d_k)))
        v = rng.standard_normal((tokens, n_v, d_v))
        beta = np.stack([BETAS[self.beta](rng, tokens) for _ in range(n_v)], axis=1)
        if self.per_channel:
            flat = DECAYS[self.decay](rng, tokens * n_v * d_k) if tokens else np.zeros(0)
            g = flat.reshape(tokens, n_v, d_k)
        else:
            g = np.stack([DECAYS[self.decay](rng, tokens) for _ in range(n_v)], axis=1)
        state = rng.standard_normal((len(self.lengths), n_v, d_k, d_v)) * 0.3
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        beta, g, state = (x.astype(np.float32) for x in (beta, g, state))
        return DeltaRuleProblem(q, k, v, beta, g, state, self._sequences(), scale=d_k**-0.5)

    def layer(self, *, width: int = 4, size: float = 1.0, negative: bool = False, biased: bool = False) -> GdnProblem:
        """A whole layer call whose convolved keys follow the family; gate logits give about its beta and decays.

        Args:
            width: taps of the convolution.
            size: of the projection; far from 1 it reaches the ends of silu and of the norm's epsilon.
            negative: beta is twice a sigmoid.
            biased: with a bias of the convolution.
        """
        rng = np.random.default_rng(self.seed)
        rule = self.rule()
        n_kq, n_v, d_k, d_v = self.heads
        tokens, dim = rule.tokens, 2 * n_kq * d_k + n_v * d_v
        parts = [x.astype(np.float64).reshape(tokens, -1) for x in (rule.q, rule.k, rule.v)]
        qkv = np.concatenate([parts[0] * 4.0, parts[1] * 4.0, parts[2]], axis=1) * size
        taps = rng.standard_normal((width, dim)) * 0.1
        taps[-1] += 1.0
        scale = 2.0 if negative else 1.0
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            share = np.clip(rule.beta.astype(np.float64) / scale, 0.0, 1.0)
            b = np.log(share) - np.log1p(-share)
            rate = -rule.g.astype(np.float64) if rule.g is not None else np.zeros((tokens, n_v))
            a = np.where(rate > 30.0, rate, np.log(np.expm1(rate)))
        slots = len(self.lengths)
        conv_state = rng.standard_normal((slots, width - 1, dim)) * size
        return GdnProblem(
            qkv=qkv.astype(BF16),
            taps=taps.astype(BF16),
            bias=(rng.standard_normal(dim) * 0.1).astype(BF16) if biased else None,
            b=np.clip(b, -200.0, 200.0).astype(BF16),
            a=a.astype(BF16),
            a_log=rng.uniform(-1.0, 1.0, n_v).astype(np.float32),
            dt_bias=rng.uniform(-1.0, 1.0, (n_v, d_k) if self.per_channel else n_v).astype(np.float32),
            conv_state=conv_state.astype(BF16),
            state=rule.state,
            sequences=self._sequences(),
            heads=self.heads,
            scale=d_k**-0.5,
            beta_scale=scale,
        )


def every_family(seed: int = 0, **sizes: object) -> Iterator[GdnCase]:
    """Every combination of families, each with a seed of its own."""
    number = seed
    for keys in KEYS:
        for beta in BETAS:
            for decay in DECAYS:
                yield GdnCase(keys, beta, decay, seed=number, **sizes)  # type: ignore[arg-type]
                number += 1
