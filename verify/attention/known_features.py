"""Known answers for windows, soft cap, sinks, segment ids, other value widths, ragged and paged batches."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from verify.attention.definition import Known, by_decimal, exact, paged_by_decimal, ragged_by_decimal
from verify.attention.paged import paginate
from verify.attention.problem import BF16, AttentionProblem
from verify.attention.ragged import RaggedProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verify.attention.reference import Reference

NO_KEY = -math.inf


@functools.cache
def feature_answers() -> tuple[Known, ...]:
    """Problems with answers that no oracle had a hand in."""
    return tuple(_answers())


def _answers() -> Iterator[Known]:
    for name, features in _variants().items():
        problem = dataclasses.replace(_base(), **features)
        yield Known(name, problem, by_decimal(problem))
    yield from _closed_forms()
    for name, ragged in {"ragged": _ragged(), "ragged, window and sinks": _ragged_with_features()}.items():
        yield Known(name, ragged.dense(), ragged_by_decimal(ragged))
        paged = paginate(ragged, 3, seed=1)
        yield Known(f"{name}, paged", paged.dense(), paged_by_decimal(paged))


def _bf16(x: object) -> np.ndarray:
    return np.asarray(x, dtype=np.float64).astype(BF16)


def _base() -> AttentionProblem:
    """Four query heads on two KV heads, 5 queries, 8 keys, values twice as wide as the head; logits of up to 12."""
    rng = np.random.default_rng(2)
    shapes = ((2, 4, 5, 2), (2, 2, 8, 2), (2, 2, 8, 4))
    q, k, v = (_bf16(rng.integers(-12, 13, shape) / 4) for shape in shapes)
    return AttentionProblem(q, k, v, causal=True, scale=0.75)


def _variants() -> dict[str, dict[str, Any]]:
    sinks = np.array([0.5, -3.0, 12.0, -np.inf], dtype=np.float32)
    # Interleaved ids, ids that differ by a multiple of 2^16, and queries that no key matches.
    q_ids = np.array([[1, 65537, 2, 3, 1], [0, 1, 1, 0, 7]], dtype=np.int32)
    k_ids = np.array([[1, 2, 1, 65537, 1, 1, 65537, 1], [0, 0, 1, 1, 0, 0, 1, 1]], dtype=np.int32)
    ids = {"q_segments": q_ids, "k_segments": k_ids}
    positions = np.array([[0, 3, 20, -1, 4], [7, 6, 5, 4, 3]], dtype=np.int32)
    return {
        "value width": {},
        "window": {"window": (2, 0)},
        "window of one key": {"window": (0, 0)},
        "window to both sides": {"window": (3, 2), "causal": False},
        "window to the right": {"window": (None, 1), "causal": False},
        "soft cap": {"softcap": 1.5},
        "soft cap and window": {"softcap": 1.5, "window": (3, 0)},
        "sinks": {"sinks": sinks},
        "segments": ids | {"causal": False},
        "causal segments": ids,
        "positions": {"q_positions": positions},
        "everything": ids
        | {"q_positions": positions, "sinks": sinks, "softcap": 2.0, "window": (4, 1), "causal": False},
    }


def _closed_forms() -> Iterator[Known]:
    # Six queries on two keys: rows that a window leaves without keys, beside rows that it does not.
    blank = AttentionProblem(
        _bf16(np.ones((1, 1, 6, 1))),
        _bf16(np.zeros((1, 1, 2, 1))),
        _bf16([[[[1.0], [3.0]]]]),
        causal=False,
        scale=1.0,
        window=(1, 1),
    )
    out, lse = [0.0, 0.0, 0.0, 1.0, 2.0, 2.0], [NO_KEY] * 3 + [0.0, math.log(2.0), math.log(2.0)]
    largest = [NO_KEY] * 3 + [0.0] * 3
    yield Known("rows a window leaves without keys", blank, exact([[[[x] for x in out]]], [[lse]], [[largest]]))
    # With a sink, such rows have the sink's logit as LSE.
    sunk = dataclasses.replace(blank, sinks=np.array([math.log(2.0)], dtype=np.float32))
    sink = float(np.float32(math.log(2.0)))
    with_sink = [math.log(n + math.exp(sink)) if n else sink for n in (0, 0, 0, 1, 2, 2)]
    share = [math.exp(z - s) if z > NO_KEY else 0.0 for z, s in zip(lse, with_sink, strict=True)]
    out = [o * p for o, p in zip(out, share, strict=True)]
    yield Known("rows that see a sink only", sunk, _loose([[[[x] for x in out]]], [[with_sink]], [[largest]]))
    yield from _odd_scores()


def _loose(out: object, lse: object, max_logit: object) -> Reference:
    """Closed forms evaluated with the float functions of the standard library: a few ulp."""
    answer = exact(out, lse, max_logit)
    return dataclasses.replace(answer, out_error=8.0 * answer.out_error, lse_error=8.0 * answer.lse_error)


def _odd_scores() -> Iterator[Known]:
    """Scores and sinks that are not finite: one query (1) sees the key 0 with value 1, and another key with value 3."""
    nan, inf = math.nan, math.inf
    two, grown, shrunk = math.log(2.0), math.exp(2.0), math.exp(-2.0)
    table = (
        ("a score of +inf is capped", inf, 2.0, None, (1 + 3 * grown) / (1 + grown), 2 + math.log1p(shrunk), 2.0),
        ("a score of -inf is capped", -inf, 2.0, None, (1 + 3 * shrunk) / (1 + shrunk), math.log1p(shrunk), 0.0),
        ("a capped NaN score stays NaN", nan, 2.0, None, nan, nan, nan),
        ("a NaN sink", 0.0, None, nan, nan, nan, 0.0),
        ("a sink of +inf", 0.0, None, inf, nan, nan, 0.0),
        ("a sink of -inf is none", 0.0, None, -inf, 2.0, two, 0.0),
        ("a score of -inf and a sink", -inf, None, 0.0, 0.5, two, 0.0),
        ("a score of +inf and a sink", inf, None, 0.0, nan, nan, inf),
    )
    for name, key, softcap, sink, out, lse, largest in table:
        problem = AttentionProblem(
            _bf16(np.ones((1, 1, 1, 1))),
            _bf16([[[[0.0], [key]]]]),
            _bf16([[[[1.0], [3.0]]]]),
            causal=False,
            scale=1.0,
            softcap=softcap,
            sinks=None if sink is None else np.array([sink], dtype=np.float32),
        )
        yield Known(name, problem, _loose([[[[out]]]], [[[lse]]], [[[largest]]]))


def _ragged() -> RaggedProblem:
    """Sequences of (0 queries, 5 keys), (3, 4), (0, 0), (4, 0), (2, 7), and padding of NaN after the last."""
    rng = np.random.default_rng(5)
    q, k, v = (_bf16(rng.integers(-8, 9, shape) / 4) for shape in ((4, 11, 2), (2, 18, 2), (2, 18, 3)))
    q[:, 9:], k[:, 16:], v[:, 16:] = math.nan, math.nan, math.nan
    cu_q, cu_k = (np.array(x, dtype=np.int32) for x in ([0, 0, 3, 3, 7, 9], [0, 5, 9, 9, 9, 16]))
    return RaggedProblem(q, k, v, cu_q, cu_k, causal=True, scale=1.25)


def _ragged_with_features() -> RaggedProblem:
    sinks = np.array([0.0, 1.0, -2.0, 3.0], dtype=np.float32)
    return dataclasses.replace(_ragged(), window=(1, 1), causal=False, sinks=sinks, softcap=3.0)
