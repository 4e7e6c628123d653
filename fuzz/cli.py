"""Commands: `run`, `replay`, `promote`, `list`, `experiment`, `bench`."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import fuzz.hunts
from fuzz import bench, corpus, experiment, plans
from fuzz.campaign import CASE_MEGABYTES, CASE_SECONDS, CYCLE, Campaign, CampaignError, Plan
from fuzz.case import Case, load_case
from fuzz.cluster import ClusterError
from fuzz.database import DatabaseError
from fuzz.describe import pytest_source, sentence
from fuzz.display import Display, rows
from fuzz.hunts import HuntError
from fuzz.index import Index
from fuzz.operations import OPERATIONS
from fuzz.store import StoreError
from verify import records
from verify.attention.cases import CaseError
from verify.records import RecordError
from verify.subjects.gdn import GdnSubjectError
from verify.subjects.registry import SubjectError
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, VIOLATED, USAGE, INTERRUPTED = 0, 1, 2, 130
DEFAULT_OUT = Path("out") / "fuzz"
USAGE_ERRORS = (
    StoreError, SubjectError, GdnSubjectError, HuntError, CaseError, RecordError, corpus.CorpusError, plans.PlanError,
    DatabaseError, ClusterError,
)  # fmt: skip

console = Console(highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0: nothing violates its contract; 1: something does; 2: bad arguments, unreadable files, or no verdict can be
        given; 130: interrupted, without a violation.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (*USAGE_ERRORS, CampaignError) as error:
        console.print(f"error: {error}", markup=False)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    description = "Hunt for inputs that break a kernel's contract."
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=description)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="hunt; the same command goes on where it was stopped"))
    file_help = "a case file, or RECORDS.jsonl#SHA256 (a prefix will do)"
    replay = commands.add_parser("replay", help="judge cases again, bit for bit")
    replay.add_argument("files", nargs="+", metavar="FILE", help=file_help)
    _add_subject(replay)
    replay.set_defaults(run=_replay)
    promote = commands.add_parser("promote", help="add a case to the corpus that `pytest verify` judges")
    promote.add_argument("file", metavar="FILE", help=file_help)
    promote.add_argument("--name", metavar="NAME", help="of the file in the corpus (default: from the case's name)")
    promote.add_argument("--found", metavar="TEXT", help="how it was found (default: the case's own provenance)")
    promote.set_defaults(run=_promote)
    listing = commands.add_parser("list", help="list hunts and the corpus, or what a campaign has found")
    listing.add_argument("--out", type=Path, metavar="DIR", help="a campaign's directory: list its failures by root")
    listing.set_defaults(run=_list)
    experiment.add_arguments(
        commands.add_parser("experiment", help="what each ingredient of the search finds in a fixed budget")
    )
    bench.add_arguments(commands.add_parser("bench", help="cases per CPU-second, and two workers against one"))
    for command in (promote, listing):
        command.add_argument("--corpus", type=Path, default=corpus.CORPUS, metavar="DIR", help=argparse.SUPPRESS)
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    run.add_argument("hunts", nargs="*", metavar="HUNT", help="which ones, taking turns (default: every hunt)")
    run.add_argument(
        "--campaign", metavar="FILE", help="a campaign file, or smoke, nightly, weekend; what is given here wins"
    )
    limit = run.add_mutually_exclusive_group()
    limit.add_argument(
        "--minutes", type=_positive, metavar="M", help="stop after so many minutes (default: run until interrupted)"
    )
    limit.add_argument("--examples", type=_count, metavar="N", help="stop once DIR holds so many judged cases")
    run.add_argument("--out", type=Path, metavar="DIR", help=f"where everything goes (default: {DEFAULT_OUT}/HUNTS)")
    run.add_argument("--seed", type=_seed, metavar="S", help="of a new campaign (default: from the clock)")
    run.add_argument("--workers", type=_count, metavar="N", help=f"processes (default: one per core, {cores})")
    run.add_argument(
        "--bucket", action="append", default=[], metavar="NAME", help="only this bucket of shapes (may be repeated)"
    )
    run.add_argument(
        "--case-seconds", type=_positive, metavar="S",
        help=f"a case without a result after so long hangs (default: {CASE_SECONDS:g})",
    )  # fmt: skip
    run.add_argument(
        "--case-megabytes", type=_positive, metavar="M",
        help=f"a worker that holds more is out of memory (default: {CASE_MEGABYTES:g})",
    )  # fmt: skip
    run.add_argument("--fail-fast", action="store_true", help="stop once a failure has been made small")
    run.add_argument("--ray", metavar="ADDRESS", help="run the workers on a Ray cluster (group `cluster`)")
    run.add_argument(
        "--database", metavar="WHERE", help="where Hypothesis keeps examples: a shared folder, or redis://host:port/0"
    )
    _add_subject(run)
    run.set_defaults(run=_run)


def _add_subject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--subject", metavar="NAME",
        help="another kernel: a name that `python -m verify subjects` lists, or package.module:object",
    )  # fmt: skip


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        message = f"must be a positive number, got {text}"
        raise argparse.ArgumentTypeError(message)
    return value


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        message = f"must be at least 1, got {text}"
        raise argparse.ArgumentTypeError(message)
    return count


def _seed(text: str) -> int:
    seed = int(text)
    if seed < 0:
        message = f"must be at least 0, got {text}"
        raise argparse.ArgumentTypeError(message)
    return seed


def _plan(options: argparse.Namespace) -> Plan:
    """What is asked for: the command line, over the campaign file, over the defaults."""
    body = plans.load(options.campaign) if options.campaign else {}
    for name in plans.FIELDS:
        given = getattr(options, "bucket" if name == "buckets" else name, None)
        if given:
            body[name] = given
    if options.seed is not None:
        body["seed"] = options.seed
    if options.examples is not None or options.minutes is not None:
        body = {k: v for k, v in body.items() if k not in ("examples", "minutes") or getattr(options, k) is not None}
    chosen = tuple(body.pop("hunts", ()) or _attacking(body.get("subject")))
    label = chosen[0] if len(chosen) == 1 else "all" if len(chosen) == len(fuzz.hunts.hunts()) else "+".join(chosen)
    return Plan(
        chosen,
        options.out or DEFAULT_OUT / corpus.slug(label),
        buckets=tuple(body.pop("buckets", ())),
        kinds=tuple(body.pop("kinds", CYCLE)),
        fail_fast=options.fail_fast,
        workers=body.pop("workers", len(os.sched_getaffinity(0))),
        **body,
    )


def _attacking(subject: str | None) -> tuple[str, ...]:
    """Every hunt; of a named subject, those of its operation."""
    every = fuzz.hunts.hunts()
    if subject is None:
        return tuple(every)
    errors = []
    for operation in OPERATIONS.values():
        try:
            operation.load(subject)
        except (SubjectError, GdnSubjectError) as error:
            errors.append(error)
        else:
            return tuple(name for name, hunt in every.items() if hunt.attacks == operation)
    raise errors[0]


def _run(options: argparse.Namespace) -> int:
    plan = _plan(options)
    against = plan.subject or "our kernels"
    title = f"{'hunts' if len(plan.hunts) > 1 else 'hunt'} {', '.join(plan.hunts)} against {against}"
    with Display(console, title, minutes=plan.minutes, examples=plan.examples) as display:
        campaign = Campaign(plan, display)
        tally = campaign.run()
    console.print(f"{title}: {plan.directory}, seed {campaign.state.seed}, {campaign.new} new cases", markup=False)
    for name, value in rows(tally):
        console.print(f"  {name}: {value}", markup=False)
    again = "" if plan.subject is None else f" --subject {plan.subject}"
    for path in sorted(campaign.store.failures.glob("*.json")):
        case = load_case(path)
        test = path.with_suffix(".py")
        subject = plan.subject or fuzz.hunts.find(case.hunt).attacks.subject
        test.write_text(pytest_source(case, subject), encoding="utf-8")
        console.print(f"  {path.stem}: {sentence(case)}", markup=False)
        console.print(f"    judge it again: python -m fuzz replay {path}{again}", markup=False)
        console.print(f"    as a test: {test}", markup=False)
    if tally.violations:
        return VIOLATED
    return INTERRUPTED if campaign.interrupted else OK


def _find(name: str) -> Case:
    """A case by file name, or by the digest of a record."""
    path, hash_sign, prefix = name.rpartition("#")
    if not hash_sign:
        return load_case(Path(name))
    if not Path(path).is_file():
        message = f"{path}: no such records file"
        raise CaseError(message)
    for record in records.read(Path(path)):
        if prefix and record.get("sha256", "").startswith(prefix) and "case_spec" in record:
            return Case.from_json(record["case_spec"])
    message = f"{path}: no record of a case whose SHA-256 starts with {prefix!r}"
    raise CaseError(message)


def _judge(case: Case, subject: str | None) -> dict[str, Any] | None:
    hunt = fuzz.hunts.find(case.hunt)
    name = subject or hunt.attacks.subject
    return hunt.evaluate()(case, subject=hunt.attacks.load(name), name=name, reproduce="")


def _replay(options: argparse.Namespace) -> int:
    violated = False
    for name in options.files:
        case = _find(name)
        record = _judge(case, options.subject)
        if record is None:
            console.print(f"{Verdict.OUTSIDE_DOMAIN}: {case.name}", markup=False)
            continue
        violated |= record["root"] is not None
        _show(record)
    return VIOLATED if violated else OK


def _show(record: dict[str, Any]) -> None:
    lines = [f"{record['verdict']}: {record['case']} (bits {record['sha256'][:16]})", f"  {record['reason']}"]
    if record["root"] is not None:
        lines.append(f"  special: {sentence(Case.from_json(record['case_spec']))}")
    for part, measures in record["measures"].items():
        worst = measures["share"]
        if worst is not None:
            where = ", ".join(str(i) for i in worst["index"])
            lines.append(
                f"  worst {part}[{where}]: got {_exact(worst['got'])} ({worst['got_bits']}), "
                f"want {_exact(worst['want'])} (nearest {worst['want_bits']}), "
                f"share of the bound {_exact(worst['value'], digits=6)}"
            )
    if record["replays"] is not None:
        lines.append(f"  replays: {record['replays']} of {record['query_blocks']} query blocks")
    lines += [f"  {note}" for note in record["notes"]]
    for line in lines:
        console.print(line, markup=False)


def _exact(encoded: float | str, digits: int | None = None) -> str:
    """A number in decimals and, unless only some digits are asked for, exactly."""
    value = float(encoded)
    if not math.isfinite(value):
        return str(value)
    return f"{value:.9g} = {value.hex()}" if digits is None else f"{value:.{digits}g}"


def _promote(options: argparse.Namespace) -> int:
    case = _find(options.file)
    record = _judge(case, None)
    if record is None:
        message = f"case {case.name!r} lies outside the domain"
        raise corpus.CorpusError(message)
    path = corpus.add(case, record, name=options.name, why=options.found, directory=options.corpus)
    console.print(f"{path}: {record['verdict']}, {record['reason']}", markup=False)
    return OK


def _list(options: argparse.Namespace) -> int:
    if options.out is not None:
        return _list_found(options.out)
    console.print("hunts")
    for hunt in fuzz.hunts.hunts().values():
        console.print(f"  {hunt.name} ({hunt.attacks.subject}): {hunt.summary}", markup=False)
        for bucket in hunt.buckets.values():
            console.print(f"    {bucket.name}: {bucket.why}", markup=False)
    found = corpus.files(options.corpus)
    console.print(f"corpus ({len(found)} cases)")
    for path in found:
        case = load_case(path)
        console.print(f"  {path.name}: {case.name}\n    {case.provenance}", markup=False)
    return OK


def _list_found(directory: Path) -> int:
    """What a campaign has found, by root and by hunt, from its index."""
    if not (directory / "records.jsonl").is_file():
        message = f"{directory}: holds no campaign with records"
        raise StoreError(message)
    with Index(directory / "index.sqlite") as index:
        index.catch_up(directory / "records.jsonl")
        found = index.roots()
        console.print(f"{index.count()} cases, {len(found)} roots of failure", markup=False)
        for root in found:
            console.print(
                f"  {root.root}: {root.cases} cases, {', '.join(root.hunts)}\n    {root.reason}", markup=False
            )
        with (directory / "records.jsonl").open("rb") as file:
            for hunt in fuzz.hunts.hunts():
                for at in index.worst(hunt):
                    file.seek(at)
                    record = json.loads(file.readline())
                    console.print(f"  worst of {hunt}: {record['case']}\n    {record['reason']}", markup=False)
    return OK
