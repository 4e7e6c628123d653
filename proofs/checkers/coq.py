"""Checking `.v` files with Coq: builds in dependency order, then asks which axioms each theorem rests on.

A compiled file is kept under the hash of everything that it depends on (its text, the constants as the code has them,
the files it requires, Coq's version), so that a constant that changes makes exactly what rests on it be proved again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import graphlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from proofs.checkers.outcome import Outcome, Report, Tool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).parents[1]
CONSTANTS = "constants"
_SECONDS_PER_FILE = 180
_AT_ONCE = 2
_LIBRARIES = ("Flocq.Core.Core", "Interval.Tactic")


@dataclasses.dataclass(frozen=True)
class Module:
    """One `.v` file: its name, text, and the names of the project's files that it requires."""

    name: str
    text: str

    @property
    def requires(self) -> tuple[str, ...]:
        """Names in its `From Proofs Require Import` lines."""
        found = re.findall(r"^From Proofs Require Import ([\w ]+)\.", self.text, flags=re.MULTILINE)
        return tuple(name for line in found for name in line.split())

    @property
    def theorems(self) -> tuple[str, ...]:
        """What it states as a theorem or a corollary; its lemmas are steps towards them."""
        return tuple(re.findall(r"^(?:Theorem|Corollary) (\w+)", self.text, flags=re.MULTILINE))

    @property
    def allowed_axioms(self) -> frozenset[str]:
        """The real numbers' axioms; in files that use the interval tactic those of Coq's primitive integers too."""
        return axioms(primitive_integers="From Interval" in self.text)


@functools.cache
def axioms(*, primitive_integers: bool) -> frozenset[str]:
    """The names in proofs/axioms.txt, of which the last section holds for the interval tactic alone."""
    sections = (ROOT / "axioms.txt").read_text(encoding="utf-8").split("[primitive integers]")
    text = "".join(sections) if primitive_integers else sections[0]
    return frozenset(line for line in text.split("\n") if line and not line.startswith(("#", "[")))


def sources() -> dict[str, Path]:
    """Every `.v` file of this room by its name, which is unique in it."""
    return {path.stem: path for path in sorted(ROOT.rglob("*.v"))}


def modules(constants_text: str) -> dict[str, Module]:
    """Every file as it stands, and the written constants."""
    found = {name: Module(name, path.read_text(encoding="utf-8")) for name, path in sources().items()}
    found[CONSTANTS] = Module(CONSTANTS, constants_text)
    return found


@functools.cache
def version() -> str | None:
    """Coq's version, or None where it or one of the libraries is missing."""
    if shutil.which("coqc") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.v")
        probe.write_text("".join(f"Require {library}.\n" for library in _LIBRARIES), encoding="utf-8")
        if subprocess.run(["coqc", "-q", str(probe)], capture_output=True, check=False).returncode:  # noqa: S607
            return None
    said = subprocess.run(["coqc", "--version"], capture_output=True, text=True, check=True)  # noqa: S607
    return said.stdout.strip()


def user_cache() -> Path:
    """Where compiled files are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flywheel" / "proofs"


def check(
    names: Iterable[str], constants_text: str, store: Path, progress: Callable[[str], None] | None = None
) -> dict[str, Report]:
    """Check the theorems of the files of these names.

    At most two processes run at once.  A file whose requirements fail is a failure too, and says of what.

    Args:
        names: files without their suffix.
        constants_text: the module `constants`.
        store: keeps what was compiled.
        progress: told in words whenever a file is done.
    """
    wanted = list(names)
    if version() is None:
        missing = "coqc, Flocq or the interval library is not installed"
        return {name: Report(Tool.COQ, Outcome.NOT_CHECKED, missing) for name in wanted}
    known = modules(constants_text)
    needed = _closure(wanted, known)
    build = _Build(known, store)
    order = graphlib.TopologicalSorter({name: known[name].requires for name in needed})
    order.prepare()
    reports: dict[str, Report] = {}
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        running: dict[concurrent.futures.Future[Report], str] = {}
        while order.is_active():
            for name in order.get_ready():
                blocked = [r for r in known[name].requires if reports[r].outcome is not Outcome.CHECKED]
                running[pool.submit(build.examine, name, blocked)] = name
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                name = running.pop(future)
                reports[name] = future.result()
                order.done(name)
                if progress is not None:
                    progress(f"coq: {len(reports)} of {len(needed)} files, {name}.v {reports[name].outcome}")
    return {name: reports[name] for name in wanted}


def _closure(names: Iterable[str], known: dict[str, Module]) -> set[str]:
    found: set[str] = set()
    stack = list(names)
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack += known[name].requires
    return found


class _Build:
    """Compiles modules into folders named by their keys."""

    def __init__(self, known: dict[str, Module], store: Path) -> None:
        self.known = known
        self.store = store

    @functools.cache  # noqa: B019  one build lives as long as one check
    def key(self, name: str) -> str:
        """Hash of all that the compiled file depends on."""
        module = self.known[name]
        parts = [version() or "", module.text, *(self.key(required) for required in module.requires)]
        parts += sorted(module.allowed_axioms)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def folder(self, name: str) -> Path:
        """Where the compiled file lies."""
        return self.store / self.key(name)

    def examine(self, name: str, blocked: list[str]) -> Report:
        """Compile one file, unless that was done before, and ask for the axioms of its theorems."""
        if blocked:
            return Report(Tool.COQ, Outcome.FAILED, f"rests on {blocked[0]}.v, which failed")
        kept = self.folder(name) / "verdict.json"
        if kept.exists():
            found = tuple(json.loads(kept.read_text(encoding="utf-8"))["axioms"])
            return self._checked(name, found, 0.0, earlier=True)
        start = time.perf_counter()
        self.store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.store) as scratch:
            failure = self._compile(name, Path(scratch))
            found, failure = ((), failure) if failure is not None else self._axioms(name, Path(scratch))
            seconds = time.perf_counter() - start
            if failure is not None:
                return Report(Tool.COQ, Outcome.FAILED, failure, seconds)
            verdict = json.dumps({"theorems": self.known[name].theorems, "axioms": found})
            Path(scratch, "verdict.json").write_text(verdict, encoding="utf-8")
            self._keep(name, Path(scratch))
        return self._checked(name, found, seconds, earlier=False)

    def _keep(self, name: str, scratch: Path) -> None:
        """Move the result into place at once, so that a killed run leaves nothing half written."""
        finished = Path(tempfile.mkdtemp(dir=self.store))
        for suffix in (".vo", ".glob"):
            shutil.copy(scratch / f"{name}{suffix}", finished)
        shutil.copy(scratch / "verdict.json", finished)
        try:
            finished.rename(self.folder(name))
        except OSError:  # another process was quicker with the same file
            shutil.rmtree(finished)

    def _checked(self, name: str, found: tuple[str, ...], seconds: float, *, earlier: bool) -> Report:
        theorems = self.known[name].theorems
        finding = f"{len(theorems)} theorem{'s' if len(theorems) != 1 else ''}, {len(found)} axioms"
        return Report(Tool.COQ, Outcome.CHECKED, finding, seconds, found, earlier)

    def _paths(self, name: str, scratch: Path) -> list[str]:
        folders = [
            scratch,
            *(self.folder(needed) for needed in sorted(_closure(self.known[name].requires, self.known))),
        ]
        return [word for folder in folders for word in ("-Q", str(folder), "Proofs")]

    def _compile(self, name: str, scratch: Path) -> str | None:
        module = self.known[name]
        Path(scratch, f"{name}.v").write_text(module.text, encoding="utf-8")
        done = self._run(name, f"{name}.v", scratch)
        return done if isinstance(done, str) else None

    def _axioms(self, name: str, scratch: Path) -> tuple[tuple[str, ...], str | None]:
        """What the theorems rest on; a failure names an axiom that is not allowed."""
        module = self.known[name]
        if not module.theorems:
            return (), None
        audit = f"audit_{name}"
        # One question about all of them: each walks through every proof below, the libraries' too.
        together = ", ".join(f"{name}.{each}" for each in module.theorems)
        lines = [f"From Proofs Require {name}.", f"Definition all := ({together}).", "Print Assumptions all."]
        Path(scratch, f"{audit}.v").write_text("\n".join(lines) + "\n", encoding="utf-8")
        done = self._run(name, f"{audit}.v", scratch)
        if isinstance(done, str):
            return (), done
        found = tuple(sorted(axioms_printed(done.stdout)))
        foreign = [axiom for axiom in found if axiom not in module.allowed_axioms]
        return found, f"rests on an axiom that is not allowed: {foreign[0]}" if foreign else None

    def _run(self, name: str, file: str, scratch: Path) -> subprocess.CompletedProcess[str] | str:
        """Run coqc; a string is a failure, in one line."""
        command = ["coqc", "-q", *self._paths(name, scratch), str(scratch / file)]
        try:
            # In the scratch directory: Coq leaves caches of its tactics where it runs.
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_SECONDS_PER_FILE, cwd=scratch
            )
        except subprocess.TimeoutExpired:
            return f"no proof within {_SECONDS_PER_FILE} s"
        return _first_error(done.stderr, self.known[name].text) if done.returncode else done


def axioms_printed(text: str) -> set[str]:
    """The names that `Print Assumptions` lists.

    Whatever else stands at the start of a line (an assumption about universes, positivity or termination) counts as
    one, so that it is not allowed.
    """
    found: set[str] = set()
    for line in text.split("\n"):
        if line and not line[0].isspace() and line not in {"Axioms:", "Closed under the global context"}:
            found.add(line.split(" :")[0].strip())
    return found


def _first_error(stderr: str, text: str) -> str:
    """The theorem in which Coq stopped and the first line of what it said."""
    where = re.search(r"line (\d+), characters", stderr)
    said = " ".join(stderr.partition("Error:")[2].split())[:160]
    if where is None:
        return said or stderr.strip()[:160]
    before = "\n".join(text.split("\n")[: int(where[1])])
    stated = re.findall(r"^(?:Theorem|Corollary|Lemma) (\w+)", before, flags=re.MULTILINE)
    return f"no proof of {stated[-1] if stated else 'its definitions'}, line {where[1]}: {said}"
