"""Commands: `run`, `replay`, `promote`, `list`."""

from __future__ import annotations

import argparse
import math
import os
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import fuzz.hunts
from fuzz import corpus
from fuzz.campaign import CASE_SECONDS, Campaign, CampaignError, Plan
from fuzz.display import Display, rows
from fuzz.hunts import HuntError
from fuzz.store import StoreError
from verify import records
from verify.attention.cases import AttentionCase, CaseError, digest, load_case
from verify.records import RecordError
from verify.subjects.registry import FLYWHEEL, SubjectError, load, names
from verify.subjects.subject import ATTENTION
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, VIOLATED, USAGE, INTERRUPTED = 0, 1, 2, 130
DEFAULT_OUT = Path("out") / "fuzz"
USAGE_ERRORS = (StoreError, SubjectError, HuntError, CaseError, RecordError, corpus.CorpusError)

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
    listing = commands.add_parser("list", help="list hunts and the corpus")
    listing.set_defaults(run=_list)
    for command in (promote, listing):
        command.add_argument("--corpus", type=Path, default=corpus.CORPUS, metavar="DIR", help=argparse.SUPPRESS)
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    run.add_argument(
        "hunt", nargs="?", default="anchor", metavar="HUNT", help="one that `list` names (default: anchor)"
    )
    limit = run.add_mutually_exclusive_group()
    limit.add_argument(
        "--minutes", type=_positive, metavar="M", help="stop after so many minutes (default: run until interrupted)"
    )
    limit.add_argument("--examples", type=_count, metavar="N", help="stop once DIR holds so many judged cases")
    run.add_argument("--out", type=Path, metavar="DIR", help=f"where everything goes (default: {DEFAULT_OUT}/HUNT)")
    run.add_argument("--seed", type=_seed, metavar="S", help="of a new campaign (default: from the clock)")
    run.add_argument(
        "--workers", type=_count, default=cores, metavar="N", help="processes (default: one per core, %(default)s)"
    )
    run.add_argument(
        "--bucket", action="append", default=[], metavar="NAME", help="only this bucket of shapes (may be repeated)"
    )
    run.add_argument(
        "--case-seconds", type=_positive, default=CASE_SECONDS, metavar="S",
        help="a case without a result after so long hangs (default: %(default)g)",
    )  # fmt: skip
    _add_subject(run)
    run.set_defaults(run=_run)


def _add_subject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--subject", default=FLYWHEEL, metavar="NAME",
        help=f"{', '.join(names())}, or package.module:object",
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


def _run(options: argparse.Namespace) -> int:
    plan = Plan(
        options.hunt,
        options.out or DEFAULT_OUT / options.hunt,
        subject=options.subject,
        buckets=tuple(options.bucket),
        seed=options.seed,
        minutes=options.minutes,
        examples=options.examples,
        workers=options.workers,
        case_seconds=options.case_seconds,
    )
    title = f"hunt {plan.hunt} against {plan.subject}"
    with Display(console, title, minutes=plan.minutes, examples=plan.examples) as display:
        campaign = Campaign(plan, display)
        tally = campaign.run()
    console.print(f"{title}: {plan.directory}, seed {campaign.state.seed}, {campaign.new} new cases", markup=False)
    for name, value in rows(tally):
        console.print(f"  {name}: {value}", markup=False)
    failures = sorted(campaign.store.failures.glob("*.json"))
    again = "" if plan.subject == FLYWHEEL else f" --subject {plan.subject}"
    for path in failures:
        console.print(f"  judge it again: python -m fuzz replay {path}{again}", markup=False)
    if tally.violations:
        return VIOLATED
    return INTERRUPTED if campaign.interrupted else OK


def _find(name: str) -> AttentionCase:
    """A case by file name, or by the digest of a record."""
    path, hash_sign, prefix = name.rpartition("#")
    if not hash_sign:
        return load_case(Path(name))
    if not Path(path).is_file():
        message = f"{path}: no such records file"
        raise CaseError(message)
    for record in records.read(Path(path)):
        if prefix and record.get("sha256", "").startswith(prefix) and "case_spec" in record:
            return AttentionCase.from_json(record["case_spec"])
    message = f"{path}: no record of a case whose SHA-256 starts with {prefix!r}"
    raise CaseError(message)


def _judge(case: AttentionCase, subject: str) -> dict[str, Any] | None:
    evaluate = pkgutil.resolve_name(fuzz.hunts.find("anchor").evaluator)
    problem = case.build()
    spec = case.to_json(sha256=digest(problem))
    return evaluate(case, problem, spec, subject=load(subject, operation=ATTENTION), name=subject, reproduce="")


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
    record = _judge(case, FLYWHEEL)
    if record is None:
        message = f"case {case.name!r} lies outside the domain"
        raise corpus.CorpusError(message)
    path = corpus.add(case, record, name=options.name, why=options.found, directory=options.corpus)
    console.print(f"{path}: {record['verdict']}, {record['reason']}", markup=False)
    return OK


def _list(options: argparse.Namespace) -> int:
    console.print("hunts")
    for hunt in fuzz.hunts.HUNTS.values():
        console.print(f"  {hunt.name}: {hunt.summary}", markup=False)
        for bucket in hunt.buckets.values():
            console.print(f"    {bucket.name}: {bucket.why}", markup=False)
    found = corpus.files(options.corpus)
    console.print(f"corpus ({len(found)} cases)")
    for path in found:
        case = load_case(path)
        console.print(f"  {path.name}: {case.name}\n    {case.provenance}", markup=False)
    return OK
