"""The corpus of worst cases, judged again: its files are read, not the code of the hunts that found them."""

from __future__ import annotations

from pathlib import Path

import pytest

from verify.attention.cases import load_case
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
    judgement = examine_problem(case.build(), config=case.config).judgement
    assert judgement.verdict is Verdict.PASS, judgement.reason


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_worst_case_says_where_it_is_from(path: Path) -> None:
    """Every case says how it was found (a search or a hand), when, and at which versions."""
    provenance = load_case(path).provenance
    assert provenance.startswith(("searched: ", "hand-picked: "))
    for words in ("when added, 20", "with jax ", "numpy ", "share of the bound"):
        assert words in provenance
