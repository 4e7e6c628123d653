"""The lemmas as `python -m proofs --json` gives them, kept beside the records."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from reports.resume import ROOT, write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT = "flywheel-lemmas/1"


class LemmasError(ValueError):
    """`python -m proofs` gave no verdicts, or a file holds none."""


@dataclasses.dataclass(frozen=True)
class Lemma:
    """One lemma.

    Attributes:
        status: "holds" or "refuted".
        tools: what a formal tool said, such as "coq: checked, 2 theorems" or "coq: not checked here, coqc not found".
        unasked: a tool was not there to be asked.
    """

    name: str
    statement: str
    status: str
    finding: str
    constants: tuple[tuple[str, str], ...]
    assumptions: tuple[tuple[str, str], ...]
    methods: tuple[str, ...]
    tools: tuple[str, ...]
    axioms: tuple[str, ...]
    unasked: bool


def write(path: Path) -> None:
    """Check every lemma, in a process of its own, and keep the verdicts.

    Raises:
        LemmasError: the command gave none.
    """
    command = [sys.executable, "-m", "proofs", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        message = f"python -m proofs --json ended with {done.returncode} and no verdicts: {done.stderr.strip()[-500:]}"
        raise LemmasError(message) from error
    write_whole(path, json.dumps({"format": FORMAT} | found, allow_nan=False) + "\n")


def is_lemmas(body: Any) -> bool:  # noqa: ANN401  from JSON
    """Whether a file is the output of `python -m proofs --json`, kept by us or by a user."""
    return isinstance(body, dict) and isinstance(body.get("lemmas"), list)


def read(body: Mapping[str, Any]) -> tuple[Lemma, ...]:
    """The lemmas.

    Raises:
        LemmasError: a lemma lacks a field.
    """
    try:
        return tuple(_lemma(one) for one in body["lemmas"])
    except (KeyError, TypeError, AttributeError) as error:
        message = f"no verdicts of python -m proofs --json: {error!r}"
        raise LemmasError(message) from error


def _lemma(body: Mapping[str, Any]) -> Lemma:
    tools = body.get("tools") or []
    return Lemma(
        name=str(body["name"]),
        statement=str(body["statement"]),
        status="holds" if body["holds"] else "refuted",
        finding=str(body["finding"]),
        constants=tuple((str(name), str(value)) for name, value in body["constants"].items()),
        assumptions=tuple((str(one["text"]), str(one["covered_by"])) for one in body["assumptions"]),
        methods=tuple(str(method) for method in body["methods"]),
        tools=tuple(f"{tool['tool']}: {tool['outcome']}, {tool['finding']}" for tool in tools),
        axioms=tuple(sorted({str(axiom) for tool in tools for axiom in tool["axioms"]})),
        unasked=any(tool["outcome"] == "not checked here" for tool in tools),
    )
