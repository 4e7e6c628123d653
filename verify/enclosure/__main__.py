"""How wide the enclosures are: `python -m verify.enclosure --out docs/enclosure-tables.md`.

Radii against the worst error that was found in random conforming executions, and against the contract's bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import Progress

from verify.attention import oracle_float64 as attention_oracle
from verify.attention.cases import AttentionCase
from verify.attention.contract import contract_bound as attention_bound
from verify.devices import MODELS, V6E
from verify.enclosure import executions
from verify.enclosure.attention import SOFTMAXES, attention
from verify.enclosure.gdn import gdn
from verify.gdn import oracle_float64 as gdn_oracle
from verify.gdn.cases import KEYS, GdnCase
from verify.gdn.contract import contract_bound as gdn_bound
from verify.gdn.steps import BF16_STEPS, SPLIT_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from verify.devices import DeviceModel

EXPONENTS = {"ordinary": (0, 0, 0), "scores of 10": (2, 2, 0), "scores of 100": (4, 3, 0), "tiny scores": (-8, -8, 0)}
MODES = {"bf16": BF16_STEPS, "bf16x3": SPLIT_STEPS}


@dataclasses.dataclass(frozen=True)
class Width:
    """One array of one family.

    Attributes:
        family, what: names.
        found: the worst error of the executions, relative to the array's largest element; so are the others.
        contract: the largest bound.
        wide, tight: the largest radius of both enclosures.
        outside: numbers of executions that lie outside an enclosure (none may).
    """

    family: str
    what: str
    found: float
    contract: float
    wide: float
    tight: float
    outside: int

    @property
    def row(self) -> str:
        """In Markdown."""
        numbers = (self.found, self.contract, self.wide, self.tight)
        ratio = self.wide / self.found if self.found > 0.0 else float("inf")
        text = " | ".join(f"{x:.1e}" for x in numbers)
        return f"| {self.family} | {self.what} | {text} | {ratio:.3g} | {self.outside} |"


def attention_widths(device: DeviceModel, draws: int) -> Iterator[Width]:
    """Per family of scores and softmax."""
    for family, exponents in EXPONENTS.items():
        problem = AttentionCase(family, (1, 1, 1, 8, 48, 32), seed=1, causal=True, exponents=exponents).build()
        exact, bound = attention_oracle.attention(problem), attention_bound(problem, device).out
        for softmax in SOFTMAXES:
            balls = [attention(problem, device, softmax=softmax, tight=tight).out for tight in (False, True)]
            results = [
                executions.attention(problem, executions.drawn(device, seed), softmax=softmax)[0]
                for seed in range(draws)
            ]
            outside = sum(int((~ball.contains(out)).sum()) for ball in balls for out in results)
            size = np.abs(exact.out).max()
            found = max(float(np.abs(out - exact.out).max()) for out in results)
            wide, tight = (float(ball.rad.max() / size) for ball in balls)
            yield Width(family, softmax, found / size, float(bound.max() / size), wide, tight, outside)


def gdn_widths(device: DeviceModel, draws: int) -> Iterator[Width]:
    """Per family of keys, mode, and array: one chunk of 64 tokens."""
    for keys in KEYS:
        problem = GdnCase(keys, "up to 1", "mild", seed=1, lengths=(64,), heads=(1, 1, 16, 8)).layer()
        exact = gdn_oracle.gdn_chunked(problem)
        for mode, steps in MODES.items():
            bound = gdn_bound(problem, steps, device)
            wide, tight = (gdn(problem, steps, device, tight=each) for each in (False, True))
            results = [executions.gdn(problem, steps, executions.drawn(device, seed)) for seed in range(draws)]
            for at, name in enumerate(("out", "state")):
                want, balls = getattr(exact, name), [getattr(x, name) for x in (wide, tight)]
                size = np.abs(want).max()
                found = max(float(np.abs(result[at] - want).max()) for result in results)
                outside = sum(int((~ball.contains(result[at])).sum()) for ball in balls for result in results)
                radii = [float(ball.rad.max() / size) for ball in balls]
                largest = float(getattr(bound, name).max() / size)
                yield Width(keys, f"{mode}, {name}", found / size, largest, radii[0], radii[1], outside)


HEADING = "found | contract | radius | known roundings | radius / found | outside |"


def render(device: DeviceModel, draws: int, progress: Callable[[str], None] = lambda _: None) -> str:
    """The page."""
    lines = [
        "# How wide the enclosures are",
        "",
        f"Made by `python -m verify.enclosure --device {device.name} --draws {draws} --out docs/enclosure-tables.md`.",
        "",
        f"*Found* is the worst error (searched) of {draws} random conforming executions of {device.name}, *contract*",
        "the largest bound, *radius* the largest radius of the enclosure that holds the exact answer too, *known",
        "roundings* of the one that rounds balls to BF16 as devices do; all relative to the largest exact element.",
        "*Outside* counts numbers of executions outside one of the two.",
    ]
    for title, rows in (
        ("Attention, output of 8 queries against up to 48 keys, head_dim 32", attention_widths(device, draws)),
        ("Gated DeltaNet, one chunk of 64 tokens, 16 x 8 state, beta up to 1, mild decay", gdn_widths(device, draws)),
    ):
        lines += [
            "",
            f"{title}:",
            "",
            f"| family | what | {HEADING}",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for width in rows:
            progress(f"{width.family}, {width.what}")
            lines.append(width.row)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or write them; 1 if an execution lies outside."""
    parser = argparse.ArgumentParser(prog="python -m verify.enclosure", description=__doc__)
    parser.add_argument("--device", choices=sorted(MODELS), default=V6E.name)
    parser.add_argument("--draws", type=int, default=12, metavar="N", help="executions per row")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write them there")
    given = parser.parse_args(arguments)
    if given.draws < 1:
        parser.error(f"--draws must be at least 1, got {given.draws}")
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        text = render(MODELS[given.device], given.draws, lambda words: progress.update(task, description=words))
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text, encoding="utf-8")
        print(given.out)
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    return 1 if any(row[-2].strip() not in ("0", "---", "outside") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
