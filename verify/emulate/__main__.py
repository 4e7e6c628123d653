"""Which operation loses the digits of a function: `python -m verify.emulate silu`.

A name of those that are shown, or package.module:function with --inputs FILE.npz, whose arrays are the arguments in the
order of the file.  The function must be pure: tile maths, not a kernel.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from verify.devices import CPU_INTERPRET, MODELS
from verify.emulate.arithmetic import EmulationError
from verify.emulate.interpreter import trace
from verify.emulate.ranking import KINDS, LARGEST, RELATIVE, rank, save
from verify.emulate.shown import Shown, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.emulate.ranking import Ranking

EXIT_UNUSABLE = 2


class UnusableError(ValueError):
    """What the command line asks for does not exist."""


def chosen(name: str, inputs: Path | None) -> Shown:
    """The function of that name with its inputs.

    Raises:
        UnusableError: no such function, no inputs for it, or inputs for one that has its own.
    """
    known = shown()
    if name in known:
        if inputs is not None:
            message = f"--inputs: {name} has inputs of its own"
            raise UnusableError(message)
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        message = f"FUNCTION must be package.module:function or one of {', '.join(known)}; got {name!r}"
        raise UnusableError(message)
    if inputs is None:
        message = f"{name}: --inputs FILE.npz must give its arguments"
        raise UnusableError(message)
    try:
        function = getattr(importlib.import_module(module), attribute)
        with np.load(inputs) as arrays:
            arguments = tuple(arrays[key] for key in arrays.files)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        message = f"{name}: {error}"
        raise UnusableError(message) from error
    return Shown(name, f"{name} at the inputs of {inputs.name}", function, arguments, RELATIVE)


def table(ranking: Ranking, most: int) -> Table:
    """The worst equations."""
    found = Table(title=f"{ranking.function}: {ranking.words}", title_justify="left")
    for heading in ("", "alone", "without", "operation", "source", "line"):
        found.add_column(heading, overflow="fold", justify="right" if heading in ("alone", "without") else "left")
    for number, each in enumerate(ranking.equations[:most]):
        operation = f"{each.site.primitive} {each.site.dtype}{list(each.site.shape)}"
        numbers = f"{each.alone.error:.2e}", f"{each.without.error:.2e}"
        found.add_row(
            str(number + 1), *numbers, operation, " < ".join((each.site.source, *each.site.callers[:1])), each.site.text
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Rank, print, keep; 2 for unusable input."""
    parser = argparse.ArgumentParser(prog="python -m verify.emulate", description=__doc__)
    parser.add_argument("function", metavar="FUNCTION", help=f"{', '.join(shown())}, or package.module:function")
    parser.add_argument("--inputs", type=Path, metavar="FILE", help=".npz with the arguments")
    parser.add_argument("--arithmetic", choices=KINDS, default=KINDS[0], help="of the equation that is not exact")
    parser.add_argument("--device", choices=sorted(MODELS), default=CPU_INTERPRET.name)
    parser.add_argument("--measure", choices=(RELATIVE, LARGEST), help="of an error; default: the function's own")
    parser.add_argument("--most", type=int, default=12, metavar="N", help="equations to print")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all of them there (docs/emulation.md)")
    given = parser.parse_args(arguments)
    console = Console()
    try:
        what = chosen(given.function, given.inputs)
        program = trace(what.function, *what.arguments, name=what.name)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(what.name, total=None)
            found = rank(
                program,
                what.arguments,
                MODELS[given.device],
                kind=given.arithmetic,
                measure=given.measure or what.measure,
                words=what.words,
                progress=lambda done, of: progress.update(task, completed=done, total=of),
            )
    except (UnusableError, EmulationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    console.print(table(found, given.most))
    device = f", {found.device}" if found.device else ""
    console.print(
        f"error by the {found.measure} size, {found.arithmetic} arithmetic{device}; "
        f"all equations together {found.together.error:.2e}",
        highlight=False,
    )
    if given.json is not None:
        save(found, given.json)
        console.print(str(given.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
