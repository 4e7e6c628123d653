"""Reports as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from rich.console import RenderableType

    from verify.compiled.calibration import Calibrated, Fit
    from verify.compiled.report import KernelReport, Report
    from verify.compiled.work import Work

SHOWN_STALLS = 4
UNITS = ("mxu", "valu", "eup", "xlu", "load", "store")


def render(report: Report) -> Iterator[RenderableType]:
    """A report, piece by piece."""
    found = report.versions
    yield (
        f"[bold]{report.target}[/bold] on {report.generation} - modelled from the compiler's schedule, not measured "
        f"(jax {found['jax']}, libtpu {found['libtpu']})"
    )
    share = "" if report.share_of_peak is None else f", {report.share_of_peak:.1%} of the BF16 peak"
    code = _bytes(report.code_bytes)
    yield f"program: {_time(report.seconds)}{share}, code {code}, compiled in {report.compile_seconds:.1f} s"
    for figure, reason in report.reasons.items():
        yield f"  {figure} is unknown: {reason}"
    for kernel in report.kernels:
        yield from _kernel(kernel)
    if report.around:
        yield _around(report)


def render_comparison(records: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    """A table for each generation and head_dim, and the messages of those without a time."""
    places = sorted({(one["generation"], -one["problem"]["head_dim"]) for one in records})
    for name, negative in places:
        chosen = [one for one in records if (one["generation"], -one["problem"]["head_dim"]) == (name, negative)]
        heads = {(one["problem"]["heads"], one["problem"]["kv_heads"]) for one in chosen}
        what = ", ".join(f"{query} query and {key} key heads" for query, key in sorted(heads))
        title = f"{name}, head_dim {-negative}, {what}, causal, BF16: modelled us (share of peak), time over ours"
        table = Table(title=title, title_justify="left")
        tokens = sorted({one["problem"]["tokens"] for one in chosen})
        table.add_column("kernel")
        for each in tokens:
            table.add_column(f"{each}", justify="right", no_wrap=True)
        rows: dict[str, dict[int, dict[str, Any]]] = {}
        for one in chosen:
            label = f"{one['subject']} ({'best of its blocks' if one['candidate'] else one['configuration']})"
            rows.setdefault(label, {})[one["problem"]["tokens"]] = one
        ours = next((row for label, row in rows.items() if label.startswith("flywheel (")), {})
        for label, row in rows.items():
            table.add_row(label, *(_cell(row.get(each), ours.get(each)) for each in tokens))
        yield table
    for one in records:
        if one["error"]:
            problem = f"{one['problem']['tokens']} x {one['problem']['head_dim']} on {one['generation']}"
            yield Text(f"no time for {one['subject']} ({one['configuration']}), {problem}: {one['error']}")


def _cell(one: dict[str, Any] | None, ours: dict[str, Any] | None) -> str:
    if one is None or one["seconds"] is None:
        return "none"
    ratio = ""
    if ours and ours is not one and ours["seconds"]:
        ratio = f" {one['seconds'] / ours['seconds']:.2f}x"
    return f"{one['seconds'] * 1e6:,.0f} ({one['share_of_peak']:.0%}){ratio}"


def render_checks(rows: Sequence[tuple[tuple[str, str], Report | None, list[str]]]) -> Iterator[RenderableType]:
    """A row for each case and generation with its main figures, then the findings."""
    table = Table(title="public configurations, modelled", title_justify="left")
    for column in ("case", "TPU", "time", "of peak", "issued", "waiting", "transposed", "spills", "VMEM", "findings"):
        table.add_column(column, justify="left" if column in {"case", "TPU"} else "right", no_wrap=True)
    for (case, name), report, found in rows:
        if report is None or len(report.kernels) != 1:
            table.add_row(case, name, *[""] * 7, str(len(found)))
            continue
        (kernel,) = report.kernels
        work = kernel.executed
        table.add_row(
            case,
            name,
            _time(report.seconds),
            "" if report.share_of_peak is None else f"{report.share_of_peak:.1%}",
            _number(kernel.issue_cycles),
            _number(kernel.stall_cycles),
            _number(work.transposed_pushes if work else None),
            _number(work.spills if work else None),
            _bytes(kernel.vmem_bytes),
            str(len(found)),
        )
    yield table
    for (case, name), _, found in rows:
        for finding in found:
            yield Text(f"{case} on {name}: {finding}")


def render_calibration(found: Sequence[Calibrated], line: Fit | None) -> Iterator[RenderableType]:
    """A row for each published call, and what they say together."""
    table = Table(title="published against modelled time", title_justify="left")
    for column in ("TPU", "call", "published us", "modelled us", "of it the kernel us", "published / modelled"):
        table.add_column(column, justify="left" if column in {"TPU", "call"} else "right")
    for each in sorted(found, key=lambda each: (each.timing.generation, each.timing.query[1], each.timing.name)):
        table.add_row(
            each.timing.generation,
            each.timing.name,
            f"{each.timing.seconds * 1e6:,.0f}",
            _number(None if each.seconds is None else each.seconds * 1e6),
            _number(None if each.kernel_seconds is None else each.kernel_seconds * 1e6),
            each.reason or f"{each.ratio:.3f}",
        )
    yield table
    if line is None:
        yield "too few calls have a modelled time for a line"
        return
    spread = f"from {line.lowest:.2f} to {line.highest:.2f}, median {line.median:.2f}"
    fitted = f"{line.slope:.3f} x modelled + {line.overhead_seconds * 1e6:.0f} us"
    yield f"{line.count} calls: published / modelled {spread}"
    yield f"published = {fitted}, off by at most {line.residual:.0%}"


def _kernel(kernel: KernelReport) -> Iterator[RenderableType]:
    yield f"\n[bold]kernel {kernel.name}[/bold]: {kernel.bundles} bundles, VMEM {_bytes(kernel.vmem_bytes)}"
    yield (
        f"  one call: {_time(kernel.seconds)} = {_number(kernel.issue_cycles)} cycles issued "
        f"+ {_number(kernel.stall_cycles)} waiting for DMA"
    )
    longest = [f"{cycles:,.0f} at {pc:#x}" for pc, cycles in kernel.stalls.items() if cycles >= 1][:SHOWN_STALLS]
    if longest:
        yield f"  longest waits: {', '.join(longest)}"
    work = kernel.executed or kernel.static
    yield f"  {'executed' if kernel.executed else 'static, each bundle once'}:"
    yield from _work(work)
    moved = ", ".join(f"{kind} {_bytes(size)} in {kernel.dma_copies[kind]}" for kind, size in kernel.dma_bytes.items())
    piece = f" (smallest piece {_bytes(kernel.smallest_piece_bytes)})" if kernel.smallest_piece_bytes else ""
    yield f"    DMA: {moved or 'none'}{piece}"
    for product in kernel.written:
        precision = "" if product.precision == "None" else f" at {product.precision}"
        yield f"    written: {product.count} products {product.lhs} x {product.rhs}{precision}"
    if kernel.fp32_passes is not None:
        yield f"    FP32 products take {kernel.fp32_passes:g} passes"
    for figure, reason in kernel.reasons.items():
        yield f"  {figure} is unknown: {reason}"
    for note in kernel.notes:
        yield f"  note: {note}"
    yield _blocks(kernel)


def _work(work: Work) -> Iterator[str]:
    transposed = f", {work.transposed_pushes} transposed" if work.transposed_pushes else ""
    yield f"    products: {_counts(work.products)}; pushes: {_counts(work.pushes)}{transposed}"
    yield f"    transcendentals: {_counts(work.transcendentals)}; transposes: {work.transposes}"
    yield f"    spills {_number(work.spills)}, fills {_number(work.fills)}"
    if work.occupancy is not None:
        yield "    busy: " + ", ".join(f"{unit} {share:.0%}" for unit, share in work.occupancy.items())


def _blocks(kernel: KernelReport) -> Table:
    table = Table(title="blocks by cycles", title_justify="left")
    for column in (
        "bundles",
        "visits",
        "share",
        "cycles",
        "products",
        "pushes",
        "transposed",
        "spills",
        "fills",
        *UNITS,
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for block in kernel.hot:
        work = block.work
        busy = work.occupancy or {}
        table.add_row(
            f"{block.first:#x}..{block.last:#x}",
            str(block.visits),
            f"{block.share:.1%}",
            str(work.cycles),
            _counts(work.products),
            _counts(work.pushes),
            str(work.transposed_pushes),
            _number(work.spills),
            _number(work.fills),
            *(f"{busy[unit]:.0%}" if unit in busy else "" for unit in UNITS),
        )
    return table


def _around(report: Report) -> Table:
    table = Table(title="operations that XLA put around the kernels", title_justify="left")
    for column in ("operation", "kind", "role", "result", "bytes", "time", "from"):
        table.add_column(column)
    for each in report.around:
        time = _time(each.seconds) if each.reason is None else each.reason
        table.add_row(each.name, each.opcode, each.role, each.result, _bytes(each.bytes), time, each.op_name)
    return table


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e6:,.1f} us"


def _bytes(size: int | None) -> str:
    if size is None:
        return "unknown"
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} B"
