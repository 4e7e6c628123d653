"""From a case to a record: build, run, judge, write down."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import importlib.metadata
import platform
import time
from typing import TYPE_CHECKING, Any, Protocol

import jax

from verify.attention.cases import AttentionCase, digest, features_json
from verify.attention.contract import reference_and_bound
from verify.attention.judge import judge
from verify.attention.subjects import FLYWHEEL, INTERPRET, SubjectResult, run_flywheel
from verify.backend import device_model
from verify.records import FORMAT, encode_number

if TYPE_CHECKING:
    from flywheel import Softmax
    from verify.attention.gradients.judge import GradientResult
    from verify.attention.problem import AttentionProblem
    from verify.growth import Growth
    from verify.measures import Measures, Worst
    from verify.verdict import Judgement

PACKAGES = ("jax", "jaxlib", "libtpu", "numpy", "scipy", "python-flint", "mpmath", "flywheel-verified")


class Judged(Protocol):
    """One judged problem; `result` is None if nothing came back."""

    @property
    def problem(self) -> AttentionProblem:
        """What was asked."""
        ...

    @property
    def result(self) -> SubjectResult | GradientResult | None:
        """What came back."""
        ...

    @property
    def judgement(self) -> Judgement:
        """The verdict."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Examined:
    """One judged problem."""

    problem: AttentionProblem
    result: SubjectResult
    judgement: Judgement


def examine_problem(
    problem: AttentionProblem,
    *,
    config: tuple[int, int, int] = (0, 0, 0),
    softmax: Softmax = "static",
    interpret: str = "fast",
    power: bool = False,
) -> Examined:
    """Run `flywheel.attention` on a problem and judge what comes back by the contract of the backend that ran it."""
    model = device_model()
    result = run_flywheel(problem, config=config, softmax=softmax, interpret=INTERPRET[interpret])
    reference, bound = reference_and_bound(problem, model)
    judgement = judge(
        problem,
        result.out,
        result.lse,
        bound,
        got_max_logit=result.max_logit,
        reference=reference,
        power=power,
    )
    return Examined(problem, result, judgement)


def examine(
    case: AttentionCase, *, family: str, interpret: str = "fast", power: bool = False, reproduce: str
) -> dict[str, Any]:
    """Judge a case and return its record (see `verify.records`)."""
    start = time.perf_counter()
    examined = examine_problem(case.build(), config=case.config, interpret=interpret, power=power)
    record = record_of(examined, name=case.name, family=family, interpret=interpret, reproduce=reproduce)
    return record | {"case_spec": case.to_json(), "seconds": time.perf_counter() - start}


def record_of(
    examined: Judged,
    *,
    name: str,
    family: str,
    interpret: str,
    reproduce: str,
    subject: str = FLYWHEEL,
    sha256: str | None = None,
) -> dict[str, Any]:
    """The record of a judged problem; `sha256` is its digest, if that is known already."""
    problem, result, judgement = examined.problem, examined.result, examined.judgement
    replays = None if result is None else result.replays
    return {
        "format": FORMAT,
        "subject": subject,
        "case": name,
        "family": family,
        "sha256": digest(problem) if sha256 is None else sha256,
        "shape": {
            "batch": problem.batch,
            "heads": problem.heads,
            "kv_heads": problem.kv_heads,
            "q_len": problem.q_len,
            "kv_len": problem.kv_len,
            "head_dim": problem.head_dim,
            "causal": problem.causal,
            "scale": problem.scale,
        },
        "features": features_json(problem),
        "verdict": judgement.verdict.value,
        "reason": judgement.reason,
        "notes": list(judgement.notes),
        "escalation": None if judgement.escalation is None else dataclasses.asdict(judgement.escalation),
        "measures": {part: measures_json(measures) for part, measures in judgement.measures.items()},
        "replays": None if replays is None else int(replays.sum()),
        "query_blocks": None if replays is None else replays.size,
        "replay_map": None if replays is None else replays.tolist(),
        "environment": environment(interpret),
        "reproduce": reproduce,
    }


def measures_json(measures: Measures) -> dict[str, Any]:
    """Measures as strict JSON."""
    body: dict[str, Any] = {"format": measures.format, "count": measures.count, "mismatches": measures.mismatches}
    for name in ("mismatch", "absolute", "relative", "ulp", "share"):
        worst = getattr(measures, name)
        body[name] = None if worst is None else worst_json(worst)
    bias = measures.bias
    body["bias"] = None
    if bias is not None:
        fields = {field.name: getattr(bias, field.name) for field in dataclasses.fields(bias)}
        body["bias"] = {
            key: encode_number(value) if isinstance(value, float) else value for key, value in fields.items()
        }
        body["bias"] |= {"alarm": bias.alarm, "worst": None if bias.worst is None else worst_json(bias.worst)}
    body["growth"] = None if measures.growth is None else growth_json(measures.growth)
    return body


def growth_json(growth: Growth) -> dict[str, Any]:
    """Growth over tokens as strict JSON."""
    return {
        "normalised_by": growth.normalised_by,
        "slope": encode_number(growth.slope),
        "standard_error": encode_number(growth.standard_error),
        "certain": growth.certain,
        "ranges": [{"first": r.first, "last": r.last, "worst": worst_json(r.worst)} for r in growth.ranges],
    }


def worst_json(worst: Worst) -> dict[str, Any]:
    """A worst element as strict JSON."""
    numbers = {key: encode_number(getattr(worst, key)) for key in ("value", "got", "want")}
    return numbers | {"index": list(worst.index), "got_bits": worst.got_bits, "want_bits": worst.want_bits}


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def environment(interpret: str) -> dict[str, Any]:
    """Where a result was obtained."""
    return {
        "backend": jax.default_backend(),
        "device_model": device_model().name,
        "interpret": interpret,
        "versions": _versions(),
        "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
    }
