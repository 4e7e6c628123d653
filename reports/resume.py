"""What lets a killed run go on: the records it finished, the code they were measured with, and the plan."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import verify
from verify import records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reports.item import Item

ROOT = Path(verify.__file__).parent.parent
PACKAGES = ("jax", "jaxlib", "numpy")


def code_digest() -> str:
    """Digest of what decides a verdict: the sources of `flywheel` and `verify` (tests apart), and some versions."""
    h = hashlib.sha256()
    for room in ("flywheel", "verify"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("verify/tests/"):
                h.update(f"{name} {len(path.read_bytes())}\n".encode() + path.read_bytes())
    for package in PACKAGES:
        h.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    return h.hexdigest()


def mend(path: Path) -> bool:
    """Cut off a torn last line, which a later append would otherwise glue to its own; whether there was one."""
    if not path.exists():
        return False
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) == len(whole):
        return False
    with path.open("r+b") as handle:
        handle.truncate(len(kept))
    return True


def prepare(path: Path, code: str, *, fresh: bool = False) -> tuple[set[tuple[str, str, str, str]], Path | None]:
    """Make a records file ready for appending.

    Returns:
        The keys of the items that need not be judged again, and where older records went if they were set aside:
        records of other code must not be mixed with new ones.
    """
    mend(path)
    if not path.exists():
        return set(), None
    found = list(records.read(path))
    if fresh or any(record.get("code") != code for record in found):
        return set(), set_aside(path)
    return {key_of(record) for record in found if not record.get("unfinished")}, None


def set_aside(path: Path) -> Path:
    """Rename a records file to the first free `records.N.jsonl`."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)


def key_of(record: dict[str, Any]) -> tuple[str, str, str, str]:
    """The key of the item that a record belongs to."""
    return (record["subject"], record["family"], record["case"], record["environment"].get("interpret", "fast"))


def write_plan(path: Path, grid: str, items: Sequence[Item]) -> None:
    """Write down what a run means to judge; the file appears whole or not at all."""
    body = {"grid": grid, "items": [list(item.key) for item in items]}
    write_whole(path, json.dumps(body, indent=0) + "\n")


def missing(path: Path, found: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """The planned items without a record; nothing if there is no plan."""
    if not path.exists():
        return []
    done = {key_of(record) for record in found if not record.get("unfinished")}
    planned = json.loads(path.read_text("utf-8"))["items"]
    keys = [(str(subject), str(family), str(name), str(mode)) for subject, family, name, mode in planned]
    return [key for key in keys if key not in done]


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
