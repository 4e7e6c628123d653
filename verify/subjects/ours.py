"""Our kernel as a subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verify.attention import subjects
from verify.attention.subjects import INTERPRET, SubjectResult, run_flywheel
from verify.subjects.arithmetic import Arithmetic
from verify.subjects.subject import EVERYWHERE, Features, Subject

if TYPE_CHECKING:
    from verify.attention.problem import AttentionProblem


def _run(problem: AttentionProblem, *, config: tuple[int, int, int], interpret: str) -> SubjectResult:
    return run_flywheel(problem, config=config, interpret=INTERPRET[interpret])


FLYWHEEL = Subject(
    name=subjects.FLYWHEEL,
    call=_run,
    takes_problem=True,
    features=Features(lse="fp32", head_dims=(64, 128, 256)),
    domain=EVERYWHERE,
    arithmetic=Arithmetic(weights="bf16", exponential="exp2", block_kv=None),
    package="flywheel-verified",
    contract="docs/attention-contract.md: the bound that the judge evaluates; docs/semantics.md for the rest",
)
"""`block_kv` is None: the anchor is fixed, and a replay rescales by powers of two, exactly."""
