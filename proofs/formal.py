"""The formal counterparts of the lemmas: `.v` and `.g` files of the same names, checked with the code's constants."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from proofs import catalogue
from proofs.checkers import coq, gappa, written_constants
from proofs.checkers.outcome import Outcome, Report, Tool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    from proofs.lemma import Lemma, Verdict


def constants_text() -> str:
    """Every constant that some lemma rests on, as a Coq module."""
    return written_constants.coq_constants(name for lemma in catalogue.LEMMAS for name in lemma.rests_on)


def counterparts(lemma: Lemma) -> tuple[Tool, ...]:
    """The tools that have something to check for this lemma."""
    found = {Tool.COQ: coq.sources(), Tool.GAPPA: gappa.sources()}
    return tuple(tool for tool, sources in found.items() if lemma.name in sources)


def missing(tools: Collection[Tool]) -> tuple[Tool, ...]:
    """Those of the tools that this machine does not have."""
    versions = {Tool.COQ: coq.version, Tool.GAPPA: gappa.version}
    return tuple(tool for tool in tools if versions[tool]() is None)


def examine(
    lemmas: tuple[Lemma, ...],
    *,
    without: Collection[Tool] = (),
    fresh: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, tuple[Report, ...]]:
    """What the tools say of each lemma that has a counterpart, by its name.

    Args:
        lemmas: those to look at.
        without: tools not to be asked.
        fresh: take nothing from earlier runs.
        progress: told in words how far it is.
    """
    names = {tool: [each.name for each in lemmas if tool in counterparts(each)] for tool in Tool}
    reports: dict[Tool, dict[str, Report]] = {}
    for tool in Tool:
        if tool in without:
            told = Report(tool, Outcome.NOT_CHECKED, "left out on request")
            reports[tool] = dict.fromkeys(names[tool], told)
        elif tool is Tool.COQ:
            with _store(fresh=fresh) as store:
                reports[tool] = coq.check(names[tool], constants_text(), store, progress)
        else:
            reports[tool] = gappa.check(names[tool])
    return {each.name: tuple(reports[tool][each.name] for tool in counterparts(each)) for each in lemmas}


@contextlib.contextmanager
def _store(*, fresh: bool) -> Generator[Path]:
    if fresh:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        yield coq.user_cache() / "coq"


def add(verdicts: list[Verdict], reports: dict[str, tuple[Report, ...]]) -> list[Verdict]:
    """The verdicts with what the tools said."""
    return [dataclasses.replace(verdict, reports=reports[verdict.lemma.name]) for verdict in verdicts]
