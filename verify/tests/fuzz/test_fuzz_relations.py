"""The hunts beyond the contract: what each asks holds for the kernel, and each relation is asked about something."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from jax.experimental.pallas import tpu as pltpu

from fuzz.attention import hunts, invariance, metamorphic, ragged
from fuzz.case import Case
from fuzz.gdn.inverse_case import InverseCase, digest
from fuzz.gdn.inverse_moves import emulated_errors
from fuzz.gdn.layer_case import LayerCase
from fuzz.gdn.subjects import InverseSubject, LayerSubject
from fuzz.hunts import Hunt
from fuzz.hunts import hunts as every
from verify.attention import oracle_float64
from verify.attention.cases import AttentionCase
from verify.attention.subjects import INTERPRET, SubjectResult
from verify.gdn.judge import GdnResult
from verify.subjects.gdn import GdnSubject
from verify.subjects.registry import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.attention.problem import AttentionProblem
    from verify.attention.ragged import RaggedProblem
    from verify.gdn.problem import GdnProblem


def test_hunts_know_the_relations() -> None:
    """What the spaces draw is what the evaluators answer."""
    assert set(hunts.RELATIONS) == set(metamorphic.RELATIONS)
    assert set(hunts.INVARIANCES) == set(invariance.RELATIONS)


@pytest.mark.parametrize("hunt", every().values(), ids=every())
def test_cases_survive_their_files(hunt: Hunt) -> None:
    """A case of each hunt reads back from its JSON with the same identity and the same bits."""
    seen = []

    @settings(
        max_examples=3, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(hunt.cases(hunt.chosen([next(iter(hunt.buckets))])))
    def drawn(case: Case) -> None:
        seen.append(case)

    drawn()
    for case in seen:
        again = Case.from_json(case.to_json())
        assert (again.key, again.sha256, again.hunt) == (case.key, case.sha256, hunt.name)


def test_equal_keys_give_the_closed_form() -> None:
    """T_ij = -beta (1 - beta)^(i-j-1) for one repeated unit key: the built matrix is that of the definition."""
    case = InverseCase("x", family="repeated", width=2, beta_max=(0.5).hex())
    problem = case.build()
    norm = float((case.key_words().astype(np.float64)[0] ** 2).sum())
    assert np.array_equal(problem.lower, np.tril(np.full((64, 64), np.float32(0.5 * norm)), -1))


def test_written_out_words_build_the_same_matrix() -> None:
    """A search that writes its words out keeps the bits."""
    case = InverseCase("x", family="low-rank", period=2, width=4, seed=5, beta_kind="uniform")
    again = case.written_out(case.key_words(), case.beta(), "y")
    assert digest(again.build()) == digest(case.build())
    assert InverseCase.from_json(again.to_json()) == again


def test_emulated_error_is_zero_for_identical_exact_keys() -> None:
    """One exact key with beta = 1 rounds nowhere, so its goal is 0; periodic keys give a search something to climb."""

    def error(case: InverseCase) -> float:
        keys, beta = case.key_words().astype(np.float64)[None], case.beta().astype(np.float64)[None]
        return float(emulated_errors(keys, beta, np.ones(64), "bf16")[0])

    assert error(InverseCase("x", width=1)) == 0.0
    assert error(InverseCase("x", family="periodic", period=3, width=4, seed=1)) > 0.0


@pytest.mark.parametrize("relation", hunts.RELATIONS)
def test_relation_holds_for_the_kernel(relation: str) -> None:
    """Each metamorphic relation holds on an ordinary case, and something was compared."""
    inputs = AttentionCase("x", (1, 2, 1, 128, 128, 64), causal=relation == "packing", config=(128, 128, 128))
    case = Case("relations", inputs, (("relation", relation), ("seed", 5)))
    hunt = every()["relations"]
    record = hunt.evaluate()(case, subject=hunt.attacks.load(hunt.attacks.subject), name="x", reproduce="")
    assert record is not None
    assert record["root"] is None, record["reason"]
    assert record["reason"]


PACKED = AttentionCase(
    "x", (1, 2, 1, 32, 32, 64), scale="0x1p-3", seed=1, cu_seqlens_q=(0, 13, 30), cu_seqlens_k=(0, 13, 30)
)
PLAIN_ASK: dict[str, str | int] = {"padding": "nan", "spoilt": -1, "tensor": "v", "mode": "default"}


def float64_packed(problem: RaggedProblem, interpreter: str = "fast") -> tuple[np.ndarray, np.ndarray | None]:
    """The oracle's results, in the packed layout; rows of no sequence hold 0."""
    del interpreter
    clean = dataclasses.replace(problem, **{name: np.nan_to_num(getattr(problem, name)) for name in "qkv"})
    found = clean.scatter(oracle_float64.attention(clean.dense()))
    return found.out.astype(problem.q.dtype), found.lse.astype(np.float32)


def packed_root(subject: ragged.RaggedSubject, evaluator: str = "ragged", **ask: str | int) -> str | None:
    """What a packed batch of sequences of 13 and 17 tokens fails of."""
    case = Case(evaluator, PACKED, tuple(sorted((PLAIN_ASK | ask).items())))
    record = every()[evaluator].evaluate()(case, subject=subject, name=subject.name, reproduce="")
    assert record is not None
    return record["root"]


def test_a_leak_from_a_neighbour_is_found() -> None:
    """NaN in one sequence's values may reach its own rows alone: a kernel that spreads it is found."""

    def spreading(problem: RaggedProblem) -> tuple[np.ndarray, np.ndarray | None]:
        out, lse = float64_packed(problem)
        leaks = np.isnan(problem.v[:, : problem.k_tokens].astype(np.float32)).any()
        return np.where(leaks, np.array(np.nan).astype(out.dtype), out), lse

    assert packed_root(ragged.RaggedSubject("x", spreading)) is None
    assert packed_root(ragged.RaggedSubject("x", float64_packed), spoilt=0) is None
    root = packed_root(ragged.RaggedSubject("x", spreading), spoilt=0)
    assert root is not None
    assert root.startswith("neighbour")
    # A kernel that is wrong without any poison has the root of that.
    wrong = ragged.RaggedSubject("x", lambda problem: (float64_packed(problem)[0] * 2, None))
    assert packed_root(wrong, spoilt=0) == packed_root(wrong) is not None


def test_a_mode_that_moves_bits_is_found() -> None:
    """A batch-invariant mode whose results depend on the place, by a bit of the LSE, is found."""

    def moving(problem: RaggedProblem) -> tuple[np.ndarray, np.ndarray | None]:
        out, lse = float64_packed(problem)
        assert lse is not None
        return out, np.nextafter(lse, np.float32(np.inf)) if problem.cu_seqlens_q[1] == 13 else lse

    mode = ragged.BATCH_INVARIANT
    assert packed_root(ragged.RaggedSubject("x", float64_packed, modes={mode: float64_packed}), mode=mode) is None
    root = packed_root(ragged.RaggedSubject("x", float64_packed, modes={mode: moving}), mode=mode)
    assert root is not None
    assert root.startswith("alone")


def test_a_schedule_that_changes_a_bit_is_found() -> None:
    """Packed sequences whose bits depend on the schedule fail, and what raises; one that agrees passes.

    So does one whose simulated runs agree among themselves, as interpreters may add in another order; but not if they
    agree on what breaks the contract.
    """

    def other(problem: RaggedProblem, interpreter: str) -> tuple[np.ndarray, np.ndarray | None]:
        out, lse = float64_packed(problem, interpreter)
        out.view(np.uint16)[0, 0, 0] ^= 1
        return out, lse

    def wrong(problem: RaggedProblem, interpreter: str) -> tuple[np.ndarray, np.ndarray | None]:
        out, lse = float64_packed(problem, interpreter)
        return (2.0 * out.astype(np.float32)).astype(out.dtype), lse

    def poisoned(problem: RaggedProblem, interpreter: str) -> tuple[np.ndarray, np.ndarray | None]:
        asked = INTERPRET[interpreter]
        assert isinstance(asked, pltpu.InterpretParams)
        return (other if asked.uninitialized_memory == "nan" else float64_packed)(problem, interpreter)

    def raising(problem: RaggedProblem, interpreter: str) -> tuple[np.ndarray, np.ndarray | None]:
        raise OverflowError(interpreter, problem.sequences)

    schedule: dict[str, str | int] = {"dma": "eager", "memory": "nan", "seed": 0}
    roots = [
        packed_root(ragged.RaggedSubject("x", float64_packed, simulate=simulate), "packed-schedule", **schedule)
        for simulate in (float64_packed, other, poisoned, raising, wrong)
    ]
    assert roots[:4] == [None, None, "schedule-out", "raised-OverflowError"]
    assert str(roots[4]).startswith("simulated-out-beyond")


def test_a_dense_schedule_is_judged_likewise() -> None:
    """The dense hunt allows another order of sums, but no bits that follow the schedule and no fault in all runs."""

    def root(interpreted: Callable[[np.ndarray, pltpu.InterpretParams], np.ndarray]) -> str | None:
        def call(problem: AttentionProblem, *, interpret: str) -> SubjectResult:
            found = oracle_float64.attention(problem)
            out, params = found.out.astype(problem.q.dtype), INTERPRET[interpret]
            if isinstance(params, pltpu.InterpretParams):
                out = interpreted(out, params)
            return SubjectResult(out, found.lse.astype(np.float32))

        inputs = AttentionCase("x", (1, 1, 1, 16, 16, 64), scale="0x1p-3", seed=1, config=(128, 128, 128))
        ask = {"dma": "eager", "memory": "nan", "seed": 0}
        case = Case("schedule", inputs, tuple(sorted(ask.items())))
        kernel = dataclasses.replace(load("flywheel.attention"), call=call, takes_problem=True)
        record = every()["schedule"].evaluate()(case, subject=kernel, name="x", reproduce="")
        assert record is not None
        return record["root"]

    def flipped(out: np.ndarray) -> np.ndarray:
        words = out.view(np.uint16).copy()
        words[0, 0, 0, 0] ^= 1
        return words.view(out.dtype)

    assert root(lambda out, _: out) is None
    assert root(lambda out, _: flipped(out)) is None
    moved = root(lambda out, params: flipped(out) if params.uninitialized_memory == "nan" else out)
    assert str(moved).startswith("schedule")
    wrong = root(lambda out, _: (2.0 * out.astype(np.float32)).astype(out.dtype))
    assert str(wrong).startswith("simulated-out-beyond")


def test_our_layer_runs_in_the_precision_that_a_case_asks_for() -> None:
    """The default subject of the layer hunts stands for both modes; a named one is taken as it is."""
    attacks = every()["gates"].attacks
    ours = attacks.load(attacks.subject)
    names = {precision: ours.in_precision(precision).name for precision in ("bf16", "bf16x3")}
    assert names == {precision: f"{attacks.subject}[{precision}]" for precision in names}
    named = attacks.load(f"{attacks.subject}[bf16]")
    assert named.in_precision("bf16x3").name == f"{attacks.subject}[bf16]"
    assert {bucket.precision for hunt in ("gates", "state") for bucket in every()[hunt].buckets.values()} == {
        "bf16",
        "bf16x3",
    }


def test_a_kernel_that_gives_nan_is_a_finding_that_a_file_holds() -> None:
    """NaN from a layer or an inverse fails with a root, in a record that strict JSON takes."""

    def nan_layer(problem: GdnProblem) -> GdnResult:
        out = np.full((problem.tokens, problem.heads[1], problem.heads[3]), np.nan, np.float32)
        return GdnResult(out, np.full_like(problem.state, np.nan), problem.conv_state)

    layer = LayerSubject("x", lambda _: GdnSubject("x", nan_layer))
    inverse = InverseSubject("x", lambda lower, _: np.full_like(lower, np.nan))
    for hunt, inputs, subject in (
        ("gates", LayerCase("x", lengths=(8,)), layer),
        ("inverse", InverseCase("x", width=2), inverse),
    ):
        case = Case(hunt, inputs, (("precision", "bf16"),))
        record = every()[hunt].evaluate()(case, subject=subject, name="x", reproduce="")
        assert record is not None
        assert "not-finite" in record["root"]
        json.dumps(record, allow_nan=False)
