"""Known ways in which attention kernels have gone wrong elsewhere: small inputs, each with its right answer.

The letters are those of the collection that the cases come from: A masking, B large logits, soft cap and sinks, D
heads, E lengths and packed batches, G verification.  Answers are closed forms; where none is given, the oracles' answer
is due.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from verify.attention import adversarial
from verify.attention.problem import AttentionProblem
from verify.attention.ragged import aligned_keys, segments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BF16 = ml_dtypes.bfloat16
HEAD_DIM = 64
BLOCK = 128
BLOCKS = (128, 128, 128)


@dataclasses.dataclass(frozen=True, eq=False)
class OpenCase:
    """One input with its right answer.

    Attributes:
        name: letter and number of the case, then what is special.
        words: the input, as a reader would say it.
        answer: the right answer in words.
        make: builds the problem.
        out: closed form per query row, or per batch entry and query row, the same for every head and lane; None if the
            oracles alone say it.
        lse: the same for the LSE (nats).
        config: (block_q, block_kv, fragment) for a kernel that takes it.
        power: a trivial answer must not pass.
        tier: "cover" runs on every subject each time, "deep" when asked.
    """

    name: str
    words: str
    answer: str
    make: Callable[[], AttentionProblem]
    out: tuple[float, ...] | tuple[tuple[float, ...], ...] | None = None
    lse: tuple[float, ...] | None = None
    config: tuple[int, int, int] = (0, 0, 0)
    power: bool = True
    tier: str = "cover"

    def build(self) -> AttentionProblem:
        """The problem."""
        return self.make()


def planted(
    q_len: int,
    scores: Sequence[float],
    values: Sequence[float],
    *,
    causal: bool = True,
    scale: float = 1.0,
    **options: Any,  # noqa: ANN401  fields of the problem
) -> AttentionProblem:
    """One head whose every query gives key j the logit scale * scores[j], exactly; V[j] is values[j] in every lane.

    Raises:
        ValueError: a value that BF16 cannot hold.
    """
    q = np.zeros((1, 1, q_len, HEAD_DIM), BF16)
    q[..., :3] = 1
    k = np.zeros((1, 1, len(scores), HEAD_DIM), BF16)
    for j, value in enumerate(scores):
        if value:
            k[0, 0, j, :3] = [float.fromhex(part) for part in adversarial.bf16_parts(value)]
    wide = np.asarray(values, np.float64)
    v = np.broadcast_to(wide[:, None], (len(values), HEAD_DIM)).astype(BF16)[None, None]
    if not ((v[0, 0, :, 0].astype(np.float64) == wide) | np.isnan(wide)).all():
        message = "values must be BF16 numbers"
        raise ValueError(message)
    return AttentionProblem(q, k, v, causal, scale, **options)


def one_per_fragment(scores: Sequence[float]) -> tuple[list[float], list[float]]:
    """Scores 128 keys apart, each the first of its fragment; the keys between are far below and carry no value."""
    spread = [-4096.0] * (BLOCK * len(scores))
    values = [0.0] * len(spread)
    for n, score in enumerate(scores):
        spread[BLOCK * n] = score
        values[BLOCK * n] = float(2**n)
    return spread, values


def _masking() -> list[OpenCase]:
    return [
        OpenCase(
            "a1-rows-without-a-key",
            "q_len 5, kv_len 2, causal, K = 0, V = 1, 3",
            "rows 0..2: 0, LSE -inf; then 1 and 2",
            lambda: planted(5, [0.0, 0.0], [1.0, 3.0]),
            out=(0, 0, 0, 1, 2),
            lse=(-math.inf, -math.inf, -math.inf, 0.0, math.log(2)),
        ),
        OpenCase(
            "a1-blocks-without-a-key",
            "q_len 384, kv_len 128, causal, K = 0, V[j] = j: two whole query blocks see no key",
            "rows 0..255: 0, LSE -inf; row 256 + i: i / 2, LSE ln(i + 1)",
            lambda: planted(384, [0.0] * 128, [float(j) for j in range(128)]),
            out=(0.0,) * 256 + tuple(i / 2 for i in range(128)),
            lse=(-math.inf,) * 256 + tuple(math.log(i + 1) for i in range(128)),
            config=BLOCKS,
        ),
        OpenCase(
            "a2-causal-mask-that-hides-nothing",
            "one query at the end of 128 keys, causal, K = 0, V[j] = j mod 8",
            "3.5, LSE ln 128",
            lambda: planted(1, [0.0] * 128, [float(j % 8) for j in range(128)]),
            out=(3.5,),
            lse=(math.log(128),),
            power=False,
        ),
        OpenCase(
            "a3a-large-score-before-the-window",
            "T 384, window of 128 keys, key 5 has logit 80 and V = 9984, the others 0 and V[j] = j mod 16",
            "query 300 sees keys 173..300: 7.5",
            lambda: planted(
                384,
                [80.0 if j == 5 else 0.0 for j in range(384)],
                [9984.0 if j == 5 else float(j % 16) for j in range(384)],
                window=(BLOCK - 1, None),
            ),
            config=BLOCKS,
        ),
        OpenCase(
            "a3b-first-fragment-hidden-by-segments",
            "T 384, window of 256 keys; segment ids hide keys 128..255 from query 383, key 300 has logit 100 and V = 5",
            "query 383: 5",
            _hidden_fragment,
            config=BLOCKS,
        ),
    ]


def _hidden_fragment() -> AttentionProblem:
    ids = np.array([0] * BLOCK + [1] * BLOCK + [0] * BLOCK, np.int32)[None]
    scores = [100.0 if j == 300 else 0.0 for j in range(384)]
    values = [5.0 if j == 300 else 1.0 for j in range(384)]
    return planted(384, scores, values, window=(255, None), q_segments=ids, k_segments=ids)


def _logits() -> list[OpenCase]:
    drift, drift_values = one_per_fragment([0.0, 7.9, 15.8])
    weights = [2.0 ** float(np.float32(s)) for s in (0.0, 7.9, 15.8)]
    mean = sum(w * 2.0**n for n, w in enumerate(weights)) / sum(weights)
    jumps, jump_values = one_per_fragment([0.0, 60.0, 100.0])
    fall, fall_values = one_per_fragment([200.0, 0.0, 0.0])
    large, large_values = one_per_fragment([0.0, 65.0])
    large_values[BLOCK] = 2.0**35
    cases = [
        OpenCase(
            "b2a-slow-drift",
            "log2 scores 0, 7.9, 15.8 in three fragments, V = 1, 2, 4",
            "3.99160946, LSE 10.9559208",
            lambda: planted(1, drift, drift_values, causal=False, scale=math.log(2.0)),
            out=(mean,),
            lse=(math.log(sum(weights)),),
        ),
        OpenCase(
            "b2b-jumps-of-60-and-100-nats",
            "scores 0, 60, 100 nats in three fragments, V = 1, 2, 4",
            "4 - 8.5e-18",
            lambda: planted(1, jumps, jump_values, causal=False),
            out=(4.0 - 8.5e-18,),
        ),
        OpenCase(
            "b2c-first-key-far-above",
            "scores 200, 0, 0 nats in three fragments, V = 1, 2, 4",
            "1",
            lambda: planted(1, fall, fall_values, causal=False),
            out=(1.0,),
            config=BLOCKS,
        ),
        OpenCase(
            "b2d-large-value-behind-a-jump",
            "scores 0 and 65 nats in two fragments, V = 1, 2^35",
            "2^35",
            lambda: planted(1, large, large_values, causal=False),
            out=(2.0**35,),
        ),
        OpenCase(
            "b3a-above-a-callers-constant",
            "scores 140, 139, V = 1, 0",
            "0.731058579, LSE 140.313262",
            lambda: planted(1, [140.0, 139.0], [1.0, 0.0], causal=False),
            out=(1.0 / (1.0 + math.exp(-1.0)),),
            lse=(140.0 + math.log1p(math.exp(-1.0)),),
        ),
        OpenCase(
            "b3b-below-a-callers-constant",
            "four scores of -100, V = 1, 2, 3, 6",
            "3, LSE -98.6137056",
            lambda: planted(1, [-100.0] * 4, [1.0, 2.0, 3.0, 6.0], causal=False),
            out=(3.0,),
            lse=(-100.0 + math.log(4.0),),
        ),
        OpenCase(
            "b3c-capped-above-a-callers-constant",
            "soft cap 20, scores 140, 139, V = 1, 0",
            "0.500000875, LSE 20.6931122: the cap comes first",
            lambda: planted(1, [140.0, 139.0], [1.0, 0.0], causal=False, softcap=20.0),
            out=(1.0 / (1.0 + math.exp(20.0 * (math.tanh(6.95) - math.tanh(7.0)))),),
            lse=(math.log(math.exp(20.0 * math.tanh(7.0)) + math.exp(20.0 * math.tanh(6.95))),),
            power=False,
        ),
        OpenCase(
            "b3c-capped-below-a-callers-constant",
            "soft cap 20, four scores of -100, V = 1, 2, 3, 6",
            "3, LSE -18.6119",
            lambda: planted(1, [-100.0] * 4, [1.0, 2.0, 3.0, 6.0], causal=False, softcap=20.0),
            out=(3.0,),
            lse=(20.0 * math.tanh(-5.0) + math.log(4.0),),
        ),
        OpenCase(
            "b4-soft-cap-of-huge-logits",
            "soft cap 50, scores 4500, 4600, -9000, V = 1, 3, 1000",
            "2, LSE 50.6931472",
            lambda: planted(1, [4500.0, 4600.0, -9000.0], [1.0, 3.0, 1000.0], causal=False, softcap=50.0),
            out=(2.0,),
            lse=(50.0 + math.log(2.0),),
        ),
        OpenCase(
            "b6-sink-of-the-head",
            "2 heads, 3 rows, 16 keys, scores 0, V = 1, sinks ln 16 and ln 48",
            "head 0: 0.5, head 1: 0.25",
            _sinks,
        ),
    ]
    cases += [
        OpenCase(
            f"b2e-gap-at-the-{gap}",
            f"a jump of {gap.replace('limit', 'the largest that our check lets pass')} in a later block",
            "within the bound on both sides",
            functools.partial(lambda name: adversarial.by_name()[name].build(), f"jump-{gap}-middle"),
            config=BLOCKS,
            power=False,
            tier="cover" if gap == "limit" else "deep",
        )
        for gap in ("limit-1ulp", "limit", "limit+1ulp", "article-tau")
    ]
    cases += [
        OpenCase(
            f"b7-keys-from-minus-{s}-to-{s}",
            f"q = e0, 128 keys from -{s} to {s} along e0, scale 1: the LSE reads the scores",
            "LSE of the scores as they are in BF16",
            functools.partial(_ramp, float(s)),
            power=False,
            tier="cover" if s == 500 else "deep",
        )
        for s in (8, 64, 500)
    ]
    cases += [
        OpenCase(
            f"b8-jump-of-{nats}-nats-with-large-values",
            f"a jump of {nats} nats in a later block, V = 2^{exponent}",
            f"2^{exponent}",
            functools.partial(_late_jump, float(nats), exponent),
            out=(2.0**exponent,),
            power=False,
            tier="deep",
        )
        for nats, exponent in ((20, 100), (40, 71), (60, 42), (65, 35), (70, 28))
    ]
    cases.append(
        OpenCase(
            "b9-queries-and-keys-of-size-4",
            "q and k about 4 N(0, 1), T 256, head_dim 128",
            "within the bound of FP32 scores",
            lambda: adversarial.AttentionCase("b9", (1, 1, 1, 256, 256, 128), seed=9, exponents=(2, 2, 0)).build(),
            tier="deep",
        )
    )
    cases.append(
        OpenCase(
            "b10-largest-values",
            "equal logits, every V the largest BF16 number, 3.39e38",
            "3.39e38",
            lambda: planted(256, [0.0] * 256, [float.fromhex(adversarial.LARGEST_BF16)] * 256),
            out=(float.fromhex(adversarial.LARGEST_BF16),) * 256,
            power=False,
            config=BLOCKS,
        )
    )
    return cases


def _ramp(s: float) -> AttentionProblem:
    q = np.zeros((1, 1, 1, HEAD_DIM), BF16)
    q[..., 0] = 1
    k = np.zeros((1, 1, BLOCK, HEAD_DIM), BF16)
    k[0, 0, :, 0] = np.linspace(-s, s, BLOCK).astype(BF16)
    v = np.broadcast_to((np.arange(BLOCK) % 8)[:, None], (BLOCK, HEAD_DIM)).astype(BF16)[None, None]
    return AttentionProblem(q, k, v, causal=False, scale=1.0)


LATE = 4096


def _late_jump(nats: float, exponent: int) -> AttentionProblem:
    scores = [0.0] * LATE
    scores[LATE - 100] = float(np.float32(nats))
    return planted(1, scores, [2.0**exponent] * LATE, causal=False)


def _sinks() -> AttentionProblem:
    q, k = np.zeros((1, 2, 3, HEAD_DIM), BF16), np.zeros((1, 2, 16, HEAD_DIM), BF16)
    sinks = np.log(np.array([16.0, 48.0])).astype(np.float32)
    return AttentionProblem(q, k, np.ones_like(k), causal=False, scale=1.0, sinks=sinks)


def _heads() -> list[OpenCase]:
    return [
        OpenCase(
            f"d1-heads-{heads}-{kv_heads}",
            f"{heads} heads on {kv_heads} KV heads, V of KV head h is h + 1 everywhere, K random, causal, T 9",
            "query head i gives floor(i kv_heads / heads) + 1",
            functools.partial(lambda name: adversarial.by_name()[name].build(), f"heads-{heads}-{kv_heads}"),
            power=heads != kv_heads,
            tier="cover" if (heads, kv_heads) == (6, 2) else "deep",
        )
        for heads, kv_heads in adversarial.GQA_RATIOS
    ]


def _lengths() -> list[OpenCase]:
    cases = [
        OpenCase(
            f"e5-length-{n}",
            f"{n} keys, not causal, scores 0, V[j] = j mod 8",
            f"the mean, {sum(j % 8 for j in range(n)) / n:.9g}",
            functools.partial(lambda n: planted(n, [0.0] * n, [float(j % 8) for j in range(n)], causal=False), n),
            out=(sum(j % 8 for j in range(n)) / n,) * n,
            config=BLOCKS,
            power=False,
            tier="cover" if n in (65, 129) else "deep",
        )
        for n in (1, 7, 8, 9, 63, 64, 65, 127, 129, 192)
    ]
    cases.append(
        OpenCase(
            "e1-positions-beyond-16-bits",
            "one query at position 33000, window of 1024 keys, K = 0, V = 1 up to key 32767 and 3 above",
            "1490 / 1024 = 1.455078125",
            lambda: planted(
                1,
                [0.0] * 33001,
                [1.0 if j < 32768 else 3.0 for j in range(33001)],
                window=(1023, None),
            ),
            out=(1490 / 1024,),
            power=False,
            tier="deep",
        )
    )
    cases += [
        OpenCase(
            f"e1-positions-around-{first + 1}",
            f"queries at {first - 1}..{last}, window of 1024 keys, K = 0, V = 1 up to key {first} and 3 above",
            "(1024 + 2 n) / 1024, n the number of keys above that a query sees",
            functools.partial(
                lambda first, last: planted(
                    last - first + 2,
                    [0.0] * (last + 1),
                    [1.0 if j <= first else 3.0 for j in range(last + 1)],
                    window=(1023, None),
                ),
                first,
                last,
            ),
            out=tuple((1024 + 2 * max(p - first, 0)) / 1024 for p in range(first - 1, last + 1)),
            power=False,
            tier="deep",
        )
        for first, last in ((32767, 32769), (65535, 65537))
    ]
    cases.append(
        OpenCase(
            "e2-zero-length-sequences",
            "packed: (0 queries, 5 keys), (3, 4), (0, 0), (4, 0); K = 0, V = 1",
            "rows 0..2: 1; rows 3..6: 0, LSE -inf",
            lambda: planted(
                7,
                [0.0] * 9,
                [1.0] * 9,
                causal=False,
                q_segments=np.array([[1] * 3 + [3] * 4], np.int32),
                k_segments=np.array([[0] * 5 + [1] * 4], np.int32),
            ),
            out=(1, 1, 1, 0, 0, 0, 0),
            lse=(math.log(4),) * 3 + (-math.inf,) * 4,
            power=False,
        )
    )
    cases.append(
        OpenCase(
            "e7-neighbouring-sequences",
            "packed: 13 and 17 tokens, K = 0, V of sequence r is r + 1",
            "rows 0..12: 1, rows 13..29: 2",
            lambda: _packed([13, 17]),
            out=(1.0,) * 13 + (2.0,) * 17,
            power=False,
        )
    )
    cases += [
        OpenCase(
            f"e7-{name}",
            f"packed: a, b and 40 - a - b tokens, {words}, K = 0, V of the three sequences is 1, 2 and 776",
            "rows 0..a-1: 1, rows a..a+b-1: 2; the guard rows behind them 776",
            functools.partial(_guarded, pairs),
            out=tuple((1.0,) * a + (2.0,) * b + (GUARD,) * (GUARDED - a - b) for a, b in pairs),
            power=False,
            tier=tier,
        )
        for name, words, pairs, tier in (
            ("a-few-pairs-of-lengths", f"{len(FEW_PAIRS)} pairs around multiples of 8", FEW_PAIRS, "cover"),
            ("every-pair-of-lengths", "every a and b in 1..17", ALL_PAIRS, "deep"),
        )
    ]
    cases.append(
        OpenCase(
            "e8-nan-in-a-neighbour",
            "packed: 100 and 156 tokens; V of the second sequence is NaN",
            "the first sequence's rows: 1, as if the second were not there",
            lambda: _packed([100, 156], poisoned=1),
            power=False,
        )
    )
    cases.append(
        OpenCase(
            "e9-nan-in-the-padding",
            "packed: boundaries 0, 13, 30, 70 of 96 rows; V of rows 70..95 is NaN",
            "rows 0..69: 1, 2 and 3, as without the padding; the rest 0, LSE -inf",
            lambda: _packed([13, 17, 40], padding=26),
            power=False,
        )
    )
    return cases


ALL_PAIRS = tuple((a, b) for a in range(1, 18) for b in range(1, 18))
FEW_PAIRS = ((1, 1), (1, 17), (7, 9), (8, 8), (9, 7), (13, 17), (16, 1), (17, 15))
GUARDED = 40
GUARD = 776.0
"""777 in BF16."""


def _guarded(pairs: Sequence[tuple[int, int]]) -> AttentionProblem:
    """One pair of sequences per batch entry, with guard rows behind them that see each other alone.

    A store of whole tiles that overruns its sequence replaces rows of the next one, or the guard's.
    """
    ids = np.array([[0] * a + [1] * b + [2] * (GUARDED - a - b) for a, b in pairs], np.int32)
    shape = (len(pairs), 1, GUARDED, HEAD_DIM)
    v = np.array([1.0, 2.0, GUARD])[ids].astype(BF16)[:, None, :, None]
    return AttentionProblem(
        np.ones(shape, BF16),
        np.zeros(shape, BF16),
        np.ascontiguousarray(np.broadcast_to(v, shape)),
        causal=False,
        scale=1.0,
        q_segments=ids,
        k_segments=ids,
    )


def _packed(lengths: Sequence[int], *, poisoned: int | None = None, padding: int = 0) -> AttentionProblem:
    """Sequences of uniform scores in one batch entry; queries of the padding see nothing."""
    ids = np.concatenate([np.repeat(np.arange(len(lengths)), lengths), np.repeat(-1, padding)]).astype(np.int32)
    values = [math.nan if r in (poisoned, -1) else float(r + 1) for r in ids.tolist()]
    k_ids = np.where(ids < 0, -2, ids).astype(np.int32)
    return planted(len(ids), [0.0] * len(ids), values, causal=False, q_segments=ids[None], k_segments=k_ids[None])


def _verification() -> list[OpenCase]:
    return [
        OpenCase(
            "g2-narrow-values",
            "V in [0.5, 1), T 256, random scores, 4 heads",
            "within a bound that the mean of V, another head and a shifted mask all miss",
            _narrow,
        ),
        OpenCase(
            "g3-bottom-right-alignment",
            "3 queries, 128 keys, causal, scores 0, V[j] = j",
            "62.5, 63, 63.5 (a top-left mask would give 0, 0.5, 1)",
            lambda: planted(3, [0.0] * 128, [float(j) for j in range(128)]),
            out=(62.5, 63.0, 63.5),
        ),
        OpenCase(
            "g3-ragged-bottom-right-alignment",
            "packed: 3 queries on 128 keys, 2 on 64, causal, scores 0, V[j] = j within each sequence",
            "62.5, 63, 63.5 and 31, 31.5 (a top-left mask would give 0, 0.5, 1 and 0, 0.5)",
            _ragged_alignment,
            out=(62.5, 63.0, 63.5, 31.0, 31.5),
            lse=tuple(math.log(n) for n in (126, 127, 128, 63, 64)),
        ),
    ]


def _ragged_alignment() -> AttentionProblem:
    cu_q, cu_k = np.array([0, 3, 5], np.int32), np.array([0, 128, 192], np.int32)
    return planted(
        5,
        [0.0] * 192,
        [float(j) for j in (*range(128), *range(64))],
        q_segments=segments(cu_q)[None],
        k_segments=segments(cu_k)[None],
        q_positions=aligned_keys(cu_q, cu_k)[None],
    )


def _narrow() -> AttentionProblem:
    problem = adversarial.AttentionCase("g2", (1, 4, 4, 256, 256, HEAD_DIM), seed=2, exponents=(1, 1, 0)).build()
    fraction = np.abs(problem.v.astype(np.float64)) % 0.5
    return dataclasses.replace(problem, v=(0.5 + np.floor(fraction * 256) / 256).astype(BF16))


OPEN_CASES = {case.name: case for family in (_masking, _logits, _heads, _lengths, _verification) for case in family()}
"""By name, in the order of the letters."""
