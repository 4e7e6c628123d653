"""The corpus of worst cases, judged again: plain inputs by the suite alone, others by the hunt that asks more."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.case import load_case
from fuzz.hunts import find
from verify.attention.cases import AttentionCase
from verify.attention.examine import examine_problem
from verify.verdict import Verdict

CORPUS = Path(__file__).resolve().parents[3] / "fuzz" / "corpus"
FILES = sorted(CORPUS.glob("*.json"))


def test_the_corpus_is_not_empty() -> None:
    """Comparing nothing is a failure."""
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_worst_case_within_contract(path: Path) -> None:
    """A case of the corpus builds the bits that were promised, and the kernel keeps its contract on it."""
    case = load_case(path)
    if isinstance(case.inputs, AttentionCase) and not case.ask:
        judgement = examine_problem(case.problem, config=case.inputs.config).judgement
        assert judgement.verdict is Verdict.PASS, judgement.reason
        return
    hunt = find(case.hunt)
    record = hunt.evaluate()(
        case, subject=hunt.attacks.load(hunt.attacks.subject), name=hunt.attacks.subject, reproduce=""
    )
    assert record["root"] is None, record["reason"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_worst_case_says_where_it_is_from(path: Path) -> None:
    """Every case says how it was found (a search or a hand), when, and at which versions."""
    provenance = load_case(path).provenance
    assert provenance.startswith(("searched: ", "hand-picked: "))
    for words in ("when added, 20", "with jax ", "numpy ", "share of the bound"):
        assert words in provenance
