"""`python -m verify`: judge kernels on cases and on your own tensors, and collect what others' kernels fail."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from verify.attention import adversarial, health
from verify.attention.cases import AttentionCase, CaseError, load_case, save_case
from verify.attention.open_cases import OPEN_CASES, OpenCase
from verify.attention.subjects import INTERPRET
from verify.subjects import findings
from verify.subjects.judging import judge_open_case, judge_subject
from verify.subjects.registry import FLYWHEEL, SubjectError, is_ours, load, names
from verify.subjects.selftest import AdapterError, self_test
from verify.traces import TraceError, load_trace
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.subjects.judging import JudgedSubject
    from verify.subjects.subject import Subject

EXIT_FAILED = 1
EXIT_UNUSABLE = 2


def main(arguments: Sequence[str] | None = None) -> int:  # noqa: PLR0911  one per command
    """Parse the command line and run one command; 0 if everything passed, 1 if not, 2 for unusable input."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        if options.command == "trace":
            return judge_traces(console, options.files, options.interpret)
        if options.command == "subjects":
            return show_subjects(console)
        if options.command == "findings":
            chosen = [] if options.recorded else options.subject or [name for name in names() if not is_ours(name)]
            cases = None if options.case is None else [_open_case(name) for name in options.case]
            return collect_findings(console, chosen, cases, options.out, options.records)
        subject = load(options.subject)
        cases = [find_case(name) for name in options.cases]
    except (CaseError, TraceError, SubjectError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    if options.save is not None:
        for case in cases:
            if isinstance(case, AttentionCase):
                save_case(case, options.save / f"{case.name}.json")
        return 0
    if not cases:
        return judge_everything(console, subject, options.interpret)
    return judge_cases(console, subject, cases, options.interpret, power=options.power)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verify", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    judge = commands.add_parser("judge", help="judge a kernel on case files or named cases")
    judge.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="a case file, or the name of an open or adversarial case; none: self-test and every open case",
    )
    judge.add_argument(
        "--subject", default=FLYWHEEL, metavar="NAME", help=f"{', '.join(names())}, or package.module:object"
    )
    judge.add_argument("--interpret", choices=sorted(INTERPRET), default="fast")
    judge.add_argument("--power", action="store_true", help="also ask whether trivial answers would pass")
    judge.add_argument("--save", type=Path, metavar="DIR", help="write named cases as case files, and judge nothing")
    trace = commands.add_parser("trace", help="judge flywheel.attention on your own tensors (verify/traces/README.md)")
    trace.add_argument("files", nargs="+", type=Path, metavar="FILE", help="an .npz or .safetensors file")
    trace.add_argument("--interpret", choices=sorted(INTERPRET), default="fast")
    commands.add_parser("subjects", help="the kernels that can be judged by name, and what each declares")
    found = commands.add_parser("findings", help="judge others' kernels on every open case and keep what they fail")
    found.add_argument("--subject", action="append", metavar="NAME", help="only these; default: every other kernel")
    found.add_argument("--case", action="append", metavar="NAME", help="only these open cases; default: all")
    found.add_argument("--recorded", action="store_true", help="judge nothing: write the table from the records")
    found.add_argument("--out", type=Path, metavar="FILE", help="write the table as Markdown")
    found.add_argument("--records", type=Path, default=findings.FINDINGS, metavar="FILE", help="where the records are")
    return parser


def find_case(name: str) -> AttentionCase | OpenCase:
    """A case by its file or its name.

    Raises:
        CaseError: neither exists, or the file is no case.
    """
    if name.endswith(".json") or Path(name).exists():
        return load_case(Path(name))
    if name in OPEN_CASES:
        return OPEN_CASES[name]
    named = adversarial.by_name()
    if name not in named:
        message = (
            f"{name}: no such file, and no case of that name (a few are {', '.join([*OPEN_CASES][:2] + [*named][:2])})"
        )
        raise CaseError(message)
    return named[name]


def _open_case(name: str) -> OpenCase:
    if name not in OPEN_CASES:
        message = f"{name}: no open case of that name (a few are {', '.join([*OPEN_CASES][:3])})"
        raise CaseError(message)
    return OPEN_CASES[name]


def judge_cases(
    console: Console, subject: Subject, cases: Sequence[AttentionCase | OpenCase], interpret: str, *, power: bool
) -> int:
    """Judge cases and print each verdict."""
    health.check_oracles()
    passed = True
    for case in cases:
        if not isinstance(case, OpenCase):
            judged = judge_subject(subject, case.build(), config=case.config, interpret=interpret, power=power)
        else:
            judged = judge_open_case(subject, case, interpret=interpret, power=power)
            console.print(f"{case.words} -> {case.answer}", markup=False, highlight=False)
        passed &= show(console, case.name, judged)
    return 0 if passed else EXIT_FAILED


def judge_everything(console: Console, subject: Subject, interpret: str) -> int:
    """The self-test of a subject's adapter, then every open case; unsupported cases are named, not counted."""
    health.check_oracles()
    reason = subject.missing()
    if reason is not None:
        print(f"error: {subject.name}: {reason}", file=sys.stderr)
        return EXIT_UNUSABLE
    try:
        self_test(subject)
    except AdapterError as error:
        console.print(f"self-test: [bold]fail[/bold]\n  {error}", highlight=False)
        return EXIT_FAILED
    verdicts: list[Verdict] = []
    for case in OPEN_CASES.values():
        judged = judge_open_case(subject, case, interpret=interpret)
        verdicts.append(judged.judgement.verdict)
        if judged.judgement.verdict in (Verdict.PASS, Verdict.SKIPPED, Verdict.OUTSIDE_DOMAIN):
            console.print(
                f"{case.name}: {judged.judgement.verdict}: {judged.judgement.reason}", markup=False, highlight=False
            )
        else:
            console.print(f"{case.words} -> {case.answer}", markup=False, highlight=False)
            show(console, case.name, judged)
    counts = {verdict.value: verdicts.count(verdict) for verdict in Verdict if verdict in verdicts}
    console.print(", ".join(f"{count} {name}" for name, count in counts.items()), highlight=False)
    harmless = (Verdict.PASS, Verdict.SKIPPED, Verdict.OUTSIDE_DOMAIN)
    return 0 if Verdict.PASS in verdicts and all(v in harmless for v in verdicts) else EXIT_FAILED


def judge_traces(console: Console, files: Sequence[Path], interpret: str) -> int:
    """Judge every layer of the given files."""
    health.check_oracles()
    subject = load(FLYWHEEL)
    passed = True
    for path in files:
        for name, problem in load_trace(path).problems():
            passed &= show(console, f"{path}: {name}", judge_subject(subject, problem, interpret=interpret))
    return 0 if passed else EXIT_FAILED


def show(console: Console, name: str, judged: JudgedSubject) -> bool:
    """Print one verdict with its grounds; whether it is a pass."""
    judgement, result = judged.judgement, judged.result
    console.print(f"{name}: [bold]{judgement.verdict}[/bold]", highlight=False)
    console.print(f"  {judgement.reason}", markup=False, highlight=False)
    for note in judgement.notes:
        console.print(f"  {note}", markup=False, highlight=False)
    for part, measures in judgement.measures.items():
        if measures.share is not None:
            text = f"  {part}: worst share of the bound {measures.share.value:.4g} at {part}{measures.share}"
            console.print(text, markup=False, highlight=False)
        if measures.growth is not None and measures.growth.certain:
            console.print(f"  {part}: grows over tokens: {measures.growth}", markup=False, highlight=False)
    if result is not None and result.replays is not None:
        print(f"  replayed {int(result.replays.sum())} of {result.replays.size} query blocks")
    return judgement.verdict is Verdict.PASS


def show_subjects(console: Console) -> int:
    """Every subject known by name."""
    for name in names():
        subject = load(name)
        console.print(f"[bold]{name}[/bold] {subject.missing() or subject.version}", highlight=False)
        for text in (
            f"operation: {subject.operation}; domain: {subject.domain.words}",
            f"contract: {subject.contract or 'none stated'}",
            *subject.notes,
        ):
            console.print(f"  {text}", markup=False, highlight=False)
    return 0


def collect_findings(
    console: Console, selected: Sequence[str], cases: Sequence[OpenCase] | None, out: Path | None, records: Path
) -> int:
    """Judge, record, and write the table."""
    if selected:
        health.check_oracles()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(selected) * len(OPEN_CASES if cases is None else cases))

        def report(name: str, case: OpenCase) -> None:
            progress.update(task, advance=1, description=f"{name} {case.name}")

        found, left = findings.renew(selected, records, cases=cases, progress=report)
    for name, reason in left.items():
        console.print(f"{name}: skipped, its records stay as they are: {reason}", markup=False, highlight=False)
    console.print(f"{len(found)} findings in {records.name}", highlight=False)
    if out is not None:
        out.write_text(findings.table(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
