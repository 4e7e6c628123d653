"""The project's own rules, checked: pins, layout, import directions, what the wheel holds."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = ("flywheel", "verify", "proofs", "fuzz", "reports")
MAY_IMPORT = {
    "flywheel": {"flywheel"},
    "verify": {"flywheel", "verify"},
    "proofs": {"flywheel", "verify", "proofs"},
    "fuzz": {"flywheel", "verify", "fuzz"},
    "reports": set(ROOMS),
}
ORACLES = sorted((ROOT / "verify" / "attention").glob("oracle_*.py"))

ELSEWHERE = ("verify/traces/model.py", "verify/subjects/peers/deltanet_runner.py")
"""Run only where an optional group, or another environment, has been installed for them."""

pytestmark = pytest.mark.smoke


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a file imports anywhere in it, at run time or for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found.add(node.module.split(".")[0])
    return found & set(ROOMS)


def sources(room: str) -> list[Path]:
    """A room's Python files, tests aside."""
    tests = ROOT / "verify" / "tests"
    found = sorted((ROOT / room).rglob("*.py"))
    return [path for path in found if tests not in path.parents and path.name != "conftest.py"]


@pytest.mark.parametrize("room", ROOMS)
def test_import_directions(room: str) -> None:
    """Rooms import only what lies before them, and nothing imports the tests."""
    assert sources(room)
    for path in sources(room):
        wrong = imported_rooms(path) - MAY_IMPORT[room]
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"
        assert "verify.tests" not in path.read_text(encoding="utf-8"), path


def test_oracles_import_nothing_of_the_kernels() -> None:
    """No oracle reaches flywheel, not through any module of the project that it imports."""
    assert len(ORACLES) >= 3
    for oracle in ORACLES:
        code = (
            "import sys, verify; sys.modules['flywheel'] = None; sys.modules['jax'] = None; "
            f"import importlib; importlib.import_module('verify.attention.{oracle.stem}')"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
        assert run.returncode == 0, f"{oracle.name}: {run.stderr[-500:]}"


def test_flywheel_needs_jax_alone() -> None:
    """`import flywheel` works where the suite's packages are missing."""
    blocked = ("jaxtyping", "hypothesis", "flint", "mpmath", "matplotlib", "jinja2", "rich", "verify")
    code = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\nimport flywheel; flywheel.attention"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-500:]


def pins(lines: list[str]) -> dict[str, str]:
    """name -> version of `name==version` lines."""
    found: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line)
        assert match, f"not a name==version line: {line}"
        found[match[1].lower()] = match[2]
    return found


def test_constraints_agree() -> None:
    """constraints.txt and [tool.uv] constraint-dependencies pin the same versions."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    from_file = pins([line for line in text if line and not line.startswith("#")])
    assert from_file == pins(project["tool"]["uv"]["constraint-dependencies"])


def test_every_dependency_is_pinned() -> None:
    """Each package that a group names has its version in constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = pins([line for line in lines if line and not line.startswith("#")])
    groups = project["dependency-groups"]
    entries = [entry for group in groups.values() for entry in group if isinstance(entry, str)]
    named = {re.split(r"[\[<>=!~ ]", entry)[0].lower() for entry in entries}
    assert named - set(pinned) == set()


def imported_at_once(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports as soon as it is imported."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def normalised(requirement: str) -> str:
    """The name of a requirement as packagers compare it."""
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-").replace(".", "-")


def test_what_is_imported_at_once_is_installed_by_default() -> None:
    """No file needs a package that only an optional group, or another package by chance, brings along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["dependency-groups"]
    included = [groups[entry["include-group"]] for entry in groups["dev"]]
    wanted = [*project["project"]["dependencies"], *(name for group in included for name in group)]
    jax = [requirement for requirement in importlib.metadata.requires("jax") or [] if "extra ==" not in requirement]
    declared = {normalised(requirement) for requirement in (*wanted, *jax)}
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    loaded = [path for path in files if path.relative_to(ROOT).as_posix() not in ELSEWHERE]
    ours = {*ROOMS, *(path.stem for path in files)}
    bring = importlib.metadata.packages_distributions()
    for path in loaded:
        for name in sorted(imported_at_once(path) - ours - sys.stdlib_module_names):
            brought_by = {normalised(distribution) for distribution in bring.get(name, [name])}
            assert brought_by & declared, f"{path.relative_to(ROOT)} imports {name}, which no default group installs"


def test_wheel_holds_flywheel_alone() -> None:
    """The wheel's package list and needs: flywheel, and jax."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["flywheel"]
    assert [re.split(r"[<>=]", need)[0] for need in project["project"]["dependencies"]] == ["jax"]


def test_ci_runs_the_command_of_the_readme() -> None:
    """`.ci/run` runs the test command that README gives, to the letter."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    (uv run pytest verify)$", readme, flags=re.MULTILINE)
    assert commands == ["uv run pytest verify"]
    assert "\nuv run pytest verify\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_test_says_what_it_pins() -> None:
    """Every test function of the suite has a docstring."""
    for path in sorted((ROOT / "verify" / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert ast.get_docstring(node), f"{path.relative_to(ROOT)}: {node.name}"


def test_no_skip_without_a_reason() -> None:
    """Every skip mark names its reason."""
    for path in sorted((ROOT / "verify").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"mark\.(skip|xfail)\b(\([^)]*\))?", text):
            if path != Path(__file__):
                assert "reason=" in (match[2] or ""), f"{path.relative_to(ROOT)}: {match[0]}"


def test_rooms_are_importable() -> None:
    """An editable install makes all five rooms importable."""
    assert [room for room in ROOMS if importlib.util.find_spec(room) is None] == []
