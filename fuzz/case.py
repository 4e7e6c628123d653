"""A case: inputs in words, and what a hunt asks of the kernel on them.

A case file holds one JSON object.  Plain inputs (`flywheel-attention-case/1`) are asked the contract alone; a
`flywheel-fuzz-case/1` names the hunt, what is asked, and holds the inputs as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import pkgutil
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from verify.attention import cases as attention_cases
from verify.attention.cases import AttentionCase, CaseError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "flywheel-fuzz-case/1"
PLAIN_HUNT = "anchor"
"""Who judges plain attention inputs: any hunt that asks the contract does it the same way."""

READERS = {
    attention_cases.FORMAT: "verify.attention.cases:AttentionCase.from_json",
    "flywheel-inverse-case/1": "fuzz.gdn.inverse_case:InverseCase.from_json",
    "flywheel-layer-case/1": "fuzz.gdn.layer_case:LayerCase.from_json",
}
"""How inputs of each format are read."""

_ABOUT_THE_FILE = ("name", "provenance", "sha256", "versions")


class Inputs(Protocol):
    """Inputs in words, from which the exact bits follow on any machine."""

    @property
    def name(self) -> str:
        """What is special about them."""
        ...

    @property
    def provenance(self) -> str:
        """How they were found."""
        ...

    def build(self) -> Any:  # noqa: ANN401  the problem of whatever operation it is
        """The problem."""
        ...

    def to_json(self, *, sha256: str | None = None) -> dict[str, Any]:
        """A JSON object that the format's reader reads back."""
        ...


@dataclasses.dataclass(frozen=True)
class Case:
    """What a hunt tries.

    Attributes:
        hunt: whose evaluator judges it.
        inputs: an `AttentionCase`, `InverseCase` or `LayerCase`.
        ask: name and value of everything that is asked beyond the contract, such as a relation or a seed, sorted.
    """

    hunt: str
    inputs: Inputs
    ask: tuple[tuple[str, str | int], ...] = ()

    @property
    def name(self) -> str:
        """What is special about it."""
        words = [f"{name} {value}" for name, value in self.ask]
        return "; ".join([self.inputs.name, *words])

    @property
    def provenance(self) -> str:
        """How it was found."""
        return self.inputs.provenance

    def asked(self, name: str) -> str | int:
        """One thing that is asked.

        Raises:
            CaseError: the case does not say.
        """
        for key, value in self.ask:
            if key == name:
                return value
        message = f"case {self.name!r} of hunt {self.hunt} must say {name!r}"
        raise CaseError(message)

    @functools.cached_property
    def problem(self) -> Any:  # noqa: ANN401  of whatever operation it is
        """The problem that the inputs build."""
        with np.errstate(over="ignore"):  # varied exponents may leave the format: such a case lies outside the domain
            return self.inputs.build()

    @functools.cached_property
    def sha256(self) -> str:
        """Digest of the bits."""
        if isinstance(self.inputs, AttentionCase):
            return attention_cases.digest(self.problem)
        return self.inputs.to_json()["sha256"]

    def to_json(self, *, digest: bool = True) -> dict[str, Any]:
        """A JSON object that `from_json` reads back, with or without the digest of the bits."""
        sha256 = self.sha256 if digest else ""
        return self._body | {"inputs": self._body["inputs"] | {"sha256": sha256}, "sha256": sha256}

    @functools.cached_property
    def _body(self) -> dict[str, Any]:
        """What `to_json` gives, without the digest."""
        return {
            "format": FORMAT,
            "hunt": self.hunt,
            "name": self.name,
            "ask": {name: value for name, value in self.ask},  # noqa: C416  a dict in the file
            "inputs": self.inputs.to_json(sha256=""),
            "sha256": "",
        }

    @staticmethod
    def from_json(body: dict[str, Any]) -> Case:
        """Read a case, plain inputs included, and check that it builds the bits that it was written with.

        Raises:
            CaseError: an unknown format, unknown or missing fields, or other bits.
        """
        if body.get("format") in READERS:
            return Case(PLAIN_HUNT, _inputs(body))
        if body.get("format") != FORMAT:
            message = f"format must be {FORMAT} or one of {', '.join(READERS)}, got {body.get('format')!r}"
            raise CaseError(message)
        try:
            ask = tuple(sorted(body["ask"].items()))
            return Case(str(body["hunt"]), _inputs(body["inputs"]), ask)
        except (KeyError, AttributeError, TypeError) as error:
            message = f"case {body.get('name')!r} cannot be read: {error}"
            raise CaseError(message) from error

    def renamed(self, provenance: str) -> Case:
        """The case with another provenance."""
        return dataclasses.replace(self, inputs=dataclasses.replace(self.inputs, provenance=provenance))  # type: ignore[type-var]

    def with_inputs(self, inputs: Inputs) -> Case:
        """The same question about other inputs."""
        return dataclasses.replace(self, inputs=inputs)

    @functools.cached_property
    def key(self) -> bytes:
        """Identity of a case whatever it is called."""
        return case_key(self.to_json(digest=False))

    @property
    def size(self) -> int:
        """How long its description is, without names and provenance."""
        body = self.to_json(digest=False)
        return len(json.dumps(_content(body)))


def _inputs(body: dict[str, Any]) -> Inputs:
    reader = READERS.get(body.get("format", ""))
    if reader is None:
        message = f"inputs must have one of the formats {', '.join(READERS)}, got {body.get('format')!r}"
        raise CaseError(message)
    body = {key: value for key, value in body.items() if not (key == "sha256" and value == "")}
    with np.errstate(over="ignore"):
        return pkgutil.resolve_name(reader)(body)


def _content(body: dict[str, Any]) -> dict[str, Any]:
    content = {key: value for key, value in body.items() if key not in _ABOUT_THE_FILE}
    if "inputs" in content:
        content["inputs"] = _content(content["inputs"])
    return content


def case_key(body: dict[str, Any]) -> bytes:
    """Identity of a case whatever it is called; `body` is its JSON."""
    return hashlib.blake2b(json.dumps(_content(body), sort_keys=True).encode(), digest_size=16).digest()


def load_case(path: Path) -> Case:
    """Read a case file.

    Raises:
        CaseError: names the file and what is wrong with it.
    """
    try:
        return Case.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, CaseError) as error:
        message = f"{path}: {error}"
        raise CaseError(message) from error


def save_case(case: Case, path: Path) -> None:
    """Write a case file; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "numpy")}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(case.to_json() | {"versions": versions}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
