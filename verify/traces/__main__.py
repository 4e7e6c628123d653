"""Command line: `python -m verify.traces capture` and `python -m verify.traces show FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from verify.traces.describe import figures
from verify.traces.keep import Selection, check_out
from verify.traces.load import committed_trace, load_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.traces.load import Trace

NEEDS = "capture needs the dependency group `traces` (uv sync --group traces)"


def indices(text: str) -> tuple[int, ...]:
    """Comma-separated indices."""
    return tuple(int(item) for item in text.split(","))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m verify.traces", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    capture = commands.add_parser("capture", help="run SmolLM2-135M over a text and save q, k, v of a few layers")
    capture.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: the committed one)")
    capture.add_argument("--out", type=Path, metavar="FILE", default=committed_trace(), help=".npz file to write")
    capture.add_argument(
        "--layers", type=indices, metavar="I,J,...", help="layers to keep, from 0 (default: 0,7,18,29)"
    )
    capture.add_argument("--kv-heads", type=indices, metavar="I,J,...", help="KV heads to keep, from 0 (default: 1,2)")
    capture.add_argument("--tokens", type=int, metavar="N", help="tokens of the text to use (default: 384)")
    show = commands.add_parser("show", help="print what a trace holds")
    show.add_argument("file", type=Path, nargs="+", metavar="FILE", help="a .npz or .safetensors trace")
    return top


def run_capture(options: argparse.Namespace, console: Console) -> None:
    """Capture and write a trace."""
    # Imported here, because gguf and tokenizers are needed by this command alone.
    from verify.traces.capture import TEXT, capture  # noqa: PLC0415

    chosen = {name: getattr(options, name) for name in ("layers", "kv_heads", "tokens")}
    selection = Selection(**{name: value for name, value in chosen.items() if value is not None})
    check_out(options.out)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("layers", total=None)
        result = capture(
            options.text or TEXT,
            selection,
            on_layer=lambda done, of: bar.update(task, completed=done, total=of),
        )
    result.write(options.out)
    console.print(f"mean next-token loss {result.loss:.3f} nats over {selection.tokens} tokens; wrote {options.out}")


def share(value: float | None) -> str:
    """A share as a percentage."""
    return "-" if value is None else f"{value:.1%}"


def table(trace: Trace) -> Table:
    """The figures of every layer."""
    result = Table(title=trace.name)
    heads = ("layer", "q", "k, v", "causal", "scale", "max |z|, nats", "spread, nats", "sink, mean", "sink, top head")
    for head in (*heads, "max |v|"):
        result.add_column(head)
    for layer in trace.layers:
        found = figures(layer.problem())
        result.add_row(
            layer.name or "-",
            " x ".join(map(str, layer.q.shape)),
            " x ".join(map(str, layer.k.shape)),
            "yes" if layer.causal else "no",
            f"{layer.scale:.6g}",
            f"{found.largest_logit:.2f}",
            f"{found.largest_spread:.2f}",
            share(found.sink_mean),
            share(found.sink_strongest),
            f"{found.largest_v:.4g}",
        )
    return result


def run_show(options: argparse.Namespace, console: Console) -> None:
    """Print what each trace holds."""
    for file in options.file:
        trace = load_trace(file)
        console.print(table(trace))
        console.print("sink: share of attention on key 0, over the rows that see at least two keys")
        console.print_json(json.dumps(trace.provenance))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it did what was asked, 2 with a message on stderr if it could not.

    What the commands refuse is a ValueError (TraceError, CaptureError) or a RuntimeError (ModelError).
    """
    options = parser().parse_args(arguments)
    run = {"capture": run_capture, "show": run_show}[options.command]
    try:
        run(options, Console())
    except ModuleNotFoundError as error:
        if error.name not in {"gguf", "tokenizers"}:
            raise
        print(f"{error}: {NEEDS}", file=sys.stderr)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
    else:
        return 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
