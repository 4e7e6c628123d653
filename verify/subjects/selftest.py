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
    return found


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
            raise AdapterError(message)
    return judged
