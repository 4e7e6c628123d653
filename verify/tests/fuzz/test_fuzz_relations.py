"""The hunts beyond the contract: what each asks holds for the kernel, and each relation is asked about something."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fuzz.attention import hunts, invariance, metamorphic
from fuzz.case import Case
from fuzz.gdn.inverse_case import InverseCase, digest
from fuzz.gdn.inverse_moves import emulated_errors
from fuzz.hunts import Hunt
from fuzz.hunts import hunts as every
from verify.attention.cases import AttentionCase


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
