"""Packed sequences: boundaries off the 8-row grid, empty ones, poison in the padding or a neighbour, guard rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from flywheel.ragged import RaggedOutput, ragged_attention
from fuzz.attention import schedule
from fuzz.attention.compare import same_bits
from fuzz.attention.contamination import POISONS
from fuzz.attention.evaluate import Answer, KernelRaisedError, OutsideError, Trial, attempt, judged
from verify.attention.problem import BF16
from verify.attention.subjects import INTERPRET, SubjectResult
from verify.subjects.judging import REFUSALS
from verify.subjects.ours import RAGGED, RAGGED_INVARIANT
from verify.subjects.registry import SubjectError, load
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fuzz.case import Case
    from verify.attention.ragged import RaggedProblem

OURS, INVARIANT = RAGGED.name, RAGGED_INVARIANT.name
"""The second with `batch_invariant=True`."""

DEFAULT, BATCH_INVARIANT = MODES = ("default", "batch invariant")
"""How our kernel is called; the name `OURS` stands for both, as a case asks."""


@dataclasses.dataclass(frozen=True)
class RaggedSubject:
    """A kernel for packed sequences.

    Attributes:
        name: shown in verdicts and records.
        call: from the packed problem to (out `[heads, q_tokens, v_dim]`, lse `[heads, q_tokens]` or None).
        clears: rows of no sequence hold 0, with LSE -inf.
        modes: other calls of the kernel that a case may ask for by name; a kernel without them is called as ever.
        simulate: the call in an interpreter by name (`verify.attention.subjects.INTERPRET`); None: it has no say there.
    """

    name: str
    call: Callable[[RaggedProblem], tuple[np.ndarray, np.ndarray | None]]
    clears: bool = True
    modes: Mapping[str, Callable[[RaggedProblem], tuple[np.ndarray, np.ndarray | None]]] = dataclasses.field(
        default_factory=dict
    )
    simulate: Callable[[RaggedProblem, str], tuple[np.ndarray, np.ndarray | None]] | None = None

    def run(self, problem: RaggedProblem, mode: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Its results in a mode."""
        return self.modes.get(mode, self.call)(problem)


def _ours(
    problem: RaggedProblem, interpreter: str = "fast", *, batch_invariant: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    found = ragged_attention(
        *(jnp.asarray(x) for x in (problem.q, problem.k, problem.v)),
        *(jnp.asarray(x, jnp.int32) for x in (problem.cu_seqlens_q, problem.cu_seqlens_k)),
        causal=problem.causal,
        scale=problem.scale,
        window=problem.window,
        softcap=problem.softcap,
        sinks=None if problem.sinks is None else jnp.asarray(problem.sinks),
        batch_invariant=batch_invariant,
        return_lse=True,
        interpret=INTERPRET[interpreter],
    )
    assert isinstance(found, RaggedOutput)  # noqa: S101  the LSE was asked for
    return np.asarray(found.out), np.asarray(found.lse)


def names() -> tuple[str, ...]:
    """The names that are known."""
    return OURS, INVARIANT


@functools.cache
def load_ragged(name: str) -> RaggedSubject:
    """Our kernel in either mode, or what stands at `package.module:object`.

    That is a `RaggedSubject`, or a function from problem to results.

    Raises:
        SubjectError: no such name.
    """
    if name in names():
        invariant = functools.partial(_ours, batch_invariant=True)
        if name == INVARIANT:
            return RaggedSubject(name, invariant, simulate=invariant)
        return RaggedSubject(name, _ours, modes={BATCH_INVARIANT: invariant}, simulate=_ours)
    if ":" not in name:
        message = f"subject must be package.module:object, {OURS} or {INVARIANT}, got {name!r}"
        raise SubjectError(message)
    found: Any = load(name)
    return RaggedSubject(name, found.call, clears=False)


def poisoned(ragged: RaggedProblem, poison: str) -> RaggedProblem:
    """The padding behind the last sequence filled with what must not matter."""
    if poison == "none":
        return ragged
    rows = {"q": slice(ragged.q_tokens, None), "k": slice(ragged.k_tokens, None), "v": slice(ragged.k_tokens, None)}
    return _filled(ragged, rows, poison)


def spoilt(ragged: RaggedProblem, sequence: int, tensor: str, poison: str) -> RaggedProblem:
    """One tensor of one sequence filled with what concerns no other sequence."""
    ends = ragged.cu_seqlens_q if tensor == "q" else ragged.cu_seqlens_k
    return _filled(ragged, {tensor: slice(int(ends[sequence]), int(ends[sequence + 1]))}, poison)


def _filled(ragged: RaggedProblem, rows: Mapping[str, slice], poison: str) -> RaggedProblem:
    found = {name: getattr(ragged, name).copy() for name in rows}
    for name, where in rows.items():
        found[name][:, where] = np.array(POISONS[poison]).astype(BF16)
    return dataclasses.replace(ragged, **found)


def _question(subject: RaggedSubject, trial: Trial) -> Answer:
    ragged, dense = trial.case.inputs.ragged(), trial.problem  # type: ignore[attr-defined]  an AttentionCase
    asked = dict(trial.case.ask)
    poison = str(asked["padding"])
    sequence = int(asked.get("spoilt", -1))  # cases from before it was drawn do not say
    if sequence >= 0:
        tensor = str(asked["tensor"])
        ragged = spoilt(ragged, sequence % ragged.sequences, tensor, "nan" if poison == "none" else poison)
        dense = ragged.dense()
    reference, bound = trial.expected(dense, everywhere=sequence < 0)
    mode = str(asked.get("mode", DEFAULT))
    refusals = () if subject.name in names() else REFUSALS
    try:
        out, lse = subject.run(poisoned(ragged, poison), mode)
    except refusals as error:
        raise OutsideError from error
    except Exception as error:
        pltpu.reset_tpu_interpret_mode_state()
        raise KernelRaisedError(error) from error
    result = SubjectResult(ragged.pack(out), None if lse is None else ragged.pack(lse))
    answer = judged(trial, dense, result, bound, reference)
    if answer.judgement.verdict is Verdict.FAIL and sequence >= 0:
        # What fails without the poison too is no leak, and has the root that it has there.
        ask = tuple(sorted((asked | {"spoilt": -1}).items()))
        clean = _question(subject, dataclasses.replace(trial, case=dataclasses.replace(trial.case, ask=ask)))
        leaks = clean.judgement.verdict is not Verdict.FAIL
        return dataclasses.replace(answer, place="neighbour") if leaks else clean
    if answer.judgement.verdict is Verdict.FAIL or not subject.clears:
        return answer
    moved = _moves(subject, ragged, result) if mode == BATCH_INVARIANT else None
    if moved is not None:
        failed = Judgement(Verdict.FAIL, moved, answer.judgement.measures)
        return dataclasses.replace(answer, judgement=failed, place="alone")
    guard = out[:, ragged.q_tokens :].astype(np.float32)
    if (guard != 0.0).any() or np.isnan(guard).any():
        reason = "rows of no sequence must hold 0: guard rows behind the last sequence were written"
        failed = Judgement(Verdict.FAIL, reason, answer.judgement.measures)
        return dataclasses.replace(answer, judgement=failed, place="guard-rows")
    return answer


def _moves(subject: RaggedSubject, ragged: RaggedProblem, together: SubjectResult) -> str | None:
    """How the longest sequence's bits differ when it is packed alone; None if they do not, as a mode may promise."""
    if BATCH_INVARIANT not in subject.modes:
        return None
    queries, keys = np.diff(ragged.cu_seqlens_q), np.diff(ragged.cu_seqlens_k)
    n = int(queries.argmax())
    rows = slice(int(ragged.cu_seqlens_q[n]), int(ragged.cu_seqlens_q[n + 1]))
    columns = slice(int(ragged.cu_seqlens_k[n]), int(ragged.cu_seqlens_k[n + 1]))

    def first(x: np.ndarray, part: slice) -> np.ndarray:
        found = np.zeros_like(x)
        found[:, : part.stop - part.start] = x[:, part]
        return found

    alone = dataclasses.replace(
        ragged,
        q=first(ragged.q, rows),
        k=first(ragged.k, columns),
        v=first(ragged.v, columns),
        cu_seqlens_q=np.minimum(np.arange(ragged.sequences + 1), 1) * queries[n],
        cu_seqlens_k=np.minimum(np.arange(ragged.sequences + 1), 1) * keys[n],
    )
    out, lse = subject.run(alone, BATCH_INVARIANT)
    part = SubjectResult(together.out[:, :, rows], None if together.lse is None else together.lse[:, :, rows])
    own = SubjectResult(alone.pack(out), None if lse is None else alone.pack(lse))
    return same_bits(part, own, "a sequence's bits do not depend on where it is packed")


def evaluate(case: Case, *, subject: RaggedSubject, name: str, reproduce: str) -> dict[str, Any] | None:
    """Judge a packed batch by the contract of dense attention, row by row, and its guard rows."""
    question = functools.partial(_question, subject)
    # The dense problem with the same f aligns rows by positions; the kernel finds them by its boundaries.
    held_to = dataclasses.replace(RAGGED, features=dataclasses.replace(RAGGED.features, positions=True))
    return attempt(case, question, subject=held_to, name=name, reproduce=reproduce)


def evaluate_schedule(case: Case, *, subject: RaggedSubject, name: str, reproduce: str) -> dict[str, Any] | None:
    """The same, and a simulated run with the case's schedule against it, bitwise; None if it cannot be simulated."""
    simulate = subject.simulate
    if simulate is None:
        return None
    problem = case.inputs.ragged()  # type: ignore[attr-defined]  an AttentionCase
    given = poisoned(problem, str(case.asked("padding")))

    def results(found: tuple[np.ndarray, np.ndarray | None]) -> dict[str, np.ndarray]:
        return {name: x for name, x in zip(("out", "lse"), found, strict=True) if x is not None}

    def again(given: RaggedProblem) -> tuple[np.ndarray, np.ndarray | None]:
        return simulate(given, schedule.SCHEDULE)

    return schedule.judged_again(
        evaluate(case, subject=subject, name=name, reproduce=reproduce),
        case,
        lambda: results(subject.call(given)),
        lambda: results(again(given)),
        lambda: evaluate(case, subject=dataclasses.replace(subject, call=again), name=name, reproduce=reproduce),
    )
