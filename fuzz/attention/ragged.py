"""Packed sequences: boundaries off the 8-row grid, empty sequences, poison in the padding, guard rows at the end."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from flywheel.ragged import RaggedOutput, ragged_attention
from fuzz.attention.contamination import POISONS
from fuzz.attention.evaluate import Answer, KernelRaisedError, Trial, attempt, judged
from verify.attention import oracle_float64
from verify.attention.problem import BF16
from verify.attention.subjects import SubjectResult
from verify.subjects.ours import RAGGED, RAGGED_INVARIANT
from verify.subjects.registry import SubjectError, load
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.case import Case
    from verify.attention.ragged import RaggedProblem

OURS, INVARIANT = RAGGED.name, RAGGED_INVARIANT.name
"""The second with `batch_invariant=True`."""


@dataclasses.dataclass(frozen=True)
class RaggedSubject:
    """A kernel for packed sequences.

    Attributes:
        name: shown in verdicts and records.
        call: from the packed problem to (out `[heads, q_tokens, v_dim]`, lse `[heads, q_tokens]` or None).
        clears: rows of no sequence hold 0, with LSE -inf.
    """

    name: str
    call: Callable[[RaggedProblem], tuple[np.ndarray, np.ndarray | None]]
    clears: bool = True


def _ours(problem: RaggedProblem, *, batch_invariant: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
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
        interpret=True,
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
        return RaggedSubject(name, functools.partial(_ours, batch_invariant=name == INVARIANT))
    if ":" not in name:
        message = f"subject must be package.module:object, {OURS} or {INVARIANT}, got {name!r}"
        raise SubjectError(message)
    found: Any = load(name)
    return RaggedSubject(name, found.call, clears=False)


def poisoned(ragged: RaggedProblem, poison: str) -> RaggedProblem:
    """The padding behind the last sequence filled with what must not matter."""
    if poison == "none":
        return ragged
    word = np.array(POISONS[poison]).astype(BF16)
    q, k, v = ragged.q.copy(), ragged.k.copy(), ragged.v.copy()
    q[:, ragged.q_tokens :] = word
    k[:, ragged.k_tokens :] = word
    v[:, ragged.k_tokens :] = word
    return dataclasses.replace(ragged, q=q, k=k, v=v)


def _question(subject: RaggedSubject, trial: Trial) -> Answer:
    ragged = trial.case.inputs.ragged()  # type: ignore[attr-defined]  an AttentionCase
    given = poisoned(ragged, str(trial.case.asked("padding")))
    dense = trial.problem
    reference = oracle_float64.attention(dense)
    bound = trial.bound(dense, reference)
    try:
        out, lse = subject.call(given)
    except Exception as error:
        pltpu.reset_tpu_interpret_mode_state()
        raise KernelRaisedError(error) from error
    result = SubjectResult(ragged.pack(out), None if lse is None else ragged.pack(lse))
    answer = judged(trial, dense, result, bound, reference)
    if answer.judgement.verdict is Verdict.FAIL or not subject.clears:
        return answer
    guard = out[:, ragged.q_tokens :].astype(np.float32)
    if (guard != 0.0).any() or np.isnan(guard).any():
        reason = "rows of no sequence must hold 0: guard rows behind the last sequence were written"
        failed = Judgement(Verdict.FAIL, reason, answer.judgement.measures)
        return dataclasses.replace(answer, judgement=failed, place="guard-rows")
    return answer


def evaluate(case: Case, *, subject: RaggedSubject, name: str, reproduce: str) -> dict[str, Any] | None:
    """Judge a packed batch by the contract of dense attention, row by row, and its guard rows."""
    question = functools.partial(_question, subject)
    # The dense problem with the same f aligns rows by positions; the kernel finds them by its boundaries.
    held_to = dataclasses.replace(RAGGED, features=dataclasses.replace(RAGGED.features, positions=True))
    return attempt(case, question, subject=held_to, name=name, reproduce=reproduce)
