"""The kernel on real q, k, v: a model's layers, attention sinks and all, and the user's own tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from verify.attention.examine import examine_problem
from verify.traces.load import committed_trace, load_trace
from verify.verdict import Verdict

if TYPE_CHECKING:
    from verify.attention.problem import AttentionProblem

COMMITTED = load_trace(committed_trace()).problems()


@pytest.mark.parametrize("problem", [pytest.param(p, id=name) for name, p in COMMITTED])
def test_committed_trace(problem: AttentionProblem) -> None:
    """Real tensors lie in the domain, pass with power, and need no replay: sinks and all."""
    examined = examine_problem(problem, config=(128, 128, 128), power=True)
    assert examined.judgement.verdict is Verdict.PASS, examined.judgement.reason
    assert examined.result.replays is not None
    assert examined.result.replays.sum() == 0


def test_own_tensors(request: pytest.FixtureRequest) -> None:
    """Files given with `--tensors` pass too; without the option there is nothing to judge here."""
    files = request.config.getoption("--tensors")
    if not files:
        pytest.skip("no tensors given: use --tensors FILE")
    for path in files:
        for name, problem in load_trace(path).problems():
            judgement = examine_problem(problem).judgement
            assert judgement.verdict is Verdict.PASS, f"{path}, {name}: {judgement.reason}"
