"""The interpreter's schedule as a dimension: races, the time at which DMAs land, seeds, what fresh memory holds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jax.experimental.pallas import tpu as pltpu

import verify.attention.subjects as interpreters
from fuzz.attention.compare import same_bits
from fuzz.attention.evaluate import Answer, Trial, attempt, contract
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from fuzz.case import Case
    from verify.attention.subjects import SubjectResult
    from verify.subjects.subject import Subject


def _simulated(trial: Trial) -> SubjectResult:
    """One run in the TPU interpreter with the case's schedule."""
    params = pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode=str(trial.case.asked("dma")),  # type: ignore[arg-type]  one of DMA_TIMING
        uninitialized_memory=str(trial.case.asked("memory")),  # type: ignore[arg-type]
        random_seed=int(trial.case.asked("seed")),
    )
    interpreters.INTERPRET["schedule"] = params
    try:
        return trial.run(trial.problem, interpret="schedule")
    finally:
        del interpreters.INTERPRET["schedule"]


def _question(trial: Trial) -> Answer:
    answer = contract(trial)
    simulated = _simulated(trial)
    raced = _races()
    differs = same_bits(answer.result, simulated, "the schedule does not change a bit")
    if raced:
        reason = "the interpreter's race detector found two unordered accesses to one buffer"
        return dataclasses.replace(answer, judgement=Judgement(Verdict.FAIL, reason), place="race")
    if differs is not None:
        failed = Judgement(Verdict.FAIL, differs, answer.judgement.measures)
        return dataclasses.replace(answer, judgement=failed, place="schedule")
    return answer


def _races() -> bool:
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
