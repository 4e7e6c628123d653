"""What a report is made from: records, and what stands beside them.

A source is a records file, a report's directory, a campaign's directory (`fuzz`), or a JSON file: the output of
`python -m proofs --json`, a ranking of `python -m verify.emulate`, or the inverse's table.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from reports import equations, inverse, lemmas
from reports.findings import read_campaign
from verify import records

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reports.equations import Ranking
    from reports.findings import Campaign
    from reports.lemmas import Lemma

RECORDS = "records.jsonl"
PLAN = "plan.json"
LEMMAS = "lemmas.json"
INVERSE = "inverse.json"
EQUATIONS = "equations"
NOTES = "absent.json"
CAMPAIGN = "campaign.json"


class SourceError(ValueError):
    """A source that cannot be read."""


@dataclasses.dataclass
class Material:
    """Everything that was read.

    Attributes:
        records: in order.
        files: records files, whose plans stand beside them, with their records.
        lemmas: None if no source has any.
        inverse: rows of the inverse's table; None likewise.
        rankings: of equations.
        campaigns: what searches have done.
        notes: (what, why) was not done when the sources were made.
    """

    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    files: list[tuple[Path, list[dict[str, Any]]]] = dataclasses.field(default_factory=list)
    lemmas: tuple[Lemma, ...] | None = None
    inverse: dict[str, Any] | None = None
    rankings: list[Ranking] = dataclasses.field(default_factory=list)
    campaigns: list[Campaign] = dataclasses.field(default_factory=list)
    notes: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def read(sources: Sequence[Path]) -> Material:
    """Read every source.

    Raises:
        SourceError: one is missing or none of the kinds above.
    """
    found = Material()
    for source in sources:
        try:
            _read(source, found)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, records.RecordError) as error:
            message = f"{source} cannot be read: {error}"
            raise SourceError(message) from error
        except (lemmas.LemmasError, equations.EquationsError) as error:
            message = f"{source}: {error}"
            raise SourceError(message) from error
    return found


def _read(source: Path, found: Material) -> None:
    if (source / CAMPAIGN).is_file():
        campaign = read_campaign(source)
        found.campaigns.append(campaign)
        found.records += campaign.keep
        return
    path = source / RECORDS if source.is_dir() else source
    if not path.is_file():
        message = (
            f"--from must name a records file, a JSON file, or the directory of a report or campaign, got {source}, "
            "which has none"
        )
        raise SourceError(message)
    if path.suffix == ".json":
        _read_json(path, found)
        return
    here = list(records.read(path))
    found.records += here
    found.files.append((path, here))
    for name in (LEMMAS, INVERSE, NOTES):
        if (path.with_name(name)).is_file():
            _read_json(path.with_name(name), found)
    if path.with_name(EQUATIONS).is_dir():
        found.rankings += equations.load(path.with_name(EQUATIONS))


def _read_json(path: Path, found: Material) -> None:
    body = json.loads(path.read_text(encoding="utf-8"))
    if lemmas.is_lemmas(body):
        found.lemmas = lemmas.read(body)
    elif equations.is_ranking(body):
        found.rankings.append(equations.read(body))
    elif isinstance(body, dict) and body.get("format") == inverse.FORMAT:
        found.inverse = body
    elif isinstance(body, list):
        found.notes += [(str(what), str(why)) for what, why in body]
    else:
        message = f"{path} is no records file, no verdicts of python -m proofs --json and no ranking of equations"
        raise SourceError(message)
