"""Whether an adapter reads and writes the layout that it declares: one small problem, all of whose sizes differ.

A transposed pair of axes then changes a shape, or mixes data that must not be mixed; nothing about the kernel's
accuracy is asked here.  Each feature that a subject declares is tried by a problem of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.cases import base_values
from verify.attention.problem import AttentionProblem
from verify.attention.ragged import aligned_keys, segments
from verify.attention.reference import Reference
from verify.attention.subjects import SubjectResult
from verify.subjects.judging import JudgedSubject, judge_subject
from verify.verdict import Verdict

if TYPE_CHECKING:
    from verify.subjects.subject import Subject

BATCH, HEADS, KV_HEADS = 2, 6, 3


class AdapterError(AssertionError):
    """A subject whose adapter does not do what it declares."""


def problems(subject: Subject) -> dict[str, AttentionProblem]:
    """Plain attention with all sizes different, and one problem for each declared feature."""
    features = subject.features
    head_dim = 64 if features.head_dims is None else features.head_dims[0]
    unit_q, unit_k = (math.lcm(unit, 8) for unit in features.multiple_of)
    q_len, kv_len = unit_q, unit_k * 3
    if features.causal == "square":
        q_len = kv_len = math.lcm(q_len, kv_len)
    kv_heads = KV_HEADS if features.grouped_heads else HEADS
    v_dim = head_dim * 2 if features.v_dim else head_dim
    q = base_values((BATCH, HEADS, q_len, head_dim), 1, 0)
    k = base_values((BATCH, kv_heads, kv_len, head_dim), 2, 0)
    v = base_values((BATCH, kv_heads, kv_len, v_dim), 3, 0)
    scale = 1.0 / math.sqrt(head_dim)
    causal = features.causal != "never"
    found = {"plain": AttentionProblem(q, k, v, causal, scale)}
    if features.full and causal:
        found["without a causal mask"] = AttentionProblem(q, k, v, causal=False, scale=scale)
    if features.window:
        found["window"] = AttentionProblem(q, k, v, causal, scale, window=(5, None))
    if features.softcap:
        found["softcap"] = AttentionProblem(q, k, v, causal, scale, softcap=0.5)
    if features.sinks:
        sinks = np.arange(HEADS, dtype=np.float32) / 2
        found["sinks"] = AttentionProblem(q, k, v, causal, scale, sinks=sinks)
    if features.segments:
        # Equal lengths: a packed batch has as many boundaries of keys as of queries.
        ids = (np.arange(kv_len) >= kv_len // 3).astype(np.int32)[None].repeat(BATCH, axis=0)
        queries = base_values((BATCH, HEADS, kv_len, head_dim), 4, 0)
        found["segments"] = AttentionProblem(queries, k, v, causal, scale, q_segments=ids, k_segments=ids)
    if features.segments and (features.positions or features.ragged):
        found["ragged"] = _ragged(q, k, v, scale=scale, causal=causal)
    if features.positions:
        aligned = np.arange(q_len)[None] * 3 + np.arange(BATCH)[:, None]
        found["positions"] = AttentionProblem(q, k, v, causal, scale, q_positions=aligned)
    return found


def _ragged(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, causal: bool) -> AttentionProblem:
    """Two sequences of different lengths in every batch entry, with more keys than queries in each."""
    cu_q = np.array([0, q.shape[2] // 4, q.shape[2]], np.int32)
    cu_k = np.array([0, k.shape[2] // 3, k.shape[2]], np.int32)
    ids = [np.tile(segments(cu), (BATCH, 1)).astype(np.int32) for cu in (cu_q, cu_k)]
    aligned = np.tile(aligned_keys(cu_q, cu_k), (BATCH, 1))
    return AttentionProblem(q, k, v, causal, scale, q_segments=ids[0], k_segments=ids[1], q_positions=aligned)


def nearest_layout(judged: JudgedSubject) -> str | None:
    """What an attention result lies nearest to: "as declared", or the result of a well-known mix-up of axes.

    A comparison of distances, which needs no tolerance: a kernel that is inaccurate still lies nearest to its own
    function.  None if nothing came back to compare.
    """
    if not isinstance(judged.result, SubjectResult) or not isinstance(judged.reference, Reference):
        return None
    got, want = judged.result.out.astype(np.float64), judged.reference.out
    if got.shape != want.shape:
        return "another shape"
    heads = judged.problem.heads
    tiled = np.arange(heads).reshape(judged.problem.kv_heads, -1).T.reshape(-1)
    answers = {
        "as declared": want,
        "batch entries exchanged": np.roll(want, 1, axis=0),
        "the next query head": np.roll(want, -1, axis=1),
        "heads tiled": want[:, tiled],
        "the next row": np.roll(want, -1, axis=2),
        "the next lane": np.roll(want, -1, axis=3),
        "batch and heads exchanged": want.swapaxes(0, 1).reshape(want.shape),
        "heads and rows exchanged": want.swapaxes(1, 2).reshape(want.shape),
        "rows and lanes exchanged": want.swapaxes(2, 3).reshape(want.shape),
    }
    distances = {name: float(np.nanmax(np.abs(got - answer))) for name, answer in answers.items()}
    return min(distances, key=lambda name: distances[name])


def self_test(subject: Subject) -> list[JudgedSubject]:
    """Judge the subject on `problems`; a skipped problem counts as a failure, since the subject declares it.

    Raises:
        AdapterError: one of them does not pass; the message says which, and what the judge found.
    """
    judged = []
    for name, problem in problems(subject).items():
        found = judge_subject(subject, problem)
        judged.append(found)
        if found.judgement.verdict not in (Verdict.PASS, Verdict.OUTSIDE_DOMAIN):
            shapes = f"q {problem.q.shape}, k {problem.k.shape}, v {problem.v.shape} [batch, heads, tokens, head_dim]"
            message = (
                f"{subject.name}, self-test '{name}' with {shapes}, layout {subject.layout}: "
                f"{found.judgement.verdict}: {found.judgement.reason}"
            )
            near = nearest_layout(found)
            if near is not None:
                message += f"; the whole output lies nearest to: {near}"
            raise AdapterError(message)
    return judged
