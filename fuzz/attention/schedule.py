"""The interpreter's schedule as a dimension: races, the time at which DMAs land, seeds, what fresh memory holds.

The kernels for packed sequences and for layers copy by hand, with buffers that they fill ahead; `judged_again` asks of
any kernel what `evaluate` asks of the dense one.

A simulated run that differs from the judged one is compared with a simulated run under the plainest schedule: the two
interpreters compile a kernel apart and may add in another order, which is no schedule's doing.  It then has to keep the
contract on its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jax.experimental.pallas import tpu as pltpu

import verify.attention.subjects as interpreters
from fuzz.attention.compare import different_words, same_bits
from fuzz.attention.evaluate import Answer, Trial, attempt, contract, judged
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from fuzz.case import Case
    from verify.attention.subjects import SubjectResult
    from verify.subjects.subject import Subject

    Arrays = Mapping[str, np.ndarray]

RACED = "the interpreter's race detector found two unordered accesses to one buffer"
UNCHANGED = "the schedule does not change a bit"
SCHEDULE = "schedule"
"""Name of the interpreter while a case is simulated."""


PLAINEST = pltpu.InterpretParams(dma_execution_mode="eager", uninitialized_memory="zero")
"""Copies land at once, and fresh memory holds zeros."""


def schedule_of(case: Case) -> pltpu.InterpretParams:
    """What a case asks of the interpreter."""
    return pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode=str(case.asked("dma")),  # type: ignore[arg-type]  one of DMA_TIMING
        uninitialized_memory=str(case.asked("memory")),  # type: ignore[arg-type]
        random_seed=int(case.asked("seed")),
    )


def simulated[T](params: pltpu.InterpretParams, run: Callable[[], T]) -> T:
    """One run in the TPU interpreter that is called `SCHEDULE` meanwhile."""
    interpreters.INTERPRET[SCHEDULE] = params
    try:
        return run()
    finally:
        del interpreters.INTERPRET[SCHEDULE]


def judged_again(
    record: dict[str, Any] | None,
    case: Case,
    run: Callable[[], Arrays],
    again: Callable[[], Arrays],
    judge: Callable[[], dict[str, Any] | None],
) -> dict[str, Any] | None:
    """A record of a case that passed, failed if a simulated run races, depends on the schedule, or is wrong itself.

    Args:
        record: of the case without a schedule; None, or of a failure, comes back as it is.
        case: what to simulate.
        run: results by name as they were judged.
        again: the same in the interpreter that is called `SCHEDULE`.
        judge: the record of what that interpreter gives.
    """
    if record is None or record["root"] is not None:
        return record
    first = run()
    try:
        second = simulated(schedule_of(case), again)
        if races():
            return record | {"verdict": Verdict.FAIL.value, "reason": RACED, "root": "race"}
        if _moved(first, second) is None:
            return record
        moved = _moved(simulated(PLAINEST, again), second)
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is its result
        pltpu.reset_tpu_interpret_mode_state()
        reason = f"nothing came back from the simulated run: {type(error).__name__}: {str(error)[:300]}"
        return record | {"verdict": Verdict.FAIL.value, "reason": reason, "root": f"raised-{type(error).__name__}"}
    if moved is not None:
        name, reason = moved
        return record | {"verdict": Verdict.FAIL.value, "reason": reason, "root": f"{SCHEDULE}-{name}"}
    own = simulated(schedule_of(case), judge)
    return record if own is None or own["root"] is None else own | {"root": f"simulated-{own['root']}"}


def _moved(first: Arrays, second: Arrays) -> tuple[str, str] | None:
    """The first array that differs in a bit, and how; None if none does."""
    for name, array in first.items():
        differs = different_words(name, array, second[name], UNCHANGED)
        if differs is not None:
            return name, differs
    return None


def _question(trial: Trial) -> Answer:
    def again() -> SubjectResult:
        return trial.run(trial.problem, interpret=SCHEDULE)

    answer = contract(trial)
    second = simulated(schedule_of(trial.case), again)
    if races():
        return dataclasses.replace(answer, judgement=Judgement(Verdict.FAIL, RACED), place="race")
    if same_bits(answer.result, second, UNCHANGED) is None:
        return answer
    differs = same_bits(simulated(PLAINEST, again), second, UNCHANGED)
    if differs is not None:
        failed = Judgement(Verdict.FAIL, differs, answer.judgement.measures)
        return dataclasses.replace(answer, judgement=failed, place=SCHEDULE)
    assert answer.reference is not None  # noqa: S101  the contract has been asked
    own = judged(trial, trial.problem, second, trial.bound(trial.problem, answer.reference), answer.reference)
    return answer if own.judgement.verdict is not Verdict.FAIL else dataclasses.replace(own, place="simulated")


def races() -> bool:
    """Whether the last simulated call had a race; the detector's state is then forgotten."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # noqa: PLC0415  private

    state = interpreter.races
    found = bool(state is not None and state.races_found)
    if found:
        pltpu.reset_tpu_interpret_mode_state()
    return found


def evaluate(case: Case, *, subject: Subject, name: str, reproduce: str) -> dict[str, Any] | None:
    """Judge a case by the contract, and a simulated run with the case's schedule against it, bitwise."""
    return attempt(case, _question, subject=subject, name=name, reproduce=reproduce)
