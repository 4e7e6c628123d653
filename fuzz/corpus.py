"""The corpus of worst cases: files that `pytest verify` judges again."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz.case import PLAIN_HUNT, Case, load_case, save_case
from fuzz.hunts import find
from fuzz.outcome import shares
from verify.attention.cases import AttentionCase
from verify.attention.cases import save_case as save_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

CORPUS = Path(__file__).resolve().parent / "corpus"
LONGEST_NAME = 72


class CorpusError(ValueError):
    """A case that cannot be added."""


def files(directory: Path = CORPUS) -> Sequence[Path]:
    """The corpus, in order."""
    return sorted(directory.glob("*.json"))


def slug(text: str) -> str:
    """A file name from a case's name."""
    return re.sub(r"[^A-Za-z0-9.^+-]+", "-", text).strip("-")[:LONGEST_NAME].strip("-.")


def add(case: Case, record: dict[str, Any], *, name: str | None, why: str | None, directory: Path) -> Path:
    """Add a case with its provenance.

    Args:
        case: the case.
        record: its judgement today.
        name: of the file, without suffix; None makes one from the case's name.
        why: how it was found; None keeps the provenance that the case has.
        directory: the corpus.

    Raises:
        CorpusError: no provenance, a name in use, or the same bits and block sizes are there already.
    """
    found = why or case.provenance
    if not found:
        message = f"case {case.name!r} does not say how it was found: say it with --found"
        raise CorpusError(message)
    path = directory / f"{slug(name or case.name)}.json"
    for other in files(directory):
        if other == path:
            message = f"{path} exists; give another name with --name"
            raise CorpusError(message)
        there = load_case(other)
        if there.key == case.key or (there.sha256 == record["sha256"] and _alike(there, case)):
            message = f"{other} holds the same case"
            raise CorpusError(message)
    versions = record["environment"]["versions"]
    named = ", ".join(f"{package} {versions[package]}" for package in ("jax", "numpy", "flywheel-verified"))
    used = ", ".join(f"{part} {share:.6g}" for part, share in sorted(shares(record).items()))
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    judged = f"{record['verdict']}, share of the bound: {used or 'not measured'}"
    if record["replays"] is not None:
        judged += f", {record['replays']} of {record['query_blocks']} query blocks replayed"
    provenance = f"{found}; when added, {date}, with {named} on {record['environment']['device_model']}: {judged}"
    kept = case.renamed(provenance)
    if isinstance(kept.inputs, AttentionCase) and not kept.ask and evaluator(kept) == evaluator(PLAIN_HUNT):
        save_plain(kept.inputs, path)  # what the suite judges without this room's code
    else:
        save_case(kept, path)
    return path


def evaluator(case: Case | str) -> str:
    """Who judges cases of this hunt."""
    return find(case if isinstance(case, str) else case.hunt).evaluator


def _alike(one: Case, other: Case) -> bool:
    """Whether the same bits are put to the same question in the same blocks."""
    same = one.ask == other.ask and evaluator(one) == evaluator(other)
    return same and getattr(one.inputs, "config", None) == getattr(other.inputs, "config", None)
