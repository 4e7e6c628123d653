"""Known ways in which Gated DeltaNet kernels have gone wrong elsewhere: small inputs, each with its right answer.

The letters are those of the collection that the cases come from: E lengths and packed batches, F Gated DeltaNet, P what
probing of kernels in public use has found.  Answers are closed forms; where none is given, the oracles' answer is due.
A case of the delta rule alone has a twin for kernels that take a whole layer (`layer`): the same tokens through
projection, convolution, activation and norm, with the oracles' answer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.definition import answer
from verify.gdn.problem import BF16, GdnProblem, Sequences
from verify.gdn.small_problems import LAYER_HEADS, convolving, equal_keys, layer, normed, scalar

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.gdn.problem import Problem
    from verify.gdn.reference import GdnReference


@dataclasses.dataclass(frozen=True, eq=False)
class GdnOpenCase:
    """One input with its right answer.

    Attributes:
        name: letter and number of the case, then what is special.
        words: the input, as a reader would say it.
        answer: the right answer in words.
        make: builds the problem.
        layer: builds its twin for kernels that take a layer; None if `make` gives one, or none is due.
        out: closed form per token, the same for every head and lane; None if the oracles alone say it.
        state: closed form per slot, the same for every head and entry; None if it is not given.
        tier: "cover" runs each time, "deep" when asked.
    """

    name: str
    words: str
    answer: str
    make: Callable[[], Problem]
    layer: Callable[[], GdnProblem] | None = None
    out: tuple[float, ...] | None = None
    state: tuple[float, ...] | None = None
    tier: str = "cover"

    def build(self) -> Problem:
        """The problem."""
        return self.make()

    def build_layer(self) -> GdnProblem | None:
        """The problem for a kernel that takes a layer; None if there is none."""
        if self.layer is not None:
            return self.layer()
        problem = self.make()
        return problem if isinstance(problem, GdnProblem) and problem.heads == LAYER_HEADS else None

    def answer_of(self, problem: Problem) -> GdnReference:
        """The closed form, of the problem's shape; a state that is not given is not compared."""
        tokens, (slots, n_v, d_k, d_v) = problem.tokens, problem.state.shape
        out = np.broadcast_to(np.asarray(self.out, np.float64)[:, None, None], (tokens, n_v, d_v))
        if self.state is None:
            shape = problem.state.shape
            return dataclasses.replace(answer(out, np.zeros(shape)), state_error=np.full(shape, np.inf))
        state = np.broadcast_to(np.asarray(self.state, np.float64)[:, None, None, None], (slots, n_v, d_k, d_v))
        return answer(out, state)


def _lengths() -> list[GdnOpenCase]:
    empty = Sequences.packed([0, 5, 0])
    cases = [
        GdnOpenCase(
            "e2-zero-length-sequences",
            "packed: 0, 5 and 0 tokens with initial states 1, 2, 3; k = q = 1, beta 1/2, v = 0, no decay",
            "states 1 and 3 as they were; 2 is halved five times",
            lambda: scalar([0.0] * 5, state=(1.0, 2.0, 3.0), sequences=empty),
            lambda: layer([0.0] * 5, state=(1.0, 2.0, 3.0), sequences=empty),
            out=(1.0, 0.5, 0.25, 0.125, 0.0625),
            state=(1.0, 0.0625, 3.0),
        )
    ]
    for first, second in ((13, 17), (1, 1), (8, 9), (16, 1), (7, 64)):
        lengths = [first, second]
        v = [1.0] * first + [2.0] * second
        cases.append(
            GdnOpenCase(
                f"e7-neighbouring-sequences-{first}-{second}",
                f"packed: {first} and {second} tokens, k = q = 1, beta 1, no decay, v of sequence r is r + 1",
                "1 in the first sequence, 2 in the second, as each alone",
                functools.partial(scalar, v, beta=1.0, state=(7.0, 9.0), sequences=Sequences.packed(lengths)),
                functools.partial(layer, v, b=20.0, state=(7.0, 9.0), sequences=Sequences.packed(lengths)),
                out=tuple(v),
                state=(1.0, 2.0),
                tier="cover" if first == 13 else "deep",
            )
        )
    return cases


def _logit(beta: float) -> float:
    return 20.0 if beta >= 1.0 else math.log(beta / (1.0 - beta))


def _keys() -> list[GdnOpenCase]:
    rng = np.random.default_rng(41)
    tokens, d_k = 64, LAYER_HEADS[2]
    direction = rng.standard_normal(d_k)
    noise = rng.standard_normal((tokens, d_k))
    v = rng.uniform(0.5, 2.0, tokens).round(2).tolist()

    def repeated(eps: float, beta: float, a: float, sign: float = 1.0) -> GdnProblem:
        signs = sign ** np.arange(tokens)[:, None]
        # Small entries, for which silu is nearly x / 2: directions survive it.
        rows = (direction + eps * noise) * signs * 2.0**-6
        return layer(v, b=_logit(beta), a=a, keys=rows)

    # softplus(-6.9) is about 1e-3
    return [
        GdnOpenCase(
            f"f1-repeated-keys-{name}",
            f"64 tokens, one key direction {words}, beta {beta}, g {g}",
            "the recurrence",
            functools.partial(repeated, eps, beta, a, sign),
            tier="cover" if name in {"equal-0.835", "spread-0.1"} else "deep",
        )
        for name, words, eps, beta, a, g, sign in (
            ("equal-0.835", "repeated", 0.0, 0.835, -6.9, "-1e-3", 1.0),
            ("equal-0.5", "repeated", 0.0, 0.5, -200.0, "0", 1.0),
            ("equal-1", "repeated", 0.0, 1.0, -200.0, "0", 1.0),
            ("equal-0.58", "repeated", 0.0, 0.58, -4.6, "-1e-2", 1.0),
            ("spread-1e-3", "and 1e-3 of noise", 1e-3, 0.835, -6.9, "-1e-3", 1.0),
            ("spread-1e-2", "and 1e-2 of noise", 1e-2, 0.835, -6.9, "-1e-3", 1.0),
            ("spread-0.1", "and 0.1 of noise", 0.1, 0.835, -6.9, "-1e-3", 1.0),
            ("spread-0.3", "and 0.3 of noise", 0.3, 1.0, -200.0, "0", 1.0),
            ("alternating", "with alternating signs", 0.0, 0.835, -6.9, "-1e-3", -1.0),
        )
    ]


def _rising(g: float) -> list[float]:
    """Outputs of 64 tokens with q = k = v = 1, beta 1/2 and one log-decay, from an empty state."""
    found, s = [], 0.0
    for _ in range(64):
        s *= math.exp(g)
        s += 0.5 * (1.0 - s)
        found.append(s)
    return found


def _decays() -> list[GdnOpenCase]:
    ones = [1.0] * 64
    strong, plain, slow = (_rising(g) for g in (-5.0, 0.0, float(np.float32(-0.01))))
    broken = plain[:20] + plain[:44]  # what came before the reset is gone (exp(-700) = 1e-304)
    twice = 0.5 * math.exp(-0.5)
    half_random = np.where(np.random.default_rng(3).random(128) < 0.5, 0.0, -0.05)
    return [
        GdnOpenCase(
            "f3-no-decay",
            "q = k = 1, beta 1/2, v = 1, 2, 4, g = 0",
            "0.5, 1.25, 2.625",
            lambda: scalar([1.0, 2.0, 4.0]),
            lambda: layer([1.0, 2.0, 4.0]),
            out=(0.5, 1.25, 2.625),
        ),
        GdnOpenCase(
            "f3-partly-no-decay",
            "128 tokens, g = 0 at a random half and -0.05 at the others",
            "the recurrence",
            lambda: scalar([1.0] * 128, g=half_random.tolist()),
            lambda: layer([1.0] * 128, a=np.where(half_random < 0, -2.97, -200.0).tolist()),
        ),
        GdnOpenCase(
            "f4-strong-decay",
            "64 tokens, q = k = 1, beta 1/2, v = 1, g = -5 each, -320 in all",
            "0.5, 0.50168449, ... 0.50169018, all finite",
            lambda: scalar(ones, g=-5.0),
            lambda: layer(ones, a=5.0),
            out=tuple(strong),
        ),
        GdnOpenCase(
            "f4-first-token-far-down",
            "the first g is -90, all others 0",
            "as with g = 0 throughout, the state being empty",
            lambda: scalar(ones, g=[-90.0] + [0.0] * 63),
            lambda: layer(ones, a=[90.0] + [-200.0] * 63),
            out=tuple(plain),
        ),
        GdnOpenCase(
            "f4-one-token-far-down",
            "g = -700 at token 20, 0 elsewhere",
            "starts again at token 20",
            lambda: scalar(ones, g=[0.0] * 20 + [-700.0] + [0.0] * 43),
            lambda: layer(ones, a=[-200.0] * 20 + [700.0] + [-200.0] * 43),
            out=tuple(broken),
        ),
        GdnOpenCase(
            "f4-one-token-huge",
            "g = -1e30 at token 20, -0.01 elsewhere: one huge |g| must not spoil its neighbours",
            "starts again at token 20",
            lambda: scalar(ones, g=[-0.01] * 20 + [-1e30] + [-0.01] * 43),
            lambda: layer(ones, a=[-4.6] * 20 + [1e30] + [-4.6] * 43),
            out=(*slow[:20], *slow[:44]),
        ),
        GdnOpenCase(
            "f4-one-token-huge-long-memory",
            "beta 1/16, g = -1e30 at token 20, -0.05 elsewhere: what the later tokens keep of each other shows",
            "starts again at token 20",
            lambda: scalar(ones, beta=1 / 16, g=[-0.05] * 20 + [-1e30] + [-0.05] * 43),
            lambda: layer(ones, b=math.log(1 / 15), a=[-3.0] * 20 + [1e30] + [-3.0] * 43),
        ),
        GdnOpenCase(
            "f6-natural-logarithm",
            "T 2, q = k = 1, beta 1/2, v = 1, 1, g = -1/2",
            "state 0.65163266; 0.67677670 with g in log2, 0.375 with g as a factor",
            lambda: scalar([1.0, 1.0], g=-0.5),
            lambda: layer([1.0, 1.0], a=-0.43),
            out=(0.5, twice + 0.5 * (1.0 - twice)),
            state=(twice + 0.5 * (1.0 - twice),),
        ),
    ]


def _slots() -> list[GdnOpenCase]:
    def one(flag: object, *, read: int = 0) -> Sequences:
        return Sequences(np.array([0, 1]), np.array([read]), np.array([0]), np.array([flag], dtype=bool))

    permuted = Sequences(np.array([0, 1, 2, 3]), np.array([2, 0, 1]), np.array([2, 0, 1]), np.ones(3, dtype=bool))
    padded = Sequences(np.array([0, 1, 2]), np.array([1, -1]), np.array([1, -1]), np.ones(2, dtype=bool))
    speculative = dataclasses.replace(Sequences.packed([4, 3]), accepted=np.array([2, 0]))
    return [
        GdnOpenCase(
            "f8-flag-off",
            "slot holds 7, has_initial off, one token, q = k = 1, beta 1/2, v = 1",
            "0.5",
            lambda: scalar([1.0], state=(7.0,), sequences=one(flag=False)),
            lambda: layer([1.0], state=(7.0,), sequences=one(flag=False)),
            out=(0.5,),
            state=(0.5,),
        ),
        GdnOpenCase(
            "f8-flag-on",
            "the same with has_initial on",
            "4",
            lambda: scalar([1.0], state=(7.0,), sequences=one(flag=True)),
            lambda: layer([1.0], state=(7.0,), sequences=one(flag=True)),
            out=(4.0,),
            state=(4.0,),
        ),
        GdnOpenCase(
            "f8-permuted-slots",
            "three sequences of one token in slots 2, 0, 1 of four, which hold 1, 2, 3, 4",
            "each from its own slot; the fourth as it was",
            lambda: scalar([1.0] * 3, state=(1.0, 2.0, 3.0, 4.0), sequences=permuted),
            lambda: layer([1.0] * 3, state=(1.0, 2.0, 3.0, 4.0), sequences=permuted),
            out=(2.0, 1.0, 1.5),
            state=(1.0, 1.5, 2.0, 4.0),
        ),
        GdnOpenCase(
            "f8-padded-entry",
            "two sequences of one token, the second with slot -1; slots hold 7 and 3",
            "2 from slot 1, then 0.5 from nothing; slot 0 as it was",
            lambda: scalar([1.0, 1.0], state=(7.0, 3.0), sequences=padded),
            out=(2.0, 0.5),
            state=(7.0, 2.0),
        ),
        GdnOpenCase(
            "f8-speculative-tokens",
            "4 and 3 tokens of which 2 and 0 are accepted, states 0 and 5, beta 1/2, v = 1",
            "outputs of all tokens, states after the accepted ones: 0.75 and 5",
            lambda: scalar([1.0] * 7, state=(0.0, 5.0), sequences=speculative),
            out=(0.5, 0.75, 0.875, 0.9375, 3.0, 2.0, 1.5),
            state=(0.75, 5.0),
        ),
    ]


def _convolution() -> list[GdnOpenCase]:
    return [
        GdnOpenCase(
            "f9-convolution",
            "width 4, taps 1, 10, 100, 1000 (oldest first), x = 1 .. 6, no activation; source and target slot differ",
            "1000, 2100, 3210, 4321, 5432, 6543; the source slot as it was",
            lambda: convolving([6], target=1),
            out=(1000.0, 2100.0, 3210.0, 4321.0, 5432.0, 6543.0),
            state=(0.0, 6543.0),
        ),
        GdnOpenCase(
            "f9-layer-of-short-chunks",
            "sequences of 1, 2 and 3 tokens, each with a convolution state of width 4",
            "the recurrence",
            lambda: _short_layer([1, 2, 3]),
        ),
    ]


def _short_layer(lengths: list[int]) -> GdnProblem:
    rng = np.random.default_rng(17)
    base = layer([1.0] * sum(lengths), state=tuple([0.25] * len(lengths)), sequences=Sequences.packed(lengths))
    draw = functools.partial(rng.standard_normal)
    return dataclasses.replace(
        base,
        qkv=draw(base.qkv.shape).astype(BF16),
        taps=draw(base.taps.shape).astype(BF16),
        conv_state=draw(base.conv_state.shape).astype(BF16),
    )


def _norms() -> list[GdnOpenCase]:
    x = float(np.float32(1e-4))
    inside = x / math.sqrt(128 * x * x + 1e-6)
    small = float(np.float32(1e-23))
    return [
        GdnOpenCase(
            "f10-epsilon-inside-on-the-sum",
            "128 entries of 1e-4, eps 1e-6",
            "0.06622662; 0.0088 with eps on the mean, 0.0883 outside the root, 0.0884 without",
            lambda: normed(1e-4, 1e-6),
            out=(inside,),
        ),
        GdnOpenCase(
            "f10-no-epsilon",
            "128 entries of 1e-4, no eps",
            "0.08838835",
            lambda: normed(1e-4, 0.0),
            out=(1.0 / math.sqrt(128.0),),
        ),
        GdnOpenCase("f10-zero", "the zero vector, no eps", "0, not NaN", lambda: normed(0.0, 0.0), out=(0.0,)),
        GdnOpenCase(
            "f10-tiny",
            "128 entries of 1e-23, eps 1e-6: their squares underflow in FP32",
            "1e-20",
            lambda: normed(1e-23, 1e-6),
            out=(small / math.sqrt(1e-6),),
        ),
        GdnOpenCase(
            "f10-large",
            "128 entries of 1e20, eps 1e-6: their squares overflow in FP32",
            "0.08838835 (f; a kernel that sums squares in FP32 may promise less)",
            lambda: normed(1e20, 1e-6),
            out=(1.0 / math.sqrt(128.0),),
        ),
        GdnOpenCase(
            "f10-zero-keys-in-a-layer",
            "a layer call in which queries and keys of some tokens are all zero",
            "the recurrence: those tokens write nothing and read nothing",
            _zero_keys,
        ),
    ]


def _zero_keys() -> GdnProblem:
    rows = np.zeros((24, LAYER_HEADS[2]))
    rows[::3, 0] = 4.0
    return layer([1.0] * 24, keys=rows)


def _probed() -> list[GdnOpenCase]:
    ones = [1.0] * 16
    return [
        GdnOpenCase(
            "p10-large-a_log-far-from-a-gate",
            "a_log 90 with a + dt_bias = -200: exp(a_log) overflows in FP32, exp(a_log) softplus(..) is 1e-48",
            "decay 1",
            lambda: layer(ones, a=-200.0, a_log=90.0),
        ),
        GdnOpenCase(
            "p10-large-a_log-with-a-gate",
            "a_log 90 with a + dt_bias = 5: the log-decay is below -1e39",
            "a hard reset at every token",
            lambda: layer(ones, a=5.0, a_log=90.0),
        ),
    ]


OPEN_CASES = {
    case.name: case
    for case in (
        *_lengths(),
        *_keys(),
        *_decays(),
        *_slots(),
        *_convolution(),
        *_norms(),
        *_probed(),
    )
}
"""All cases by name."""

__all__ = ["OPEN_CASES", "GdnOpenCase", "convolving", "equal_keys", "layer", "normed", "scalar"]
