"""`python -m verify.device`: measure this machine's arithmetic, and print what the models say and on what ground."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from verify.device.envelopes import FUNCTIONS
from verify.device.fit import STATE, Fit, Properties, fit, probe_properties, to_json
from verify.devices import MODELS, ULP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.devices import DeviceModel

EXIT_UNSOUND = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `measure` returns 0 if a model fits, 1 if the backend is unsound."""
    parser = argparse.ArgumentParser(prog="python -m verify.device", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure", help="measure this machine and say which device model describes it")
    measure.add_argument(
        "--exhaustive",
        nargs="*",
        choices=sorted(FUNCTIONS),
        metavar="FUNCTION",
        help=f"every normal FP32 argument of these functions; without a name: all ({', '.join(FUNCTIONS)})",
    )
    measure.add_argument(
        "--state", type=Path, default=STATE, metavar="FILE", help="finished blocks of --exhaustive; a new run goes on"
    )
    measure.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    show = commands.add_parser("show", help="what a model claims, and the source of each figure")
    show.add_argument("models", nargs="*", choices=sorted(MODELS), metavar="MODEL", help="default: all")
    options = parser.parse_args(arguments)
    console = Console()
    if options.command == "show":
        for name in options.models or MODELS:
            console.print(_claims(MODELS[name]))
        return 0
    exhaustive = tuple(FUNCTIONS) if options.exhaustive == [] else tuple(options.exhaustive or ())
    return measure_machine(console, exhaustive, options.state, options.json)


def measure_machine(console: Console, exhaustive: Sequence[str], state: Path, json_file: Path | None) -> int:
    """Measure, print, and say which model fits."""
    properties = probe_properties()
    console.print(_properties(properties))
    fits: list[Fit] = []
    with Progress(console=console, transient=True) as progress:
        for model in MODELS.values():
            task = progress.add_task(model.name, total=float(len(FUNCTIONS)))

            def report(name: str, done: float, task: int = task) -> None:
                completed = list(FUNCTIONS).index(name) + done
                progress.update(task, completed=completed, description=name)  # pyright: ignore[reportArgumentType]

            fits.append(fit(model, properties, exhaustive=exhaustive, state=state, progress=report))
    for found in fits:
        if found.envelopes:
            console.print(_envelopes(found))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(to_json(properties, fits), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for found in fits:
        for text in found.disagreements:
            console.print(f"not {found.model.name}: {text}", markup=False, highlight=False)
    fitting = [found.model.name for found in fits if found.fits]
    if not fitting:
        console.print("backend unsound: no device model describes this machine, and no kernel is judged on it")
        return EXIT_UNSOUND
    console.print(f"this machine is described by: {', '.join(fitting)}", highlight=False)
    return 0


def _properties(properties: Properties) -> Table:
    table = Table(title="measured properties", show_header=False)
    for name, value in (
        ("subnormal results become zero", properties.flushes),
        ("x * y + z rounds once", properties.fused_multiply_add),
        ("operands of an FP32 product at default precision", properties.default_dot),
        ("every BF16 operation is rounded", properties.rounds_bf16),
        ("FP32 addition rounds to nearest", properties.rounds_to_nearest),
        ("a copying Pallas kernel", properties.copies or "returns its input"),
    ):
        table.add_row(name, str(value))
    return table


def _envelopes(found: Fit) -> Table:
    table = Table(title=f"device model {found.model.name}: largest errors; FP32 in 2^-23 (sin, cos: 2^-24), BF16 ulp")
    for column in ("function", "arguments", "tried", "measured", "at", "claimed", "holds"):
        table.add_column(column, justify="left" if column in ("function", "arguments") else "right")
    for envelope in found.envelopes:
        tried = f"{envelope.count:,}" + (" (all)" if envelope.exhaustive else "")
        table.add_row(
            envelope.name,
            envelope.arguments,
            tried,
            f"{envelope.worst_ulp:.4g}",
            f"{envelope.at:.9g}",
            f"{envelope.claimed_ulp:.4g}",
            str(envelope.holds),
        )
    return table


def _claims(model: DeviceModel) -> Table:
    table = Table(title=f"device model {model.name}; relative errors in units of 2^-23")
    for column in ("figure", "value", "source"):
        table.add_column(column)
    for name, source in model.sources.items():
        value = getattr(model, name)
        shown = f"{value / ULP:g} * 2^-23" if name.endswith("_relative") else f"{value}"
        table.add_row(name, shown, source)
    return table


if __name__ == "__main__":
    sys.exit(main())
