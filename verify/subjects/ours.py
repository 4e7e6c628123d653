"""Our kernel as a subject."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from flywheel.attention.checks import HEAD_DIMS
from verify.attention import subjects
from verify.attention.ragged import RaggedProblem
from verify.attention.subjects import INTERPRET, SubjectResult, run_flywheel, run_ragged
from verify.subjects.arithmetic import Arithmetic
from verify.subjects.subject import EVERYWHERE, Features, Subject

if TYPE_CHECKING:
    from flywheel import Softmax
    from verify.attention.problem import AttentionProblem


def _run(
    problem: AttentionProblem, *, config: tuple[int, int, int], interpret: str, softmax: Softmax = "static"
) -> SubjectResult:
    return run_flywheel(problem, config=config, softmax=softmax, interpret=INTERPRET[interpret])


FLYWHEEL = Subject(
    name=subjects.FLYWHEEL,
    call=_run,
    takes_problem=True,
    features=Features(
        lse="fp32",
        head_dims=HEAD_DIMS,
        window=True,
        softcap=True,
        sinks=True,
        segments=True,
        v_dim=True,
    ),
    domain=EVERYWHERE,
    arithmetic=Arithmetic(weights="bf16", exponential="exp2", block_kv=None),
    package="flywheel-verified",
    contract="docs/attention-contract.md: the bound that the judge evaluates; docs/semantics.md for the rest",
)
"""`block_kv` is None: the anchor is fixed, and a replay rescales by powers of two, exactly."""

ONLINE = dataclasses.replace(
    FLYWHEEL, name=f"{subjects.FLYWHEEL}[online]", call=functools.partial(_run, softmax="online")
)
"""The rescaling softmax throughout."""


def _run_ragged(
    problem: AttentionProblem, *, config: tuple[int, int, int], interpret: str, batch_invariant: bool = False
) -> SubjectResult:
    """Each batch entry as one packed call, its segments as sequences."""
    results = [
        run_ragged(
            _packed(problem, entry),
            block=config[0] or None,
            short=config[1] or None,
            batch_invariant=batch_invariant,
            interpret=INTERPRET[interpret],
        )
        for entry in range(problem.batch)
    ]
    fields = [field.name for field in dataclasses.fields(SubjectResult)]
    return SubjectResult(**{name: np.concatenate([getattr(one, name) for one in results]) for name in fields})


def _packed(problem: AttentionProblem, entry: int) -> RaggedProblem:
    """One batch entry; without segments one sequence."""
    q_ids, k_ids = problem.q_segments, problem.k_segments
    if q_ids is None or k_ids is None:
        lengths = [np.array([0, n], np.int32) for n in (problem.q_len, problem.kv_len)]
    else:
        ids = [np.asarray(x)[entry] for x in (q_ids, k_ids)]
        if any((np.diff(x) < 0).any() for x in ids):
            message = "segments must ascend: a packed batch cannot say that one comes back"
            raise NotImplementedError(message)
        names = np.unique(np.concatenate(ids))
        lengths = [np.concatenate([[0], np.searchsorted(x, names, side="right")]).astype(np.int32) for x in ids]
        offsets = np.diff(lengths[1]) - np.diff(lengths[0]) + lengths[1][:-1] - lengths[0][:-1]
        banded = problem.causal or problem.window is not None
        if banded and problem.q_positions is None and (offsets != problem.kv_len - problem.q_len).any():
            message = "rows must be aligned within their segments: a packed batch says nothing else"
            raise NotImplementedError(message)
    return RaggedProblem(
        problem.q[entry],
        problem.k[entry],
        problem.v[entry],
        *lengths,
        causal=problem.causal,
        scale=problem.scale,
        window=problem.window,
        softcap=problem.softcap,
        sinks=problem.sinks,
    )


RAGGED = dataclasses.replace(
    FLYWHEEL,
    name="flywheel.ragged_attention",
    call=_run_ragged,
    features=dataclasses.replace(FLYWHEEL.features, ragged=True),
)
"""Packed sequences."""

RAGGED_INVARIANT = dataclasses.replace(
    RAGGED, name="flywheel.ragged_attention[invariant]", call=functools.partial(_run_ragged, batch_invariant=True)
)
"""The same, bitwise independent of a sequence's place."""
