"""`python -m verify`: judge case files, and measure the machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from verify import envelopes
from verify.attention import adversarial, health
from verify.attention.cases import AttentionCase, CaseError, load_case, save_case
from verify.attention.examine import INTERPRET, Examined, examine_problem
from verify.backend import device_model
from verify.traces.load import load_trace
from verify.traces.read import TraceError
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_UNUSABLE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one command; 0 if everything passed, 1 if not, 2 for unusable input."""
    parser = argparse.ArgumentParser(prog="python -m verify", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    judge = commands.add_parser("judge", help="judge flywheel.attention on case files or named cases")
    judge.add_argument("cases", nargs="+", metavar="CASE", help="a case file, or the name of an adversarial case")
    judge.add_argument("--interpret", choices=sorted(INTERPRET), default="fast")
    judge.add_argument("--power", action="store_true", help="also ask whether trivial answers would pass")
    judge.add_argument("--save", type=Path, metavar="DIR", help="write named cases as case files, and judge nothing")
    trace = commands.add_parser("trace", help="judge flywheel.attention on your own tensors (verify/traces/README.md)")
    trace.add_argument("files", nargs="+", type=Path, metavar="FILE", help="an .npz or .safetensors file")
    trace.add_argument("--interpret", choices=sorted(INTERPRET), default="fast")
    devices = commands.add_parser("devices", help="measure this backend's functions against its device model")
    devices.add_argument("--exhaustive", action="store_true", help="exp2 at every FP32 argument")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        if options.command == "devices":
            return measure_devices(console, exhaustive=options.exhaustive)
        if options.command == "trace":
            return judge_traces(console, options.files, options.interpret)
        cases = [find_case(name) for name in options.cases]
    except (CaseError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    if options.save is not None:
        for case in cases:
            save_case(case, options.save / f"{case.name}.json")
        return 0
    return judge_cases(console, cases, options.interpret, power=options.power)


def find_case(name: str) -> AttentionCase:
    """A case by its file or its name.

    Raises:
        CaseError: neither exists, or the file is no case.
    """
    if name.endswith(".json") or Path(name).exists():
        return load_case(Path(name))
    named = adversarial.by_name()
    if name not in named:
        message = f"{name}: no such file, and no adversarial case of that name (a few are {', '.join(list(named)[:4])})"
        raise CaseError(message)
    return named[name]


def judge_cases(console: Console, cases: Sequence[AttentionCase], interpret: str, *, power: bool) -> int:
    """Judge cases and print each verdict."""
    health.check_oracles()
    passed = True
    for case in cases:
        examined = examine_problem(case.build(), config=case.config, interpret=interpret, power=power)
        passed &= show(console, case.name, examined)
    return 0 if passed else EXIT_FAILED


def judge_traces(console: Console, files: Sequence[Path], interpret: str) -> int:
    """Judge every layer of the given files."""
    health.check_oracles()
    passed = True
    for path in files:
        for name, problem in load_trace(path).problems():
            passed &= show(console, f"{path}: {name}", examine_problem(problem, interpret=interpret))
    return 0 if passed else EXIT_FAILED


def show(console: Console, name: str, examined: Examined) -> bool:
    """Print one verdict with its grounds; whether it is a pass."""
    judgement, result = examined.judgement, examined.result
    console.print(f"{name}: [bold]{judgement.verdict}[/bold]", highlight=False)
    console.print(f"  {judgement.reason}", markup=False, highlight=False)
    for note in judgement.notes:
        console.print(f"  {note}", markup=False, highlight=False)
    for part, measures in judgement.measures.items():
        if measures.share is not None:
            text = f"  {part}: worst share of the bound {measures.share.value:.4g} at {part}{measures.share}"
            console.print(text, markup=False, highlight=False)
    if result.replays is not None:
        print(f"  replayed {int(result.replays.sum())} of {result.replays.size} query blocks")
    return judgement.verdict is Verdict.PASS


def measure_devices(console: Console, *, exhaustive: bool) -> int:
    """Measure every envelope and compare it with the model's claim."""
    model = device_model()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("exp2", total=1.0)
        found = [
            envelopes.measure_exp2(
                model, exhaustive=exhaustive, progress=lambda done: progress.update(task, completed=done)
            ),
            envelopes.measure_log(model),
            envelopes.measure_reciprocal(model),
        ]
    table = Table(title=f"device model {model.name}: largest relative errors, in units of 2^-23")
    for column in ("function", "arguments", "measured", "at", "claimed", "holds"):
        table.add_column(column, justify="left" if column == "function" else "right")
    for envelope in found:
        count = f"{envelope.arguments:,}" + (" (all)" if envelope.exhaustive else "")
        claimed = f"{envelope.claimed / envelopes.ULP:.3g}"
        row = (envelope.name, count, f"{envelope.worst_ulp:.4g}", f"{envelope.at:.9g}", claimed, str(envelope.holds))
        table.add_row(*row)
    console.print(table)
    return 0 if all(envelope.holds for envelope in found) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
