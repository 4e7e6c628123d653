"""Compile a target for a TPU that is not there, in a fresh process, and keep what the compiler says.

libtpu compiles ahead of time on a machine without a TPU.  It reads its flags when it is loaded, once in a process, so
each compilation is a process of its own (`verify.compiled.worker`); nothing here imports libtpu or starts a backend.

A finished compilation is kept in a cache directory.  Its key covers the target, shapes, options, generation, flags,
interpreter and versions; beside it stand the digests of every source file that was imported, and the entry is used only
as long as they all still hold.  Refusals are kept the same way, time-outs are not.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verify.compiled.errors import (
    WORKER_NAME,
    CompileError,
    CompilerMissingError,
    RefusedError,
    TimeLimitError,
    kernel_line,
)
from verify.compiled.generations import Generation, generation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from verify.compiled.target import Target

WORKER = Path(__file__).with_name(WORKER_NAME)
ROOT = Path(__file__).parents[2]

DUMP_FLAGS = (
    "--xla_jf_dump_hlo_text=true",
    "--xla_jf_dump_llo_text=true",
    # Without it every pass of the compiler is dumped: hundreds of megabytes for a large kernel.
    "--xla_jf_dump_llo_pass_label_regex=.*(packed-bundles-post-ra|pre-delay|deduplication-map).*",
)
BUNDLES, UTILIZATION = ".bundles.txt.gz", ".utilization.txt.gz"

_DUMP = re.compile(
    r"\d+-(?P<name>.+?)-\d+-(?P<kind>packed-bundles-post-ra|pre-delay_hlo-static-per-bundle-utilization)"
)
_DEDUPLICATION = re.compile(r"\d+-TLP-\d+-deduplication-map\.txt")


@dataclasses.dataclass(frozen=True)
class Job:
    """One compilation.

    Attributes:
        target: what to compile.
        generation: name of the TPU generation.
        flags: further libtpu flags.
        python: interpreter of the environment that holds the kernel; None is this one.
        time_limit: seconds after which the compiler is stopped.
    """

    target: Target
    generation: str
    flags: tuple[str, ...] = ()
    python: str | None = None
    time_limit: float = 600.0

    def __post_init__(self) -> None:
        generation(self.generation)

    @property
    def interpreter(self) -> str:
        """Path of the interpreter that compiles."""
        return self.python or sys.executable

    @property
    def device(self) -> Generation:
        """The generation itself."""
        return generation(self.generation)

    def specification(self) -> dict[str, Any]:
        """What the worker reads, its output directory apart."""
        target = self.target
        return {
            "reference": target.reference,
            "factory": target.factory,
            "options": dict(target.options),
            "arguments": [dataclasses.asdict(argument) for argument in target.arguments],
            "path": [*target.path, str(ROOT), str(Path.cwd())],
            "topology": self.device.topology,
            "chips": list(self.device.chips),
            "flags": list(self.flags),
        }

    def key(self) -> str:
        """Digest of everything but the source files."""
        content = {
            **self.specification(),
            "interpreter": self.interpreter,
            "versions": versions(self.interpreter),
            "dump": DUMP_FLAGS,
            "worker": hashlib.sha256(WORKER.read_bytes()).hexdigest(),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A finished compilation.

    Attributes:
        job: what was compiled.
        directory: where its files are.
        cached: whether it was found rather than made.
    """

    job: Job
    directory: Path
    cached: bool

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        """What the worker recorded: versions, times, kernels, memory."""
        return json.loads((self.directory / "meta.json").read_text())

    @property
    def versions(self) -> dict[str, str]:
        """Versions of python, jax, jaxlib, libtpu."""
        return self.meta["versions"]

    def hlo(self) -> str:
        """Text of the optimised module."""
        return (self.directory / "compiled.hlo.txt").read_text()

    def operations(self) -> dict[str, tuple[Path, Path | None]]:
        """Dumps of each HLO operation: bundles and, if written, utilization."""
        found = {}
        for path in sorted(self.directory.glob(f"*{BUNDLES}")):
            name = path.name.removesuffix(BUNDLES)
            table = path.with_name(name + UTILIZATION)
            found[name] = (path, table if table.exists() else None)
        return found

    def same_schedule(self) -> dict[str, str]:
        """Operations that share another one's schedule: equal operations are compiled once."""
        path = self.directory / "deduplication.json"
        return json.loads(path.read_text()) if path.exists() else {}


def cache_directory() -> Path:
    """Where finished compilations are kept: FLYWHEEL_COMPILED_CACHE, or the user's cache directory."""
    chosen = os.environ.get("FLYWHEEL_COMPILED_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flywheel-verified" / "compiled"


@functools.cache
def versions(interpreter: str) -> dict[str, str | None]:
    """Versions of jax, jaxlib and libtpu in an interpreter; None where absent."""
    packages = ("jax", "jaxlib", "libtpu")
    if interpreter == sys.executable:
        return {package: _version(package) for package in packages}
    script = (
        "import importlib.metadata as m, json\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        f"print(json.dumps({{p: found.get(p) for p in {packages!r}}}))"
    )
    try:
        done = subprocess.run([interpreter, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        message = f"cannot ask {interpreter} for its packages: {error}"
        raise CompilerMissingError(message) from error
    return json.loads(done.stdout)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(interpreter: str | None = None) -> str | None:
    """Why nothing can be compiled with an interpreter, or None if it can."""
    found = versions(interpreter or sys.executable)
    for package, install in (("jax", "jax"), ("libtpu", "jax[tpu]")):
        if not found[package]:
            return f"{package} is not installed in {interpreter or 'this environment'} (pip install '{install}')"
    return None


def compile_job(job: Job, *, cache: Path | None = None, fresh: bool = False) -> Artifact:
    """Compile, or take from the cache.

    Args:
        job: what to compile.
        cache: cache directory; None is `cache_directory()`.
        fresh: compile even if the cache has it.

    Raises:
        CompilerMissingError: the interpreter has no libtpu.
        RefusedError: the target, JAX or the compiler raised.
        TimeLimitError: it took longer than the job's time limit.
    """
    reason = missing(job.interpreter)
    if reason:
        raise CompilerMissingError(reason)
    place = (cache or cache_directory()) / job.key()
    if not fresh and _is_current(place):
        return _finish(job, place, cached=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".compiling-", dir=place.parent))
    try:
        _run_worker(job, scratch)
        _tidy(scratch)
        _replace(scratch, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return _finish(job, place, cached=False)


def compile_many(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    cache: Path | None = None,
    fresh: bool = False,
    started: Callable[[Job], None] | None = None,
) -> Iterator[tuple[Job, Artifact | CompileError]]:
    """Compile several at a time; yields each as it finishes, its error in place of an artifact if it failed.

    Args:
        jobs: what to compile.
        workers: how many at a time; None is one for each core.
        cache: cache directory.
        fresh: compile even what the cache has.
        started: called with each job when its turn comes.
    """

    def one(job: Job) -> Artifact | CompileError:
        if started:
            started(job)
        try:
            return compile_job(job, cache=cache, fresh=fresh)
        except CompileError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        futures = {pool.submit(one, job): job for job in jobs}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def result_key(job: Job, cache: Path | None = None) -> str | None:
    """Digest of a kept result, source files included; None if there is none that still holds."""
    place = (cache or cache_directory()) / job.key()
    if not _is_current(place):
        return None
    recorded = json.dumps(_sources(place), sort_keys=True)
    return hashlib.sha256(f"{job.key()} {recorded}".encode()).hexdigest()[:24]


def clear_cache(cache: Path | None = None) -> int:
    """Remove every kept compilation; returns how many there were."""
    place = cache or cache_directory()
    entries = [path for path in place.iterdir() if path.is_dir()] if place.is_dir() else []
    for path in entries:
        shutil.rmtree(path, ignore_errors=True)
    return len(entries)


def _environment(job: Job, scratch: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in {"XLA_FLAGS", "PYTHONPATH"}}
    return {
        **inherited,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": job.device.accelerator_type,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join([f"--xla_jf_dump_to={scratch}", *DUMP_FLAGS, *job.flags]),
    }


def _run_worker(job: Job, scratch: Path) -> None:
    """Run the worker in a session of its own, so that a stop takes the compiler's own children along."""
    command = [job.interpreter, str(WORKER)]
    spec = json.dumps({**job.specification(), "out": str(scratch)})
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(job, scratch),
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(spec, timeout=job.time_limit)
        except subprocess.TimeoutExpired as error:
            message = f"{job.target.reference} for {job.generation}: stopped after {job.time_limit:g} s"
            raise TimeLimitError(message) from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    (scratch / "compile.log").write_text(output)
    if process.returncode and not (scratch / "error.json").exists():
        # The compiler aborts the process on internal errors: its log is all there is.
        tail = "\n".join(output.strip().splitlines()[-20:])
        stage = "compile"
        raise RefusedError(stage, f"exit code {process.returncode}", tail, None)


def _tidy(scratch: Path) -> None:
    """Keep the dumps that are read, compressed and under the operation's own name."""
    for path in list(scratch.iterdir()):
        match = _DUMP.match(path.name)
        if match and "schedule-analysis" not in path.name and not match["name"].startswith(("<late-", "TLP")):
            suffix = BUNDLES if match["kind"].startswith("packed") else UTILIZATION
            with gzip.open(scratch / (match["name"] + suffix), "wb", compresslevel=4) as file:
                file.write(path.read_bytes())
        if _DEDUPLICATION.match(path.name):
            (scratch / "deduplication.json").write_text(json.dumps(_deduplication(path.read_text())))
        if re.match(r"\d+-", path.name) and path.is_file():
            path.unlink()


def _deduplication(text: str) -> dict[str, str]:
    found, key = {}, None
    for line in text.splitlines():
        if line.startswith("key:"):
            key = line.removeprefix("key:").strip()
        elif line.startswith("  ") and key:
            found[line.strip()] = key
    return {name: key for name, key in found.items() if name != key}


def _replace(scratch: Path, place: Path) -> None:
    """Put a finished directory in its place; a reader sees the old one or the new one, never half of one."""
    for _ in range(3):
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):
            scratch.rename(place)
            return
    message = f"another process keeps writing {place}"
    raise CompileError(message)


def _is_current(place: Path) -> bool:
    """Whether a cache entry is whole and none of its source files has changed."""
    recorded = _sources(place)
    return recorded is not None and all(_digest(source) == digest for source, digest in recorded.items())


def _sources(place: Path) -> dict[str, str] | None:
    """Digests of the source files behind a cache entry; None if it is not whole."""
    for name in ("meta.json", "error.json"):
        path = place / name
        if path.exists():
            return json.loads(path.read_text())["sources"]
    return None


def _digest(source: str) -> str | None:
    try:
        return hashlib.sha256(Path(source).read_bytes()).hexdigest()
    except OSError:
        return None


def _finish(job: Job, place: Path, *, cached: bool) -> Artifact:
    path = place / "error.json"
    if path.exists():
        error = json.loads(path.read_text())
        raise RefusedError(error["stage"], error["kind"], error["message"], kernel_line(error))
    return Artifact(job, place, cached)
