"""Gated DeltaNet kernels under judgement: what one declares, how it is called, and its verdict on a layer call."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.experimental.pallas import tpu as pltpu

from verify.backend import BackendUnsoundError, device_model
from verify.gdn import oracle_float64
from verify.gdn.contract import contract_bound
from verify.gdn.contract_recurrent import recurrent_bound
from verify.gdn.judge import GdnResult, judge
from verify.gdn.problem import BF16
from verify.gdn.steps import BF16_STEPS, ChunkSteps
from verify.subjects.lookup import find
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.devices import DeviceModel
    from verify.gdn.contract import GdnBound
    from verify.gdn.problem import GdnProblem, Problem
    from verify.gdn.reference import GdnReference

REFUSALS = (NotImplementedError, ValueError)
"""How a kernel says that it does not take an input; anything else that it raises is a failure."""


NORM_EPS = 1e-6
"""What the layer kernels in public use have built in."""


class GdnSubjectError(ValueError):
    """A subject that cannot be loaded."""


@dataclasses.dataclass(frozen=True, eq=False)
class GdnSubject:
    """A kernel that takes a whole layer: convolution, activations, gates and the delta rule.

    Attributes:
        name: shown in verdicts and records.
        call: takes the problem (what `computes` makes of it), returns a `GdnResult`.
        steps: the roundings of its algorithm: the contract that it is held to.
        recurrent: it goes token by token in FP32, as decode kernels do: `recurrent_bound`, not the chunked contract.
        lacking: why it does not take a problem; None if it does.
        computes: the problem that it is given and judged by: the layer's, or the delta rule in it.
        package: the distribution whose version a record states.
        modules: what must be importable for it to run.
        contract: what its documentation promises, with the place; empty if it promises nothing.
        notes: what an adapter does on the kernel's behalf.
    """

    name: str
    call: Callable[[Any], GdnResult]
    steps: ChunkSteps = dataclasses.field(default_factory=ChunkSteps)
    recurrent: bool = False
    lacking: Callable[[GdnProblem], str | None] = lambda _: None
    computes: Callable[[GdnProblem], Problem] = lambda problem: problem
    package: str | None = None
    modules: tuple[str, ...] = ()
    contract: str = ""
    notes: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """Version of the package; empty without one."""
        if self.package is None or self.missing() is not None:
            return ""
        return importlib.metadata.version(self.package)

    def bound(self, problem: Problem, device: DeviceModel) -> GdnBound:
        """The contract that it is held to, on one problem."""
        return (recurrent_bound if self.recurrent else contract_bound)(problem, self.steps, device)

    def missing(self) -> str | None:
        """Why it cannot run here; None if it can."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed (uv sync --group peers)"
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class JudgedGdn:
    """One subject on one problem.

    Attributes:
        subject: who.
        problem: what was asked.
        result: what came back; None if nothing did.
        judgement: the verdict.
        reference: the exact result; None if nothing was compared.
        bound: what it was held to; None likewise.
    """

    subject: GdnSubject
    problem: Problem
    result: GdnResult | None
    judgement: Judgement
    reference: GdnReference | None = None
    bound: GdnBound | None = None


BUILT_IN = {
    "flywheel.gdn.fused_conv1d_gdn[bf16]": "verify.subjects.gdn_ours:BF16_MODE",
    "flywheel.gdn.fused_conv1d_gdn[bf16x3]": "verify.subjects.gdn_ours:SPLIT_MODE",
}
"""Ours."""

PEERS = {
    "flywheel_tpu.fused_conv1d_gdn": "verify.subjects.peers.gdn_layers:FLYWHEEL_TPU",
    "flywheel_tpu.fused_conv1d_gdn[decode]": "verify.subjects.peers.gdn_layers:FLYWHEEL_TPU_DECODE",
    "tokamax.fused_conv1d_gdn": "verify.subjects.peers.gdn_layers:TOKAMAX",
    "tokamax.fused_conv1d_gdn[decode]": "verify.subjects.peers.gdn_layers:TOKAMAX_DECODE",
}
"""They need the group `peers`."""


def names() -> tuple[str, ...]:
    """Names of all Gated DeltaNet subjects that the suite knows."""
    return (*BUILT_IN, *PEERS)


def load(name: str) -> GdnSubject:
    """The subject of that name, or what stands at `package.module:object`: a `GdnSubject`, or a plain function.

    A plain function takes a `GdnProblem`, returns a `GdnResult`, and is held to the contract with BF16 operands.

    Raises:
        GdnSubjectError: no such name, or nothing callable stands there.
    """
    path, found = find(name, GdnSubject, {**BUILT_IN, **PEERS}, GdnSubjectError)
    if isinstance(found, GdnSubject):
        return found
    call: Callable[[GdnProblem], GdnResult] = found  # type: ignore[assignment]
    return GdnSubject(name=path, call=call, steps=BF16_STEPS)


def judge_gdn_subject(subject: GdnSubject, problem: GdnProblem, *, power: bool = False) -> JudgedGdn:
    """Run and judge a subject: never an exception, always a verdict.

    SKIPPED: it lacks a feature, is not installed, or refuses the input (NotImplementedError, ValueError).
    FAIL: beyond the bound, another class, wrong copies, or it raised anything else.
    """
    try:
        model = device_model()
    except BackendUnsoundError as error:
        return JudgedGdn(subject, problem, None, Judgement(Verdict.BACKEND_UNSOUND, str(error)))
    reason = subject.missing() or subject.lacking(problem)
    if reason is not None:
        return JudgedGdn(subject, problem, None, Judgement(Verdict.SKIPPED, reason))
    computed = subject.computes(problem)
    try:
        result = subject.call(computed)
    except REFUSALS as error:
        judgement = Judgement(Verdict.SKIPPED, f"the kernel refuses the input: {_in_words(error)}")
        return JudgedGdn(subject, computed, None, judgement)
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is its result
        # After an exception the interpreter's state would make later calls hang.
        pltpu.reset_tpu_interpret_mode_state()
        return JudgedGdn(subject, computed, None, Judgement(Verdict.FAIL, f"the kernel raised {_in_words(error)}"))
    reference, bound = oracle_float64.gdn_chunked(computed), subject.bound(computed, model)
    try:
        judgement = judge(computed, result, bound, reference=reference, power=power)
    except TypeError as error:
        judgement = Judgement(Verdict.FAIL, str(error))
    return JudgedGdn(subject, computed, result, judgement, reference, bound)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def layer_limits(problem: GdnProblem) -> str | None:  # noqa: PLR0911  one per limit
    """What the layer kernels in public use do not take: the reason, or None."""
    n_kq, n_v, d_k, d_v = problem.heads
    del n_kq, n_v
    if problem.per_channel:
        return "no decay per channel"
    if (d_k, d_v) != (128, 128):
        return f"d_k and d_v must be 128, got {d_k} and {d_v}"
    if problem.qkv.dtype != BF16 or problem.b.dtype != BF16 or problem.a.dtype != BF16:
        return "qkv, a and b must be BF16"
    if problem.activation != "silu" or problem.norm_eps != NORM_EPS:
        return "silu, and l2norm with eps 1e-6, are built in"
    if problem.beta_scale != 1.0:
        return "beta is the sigmoid itself"
    if problem.scale != d_k**-0.5:
        return "the scale is 1 / sqrt(d_k)"
    if problem.sequences.accepted is not None:
        return "speculative tokens are passed in another form, which the adapter does not make"
    if problem.width < 2:
        return "a convolution of at least 2 taps"
    return None


def all_single(problem: GdnProblem) -> bool:
    """Every sequence has one token: what a decode step is."""
    return bool((problem.sequences.lengths == 1).all()) and problem.sequences.count > 0


def in_dtype(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in a format, if it holds numbers of that format; as it is otherwise."""
    narrow = x.astype(dtype)
    return narrow if np.array_equal(narrow.astype(x.dtype), x, equal_nan=True) else x
