"""Publishing: runs become permanent pages of a site, and the index learns of them last."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import shutil
from typing import TYPE_CHECKING

from reports.build import CASES, PAGE
from reports.compare import read_run
from reports.resume import write_whole
from reports.site import pages
from reports.site.store import Entry, PublishError, Site
from reports.sources import RECORDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reports.compare import Run

CHUNK = 500
"""Runs per archive page: the index lists fewer than twice as many."""

SHOWN = "shown.jsonl"
PLACE = "<!-- site -->"
BACK = (
    '<p class="site"><a href="../../index.html">All runs</a> · <a href="changes.html">What changed since any earlier '
    "run</a></p>"
)


@dataclasses.dataclass(frozen=True)
class Published:
    """One run after publishing; not new if the site had it before."""

    id: str
    new: bool


def publish(directory: Path, runs: Sequence[Path], *, title: str = "Flywheel") -> list[Published]:
    """Publish runs, in the order given; the site changes when all of them are complete.

    Args:
        directory: of the site.
        runs: directories that `reports build` has written.
        title: name of the project.

    Raises:
        PublishError: a directory is no run, or the site cannot be used.
        SourceError: its records cannot be read.
    """
    read = [(source, *_checked(source)) for source in runs]
    site = Site(directory)
    with site.owned():
        entries = site.entries()
        found = []
        for source, run, records in read:
            name = f"{run.date[:10] or 'undated'}-{run.digest[:10]}"
            known = any(entry.id == name for entry in entries)
            if not known:
                entries.append(_add(site, source, records, name, run, entries, title))
            found.append(Published(name, new=not known))
        site.save(entries)
        archives = _archive(site, entries, title)
        shown = len(entries) - CHUNK * len(archives)
        write_whole(site.index, pages.index_page(entries, archives, shown=shown, title=title))
        return found


def _checked(source: Path) -> tuple[Run, Path]:
    """The run of a directory, and its records."""
    records = next((source / name for name in (RECORDS, SHOWN) if (source / name).is_file()), None)
    if records is None or not (source / PAGE).is_file():
        message = f"RUN must be a directory that `reports build` has written, got {source}"
        raise PublishError(message)
    if (source / SHOWN).is_file():
        records = source / SHOWN
    return read_run(records), records


def _add(site: Site, source: Path, records: Path, name: str, run: Run, entries: Sequence[Entry], title: str) -> Entry:
    number = len(entries) + 1
    earlier = ((entry, site.run(entry.id)) for entry in entries)  # one in memory at a time
    changes, since = pages.changes_page(number, name, run, earlier, title=title)
    with site.new_run(name) as directory:
        page = (source / PAGE).read_text(encoding="utf-8").replace(PLACE, BACK, 1)
        page = re.sub(rf'href="{records.name}">[^<]*</a>', f'href="{RECORDS}.gz">{RECORDS}.gz</a>', page)
        (directory / PAGE).write_text(page, encoding="utf-8")
        (directory / "changes.html").write_text(changes, encoding="utf-8")
        (directory / "run.json").write_text(json.dumps(run.to_json(), separators=(",", ":")), encoding="utf-8")
        with gzip.GzipFile(directory / f"{RECORDS}.gz", "wb", mtime=0) as packed, records.open("rb") as plain:
            shutil.copyfileobj(plain, packed)
        if (source / CASES).is_dir():
            shutil.copytree(source / CASES, directory / CASES)
    counts = {} if since is None else since.counts | {"versions": len(since.versions), "common": since.common}
    return Entry(
        number, name, run.date, run.verdict, tuple(dict(each) for each in run.kernels), dict(run.versions), counts
    )


def _archive(site: Site, entries: Sequence[Entry], title: str) -> list[tuple[str, int, int]]:
    """Archive pages for runs that leave the index, written once; (name, first, last) of each."""
    found = []
    for number in range(1, (len(entries) - 1) // CHUNK):
        part = entries[CHUNK * (number - 1) : CHUNK * number]
        path = site.directory / f"archive-{number}.html"
        if not path.exists():
            write_whole(path, pages.archive_page(part, title=title))
        found.append((path.name, part[0].number, part[-1].number))
    return found
