"""Campaign files: what `run` is told on the command line, as TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fuzz.kinds import KINDS

CAMPAIGNS = Path(__file__).resolve().parent / "campaigns"
FIELDS: dict[str, type | tuple[type, ...]] = {
    "hunts": list,
    "subject": str,
    "buckets": list,
    "seed": int,
    "minutes": (int, float),
    "examples": int,
    "workers": int,
    "case_seconds": (int, float),
    "case_megabytes": (int, float),
    "kinds": list,
    "ray": str,
    "database": str,
}
"""What a campaign file may say; each is optional."""

POSITIVE = ("minutes", "examples", "workers", "case_seconds", "case_megabytes")


class PlanError(ValueError):
    """A campaign file that cannot be read."""


def load(name: str) -> dict[str, Any]:
    """Read a campaign file, or one of our own by name (`smoke`, `nightly`, `weekend`).

    Raises:
        PlanError: names the file, the field and the rule.
    """
    own = CAMPAIGNS / f"{name}.toml"
    path = own if own.is_file() else Path(name)
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        known = ", ".join(sorted(file.stem for file in CAMPAIGNS.glob("*.toml")))
        message = f"{path}: no campaign file ({error}); known by name: {known}"
        raise PlanError(message) from error
    for field, value in body.items():
        if field not in FIELDS:
            message = f"{path}: unknown field {field!r}; known: {', '.join(FIELDS)}"
            raise PlanError(message)
        if not isinstance(value, FIELDS[field]) or isinstance(value, bool):
            message = f"{path}: {field} has the wrong type, got {value!r}"
            raise PlanError(message)
        if field in POSITIVE and not 0 < value < float("inf"):
            message = f"{path}: {field} must be positive, got {value}"
            raise PlanError(message)
    wrong = [kind for kind in body.get("kinds", ()) if kind not in KINDS]
    if wrong:
        message = f"{path}: kinds must be among {', '.join(KINDS)}, got {', '.join(map(str, wrong))}"
        raise PlanError(message)
    return body
