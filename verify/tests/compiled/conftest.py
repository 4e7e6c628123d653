"""Kept dumps and compilations for the tests of `verify.compiled`."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from verify.compiled import checks
from verify.compiled.compile import BUNDLES, UTILIZATION, Artifact, Job, compile_job, compile_many, missing
from verify.compiled.generations import GENERATIONS
from verify.compiled.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
KERNELS = HERE / "kernels.py"
DUMPS = HERE / "dumps"
SMOKE_CASES = [*(("d128-causal", name) for name in GENERATIONS), ("d256-causal", "v6e")]
MANY = 10


def kept_dumps(kernel: str) -> list[str]:
    """Names of the kept dumps of a kernel, one for each generation and libtpu."""
    return sorted(path.name.removesuffix(".json.gz") for path in DUMPS.glob(f"{kernel}-*.json.gz"))


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[str], Artifact]:
    """A kept dump as the compilation it came from."""

    def load(name: str) -> Artifact:
        kernel, generation, _ = name.split("-")
        document: dict[str, Any] = json.loads(gzip.decompress((DUMPS / f"{name}.json.gz").read_bytes()))
        place = tmp_path / name
        place.mkdir()
        (place / "meta.json").write_text(json.dumps(document["meta"]))
        (place / "compiled.hlo.txt").write_text(document["hlo"])
        (place / "deduplication.json").write_text(json.dumps(document["same"]))
        for operation, (bundles, table) in document["operations"].items():
            (place / (operation + BUNDLES)).write_bytes(gzip.compress(bundles.encode()))
            if table is not None:
                (place / (operation + UTILIZATION)).write_bytes(gzip.compress(table.encode()))
        return Artifact(Job(Target(f"{KERNELS}:{kernel}", factory=True), generation), place, cached=True)

    return load


def kernel_job(kernel: str, generation: str = "v6e", **options: object) -> Job:
    """The compilation of one of the small kernels."""
    return Job(Target(f"{KERNELS}:{kernel}", options=options, factory=True), generation)


def smoke_jobs() -> list[Job]:
    """What the smoke subset compiles, longest first: the tests ask for each later and find it in the cache."""
    small = [kernel_job(kernel, name) for kernel in ("product", "steps", "lengths") for name in GENERATIONS]
    small += [kernel_job(kernel) for kernel in ("chain", "data_dependent", "transcendentals", "relayout", "unaligned")]
    small += [kernel_job("precision", name=name) for name in ("DEFAULT", "HIGH", "HIGHEST")]
    small += [kernel_job("chain", length=1), kernel_job("steps", "v5p", parallel=True)]
    return [checks.job(case, name) for case, name in SMOKE_CASES] + small


@pytest.fixture(scope="session")
def compiler(request: pytest.FixtureRequest) -> None:
    """Skip, with the reason, where nothing can be compiled; else compile the smoke subset on every core."""
    reason = missing()
    if reason:
        pytest.skip(f"cannot compile for TPU: {reason}")
    # pytest-xdist uses every core by itself.
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    if alone and len(request.session.items) >= MANY:
        for _ in compile_many(smoke_jobs()):
            pass


@pytest.fixture(scope="session")
def compiled(compiler: None) -> Callable[..., Artifact]:  # noqa: ARG001  it skips
    """Compile one of the small kernels."""
    return lambda kernel, generation="v6e", **options: compile_job(kernel_job(kernel, generation, **options))
