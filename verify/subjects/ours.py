"""Our kernel as a subject."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from flywheel.attention.checks import HEAD_DIMS
from verify.attention import subjects
from verify.attention.subjects import INTERPRET, SubjectResult, run_flywheel
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
