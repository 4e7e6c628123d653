"""Run a kernel on one item and judge the result, operation by operation: a record with its profile."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz.gdn import inverse_case, layer_case
from fuzz.gdn.inverse_case import InverseCase
from fuzz.gdn.layer_case import LayerCase
from fuzz.gdn.subjects import InverseSubject
from reports.item import ATTENTION, INVERSE, LAYER
from reports.profile import Compared, profile, profile_of
from reports.subjects import INVERSES, PACKED, load
from verify.attention import examine
from verify.attention.cases import AttentionCase
from verify.attention.reference import Reference
from verify.attention.subjects import INTERPRET, SubjectResult, run_ragged
from verify.backend import device_model
from verify.gdn.inverse_judge import judge_inverse
from verify.gdn.judge import judged_entries
from verify.records import FORMAT
from verify.subjects.gdn import GdnSubject, judge_gdn_subject
from verify.subjects.judging import bound_of, judge_subject, promised_rows
from verify.subjects.subject import Subject
from verify.traces.load import committed_trace, load_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from reports.item import Item
    from verify.attention.problem import AttentionProblem
    from verify.attention.ragged import RaggedProblem
    from verify.subjects.gdn import JudgedGdn
    from verify.subjects.judging import JudgedSubject
    from verify.verdict import Judgement


def judge_attention(item: Item) -> dict[str, Any]:
    """Dense and packed attention."""
    subject, case = load(item.subject), item.case
    assert isinstance(subject, Subject)  # noqa: S101  the item's operation says so
    problem = case.build() if isinstance(case, AttentionCase) else _traced_problems()[item.name]
    config = case.config if isinstance(case, AttentionCase) else (0, 0, 0)
    ragged = case.ragged() if isinstance(case, AttentionCase) and item.subject in PACKED else None
    if ragged is not None:
        invariant = item.subject.endswith("[invariant]")
        subject = dataclasses.replace(subject, call=functools.partial(_packed, ragged, batch_invariant=invariant))
    judged = judge_subject(subject, problem, config=config, interpret=item.interpret, power=True)
    record = examine.record_of(
        judged,
        name=item.name,
        family=item.family,
        interpret=item.interpret,
        reproduce=item.reproduce,
        subject=item.subject,
    )
    if ragged is not None:
        lengths = np.diff(ragged.cu_seqlens_k)
        record["shape"] |= {"sequences": ragged.sequences, "longest": int(lengths.max(initial=0))}
    record |= {"subject_version": subject.version, "profile": _attention_profile(judged)}
    if case is not None:
        record["case_spec"] = case.to_json(sha256=record["sha256"])
    return record


def _packed(
    ragged: RaggedProblem,
    problem: AttentionProblem,  # noqa: ARG001  the dense problem with the same f
    *,
    config: tuple[int, int, int],
    interpret: str,
    batch_invariant: bool,
) -> SubjectResult:
    """The batch as it is packed, padding included."""
    return run_ragged(
        ragged,
        block=config[0] or None,
        short=config[1] or None,
        batch_invariant=batch_invariant,
        interpret=INTERPRET[interpret],
    )


def _attention_profile(judged: JudgedSubject) -> dict[str, Any]:
    result, reference = judged.result, judged.reference
    if not isinstance(result, SubjectResult) or not isinstance(reference, Reference):
        return {}
    bound = bound_of(judged.subject, judged.problem, reference, device_model())
    left_out = ~promised_rows(judged.subject, judged.problem)
    return profile_of(result.out, result.lse, reference, bound, left_out)


@functools.cache
def _traced_problems() -> dict[str, Any]:
    return dict(load_trace(committed_trace()).problems())


def judge_layer(item: Item) -> dict[str, Any]:
    """A Gated DeltaNet layer: outputs, states, and what must be copied word by word."""
    subject, case = load(item.subject), item.case
    assert isinstance(subject, GdnSubject)  # noqa: S101  the item's operation says so
    assert isinstance(case, LayerCase)  # noqa: S101
    problem = case.build()
    judged = judge_gdn_subject(subject, problem, power=True)
    record = _record(item, judged.judgement, layer_case.digest(problem), subject.version)
    return record | {
        "shape": {
            "tokens": problem.tokens,
            "sequences": problem.sequences.count,
            "longest": int(problem.sequences.lengths.max(initial=0)),
            "heads": list(problem.heads),
            "slots": len(problem.state),
        },
        "drawn": {"keys": case.keys, "beta": case.beta, "decay": case.decay},
        "profile": _layer_profile(judged),
    }


def _layer_profile(judged: JudgedGdn) -> dict[str, Any]:
    result, reference, bound = judged.result, judged.reference, judged.bound
    if result is None or reference is None or bound is None:
        return {}
    arrays = []
    for name, order in (("out", (1, 0, 2)), ("state", (0, 1, 2, 3))):
        got, want = getattr(result, name), getattr(reference, name)
        if got is None or np.shape(got) != want.shape:
            continue
        where = judged_entries(judged.problem, name, reference, bound)
        got, want, limit, where = (np.transpose(x, order) for x in (got, want, getattr(bound, name), where))
        arrays.append(Compared(name, got, want, limit, where))
    return profile(arrays)


def judge_matrix(item: Item) -> dict[str, Any]:
    """The chunk's triangular inverse."""
    subject, case = load(item.subject), item.case
    assert isinstance(subject, InverseSubject)  # noqa: S101  the item's operation says so
    assert isinstance(case, InverseCase)  # noqa: S101
    problem, precision = case.build(), INVERSES[item.subject]
    got = subject.invert(problem, precision)
    judged = judge_inverse(problem.lower, got, subject.steps(precision), device_model(), power=True)
    record = _record(item, judged.judgement, inverse_case.digest(problem), "")
    limit, want = judged.bound.bound, judged.bound.exact
    everywhere = np.ones(want.shape, dtype=bool)
    return record | {
        "shape": {"chunk": len(want)},
        "drawn": {
            "keys": case.family,
            "beta": f"{case.beta_kind} ≤ {float.fromhex(case.beta_max):g}",
            "decay": f"{float.fromhex(case.decay):g}",
        },
        "profile": profile([Compared("inverse", got, want, limit, everywhere)]),
    }


def _record(item: Item, judgement: Judgement, sha256: str, version: str) -> dict[str, Any]:
    assert item.case is not None  # noqa: S101  only problems of the trace have none
    return {
        "format": FORMAT,
        "subject": item.subject,
        "subject_version": version,
        "operation": item.operation,
        "case": item.name,
        "family": item.family,
        "sha256": sha256,
        "case_spec": item.case.to_json(sha256=sha256),
        "features": {},
        "verdict": judgement.verdict.value,
        "reason": judgement.reason,
        "notes": list(judgement.notes),
        "measures": {part: examine.measures_json(measures) for part, measures in judgement.measures.items()},
        "environment": examine.environment(item.interpret),
        "reproduce": item.reproduce,
    }


OPERATIONS: dict[str, Callable[[Item], dict[str, Any]]] = {
    ATTENTION: judge_attention,
    LAYER: judge_layer,
    INVERSE: judge_matrix,
}
"""How an item of each operation is judged."""
