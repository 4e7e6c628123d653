"""The example workflow for GitHub Pages: it parses, its commands exist, and its steps make and update a site."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from report_records import record

from reports import cli
from verify import records

ROOT = Path(__file__).parents[3]
WORKFLOW = ROOT / ".github" / "workflows" / "pages.yml"
BASH, GIT = [shutil.which("bash") or ""], [shutil.which("git") or ""]


def steps() -> dict[str, str]:
    """The shell text of each named step."""
    body = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return {step["name"]: step["run"] for step in body["jobs"]["publish"]["steps"] if "run" in step}


@pytest.mark.smoke
def test_the_workflow_parses_and_its_commands_exist() -> None:
    """YAML and shell are well formed, the token may write, and every command of ours is one that the parser takes."""
    body = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert body["permissions"] == {"contents": "write"}
    assert set(body[True]) == {"schedule", "workflow_dispatch"}, "YAML 1.1 reads the key `on` as true"
    for text in steps().values():
        subprocess.run([*BASH, "-n", "-c", text], check=True)
    lines = [line for text in steps().values() for line in text.splitlines() if "python -m reports" in line]
    asked = [cli._parser().parse_args(shlex.split(line)[5:]) for line in lines]
    assert [options.run for options in asked] == [cli._build, cli._publish]
    assert asked[0].out in asked[1].runs, "what is measured is what is published"
    assert steps()["the verdict"].startswith("exit ${{ steps.build.outputs.code }}")


@pytest.mark.deep
def test_its_steps_make_and_update_a_site(tmp_path: Path) -> None:
    """In a checkout with an origin: the first run makes the branch, the second adds to it, and both runs are kept."""
    origin = tmp_path / "origin.git"
    author = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    git(tmp_path, "init", "--quiet", "--bare", str(origin))
    git(tmp_path, "clone", "--quiet", str(origin), "first")
    (tmp_path / "first" / "README").write_text("a checkout\n")
    git(tmp_path / "first", "add", "README")
    git(tmp_path / "first", *author, "commit", "--quiet", "--message", "start")
    git(tmp_path / "first", "push", "--quiet", "origin", "HEAD:main")
    git(origin, "symbolic-ref", "HEAD", "refs/heads/main")
    for number, name in enumerate(("first-run", "second-run"), start=1):
        checkout = tmp_path / name
        git(tmp_path, "clone", "--quiet", "--depth", "1", origin.as_uri(), name)
        records.append(checkout / "records.jsonl", record(f"case-{number}"))
        run(checkout, steps()["measure"].replace("reports build", "reports build --from records.jsonl"))
        assert (checkout / "output").read_text() == "code=0\n"
        run(checkout, steps()["the site so far"])
        run(checkout, steps()["publish"])
        files = git(origin, "ls-tree", "-r", "--name-only", "gh-pages").split()
        assert {"index.html", ".nojekyll"} <= set(files)
        assert sum(file.startswith("runs/") and file.endswith("/index.html") for file in files) == number
        assert int(git(origin, "rev-list", "--count", "gh-pages")) == number


def git(where: Path, *arguments: str) -> str:
    """Run git, and return what it prints."""
    return subprocess.run([*GIT, *arguments], cwd=where, check=True, capture_output=True, text=True).stdout


def run(checkout: Path, text: str) -> None:
    """Run a step as GitHub does, with this interpreter."""
    ours = text.replace("uv run python", shlex.quote(sys.executable))
    environment = os.environ | {"GITHUB_OUTPUT": str(checkout / "output"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*BASH, "-e", "-c", ours], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
