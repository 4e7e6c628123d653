"""Modelled speed: times beside other kernels' with the model's bias, and what each mode costs.

Everything is read from the committed figures of `verify.compiled`; nothing is compiled here.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import verify.compiled
from verify.compiled import cases as compiled_cases
from verify.compiled.compare import best, read_records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

OURS = "flywheel"
GENERATION = "v6e"


@dataclasses.dataclass(frozen=True)
class Time:
    """One kernel on one problem.

    Attributes:
        seconds: modelled; None with the reason why not.
        ratio: over ours; None if either is missing.
        share_of_peak: useful FLOP over the peak's.
    """

    seconds: float | None
    ratio: float | None
    share_of_peak: float | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Kernels on problems of one head_dim: `times[problem][kernel]`."""

    head_dim: int
    heads: str
    kernels: tuple[str, ...]
    tokens: tuple[int, ...]
    times: tuple[tuple[Time, ...], ...]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a mode or an option costs over the same call without it, per generation.

    Attributes:
        what: the option in words.
        case: name of the configuration.
        ratios: modelled cycles over the plain call's, by generation.
    """

    what: str
    case: str
    ratios: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Speed:
    """Everything that the section shows.

    Attributes:
        comparisons: one per head_dim.
        costs: options over the plain call.
        generations: in the order of columns.
        bias: measured over modelled time in the calibration: count, lowest, median, highest; empty if none is kept.
        source: where the measured times of the calibration come from.
        versions: of the compiler.
        absences: (what, why) has no figure.
    """

    comparisons: tuple[Comparison, ...]
    costs: tuple[Cost, ...]
    generations: tuple[str, ...]
    bias: Mapping[str, float]
    source: str
    versions: str
    absences: tuple[tuple[str, str], ...]


def load(directory: Path | None = None) -> Speed:
    """The committed figures; what is missing is named in `absences`."""
    from pathlib import Path  # noqa: PLC0415

    data = directory or Path(verify.compiled.__file__).with_name("data")
    absences: list[tuple[str, str]] = []
    rows = best(read_records(data / "comparison.jsonl"))
    rows = [row for row in rows if row["generation"] == GENERATION]
    if not rows:
        absences.append(("Modelled times beside other kernels", f"no {data.name}/comparison.jsonl in this checkout"))
    for row in rows:
        if row["seconds"] is None:
            where = f"{row['problem']['tokens']} tokens, head_dim {row['problem']['head_dim']}"
            absences.append((f"Modelled time of {_name(row)}, {where}", str(row["error"]).split(";", maxsplit=1)[0]))
    calibration = _json(data / "calibration.json")
    fit = calibration.get("fit") or {}
    if not fit:
        absences.append(("Bias of the modelled times", "no calibration in this checkout"))
    budgets = _json(data / "budgets.json").get("cases") or {}
    if not budgets:
        absences.append(("Cost of each mode", "no budgets in this checkout"))
    costs = _costs(budgets)
    generations = tuple(dict.fromkeys(name for cost in costs for name in cost.ratios))
    versions = sorted(
        {f"jax {row['versions']['jax']}, libtpu {row['versions']['libtpu']}" for row in rows if row.get("versions")}
    )
    return Speed(
        comparisons=tuple(_comparisons(rows)),
        costs=tuple(costs),
        generations=generations,
        bias={name: float(fit[name]) for name in ("count", "lowest", "median", "highest") if name in fit},
        source=str(calibration.get("source") or ""),
        versions="; ".join(versions),
        absences=tuple(absences),
    )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _name(row: Mapping[str, Any]) -> str:
    configuration = "best of its blocks" if row["candidate"] else row["configuration"]
    return f"{row['subject']}, {configuration}"


def _comparisons(rows: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    found = []
    for head_dim in sorted({row["problem"]["head_dim"] for row in rows}):
        here = [row for row in rows if row["problem"]["head_dim"] == head_dim]
        kernels = sorted({_name(row) for row in here}, key=lambda name: (not name.startswith(f"{OURS},"), name))
        tokens = sorted({row["problem"]["tokens"] for row in here})
        own = {row["problem"]["tokens"]: row["seconds"] for row in here if row["subject"] == OURS}
        by_place = {(row["problem"]["tokens"], _name(row)): row for row in here}
        times = tuple(tuple(_time(by_place.get((n, kernel)), own.get(n)) for kernel in kernels) for n in tokens)
        problem = here[0]["problem"]
        heads = f"{problem['heads']} query heads on {problem['kv_heads']} KV heads, causal, batch {problem['batch']}"
        found.append(Comparison(head_dim, heads, tuple(kernels), tuple(tokens), times))
    return found


def _time(row: Mapping[str, Any] | None, own: float | None) -> Time:
    if row is None or row["seconds"] is None:
        return Time(None, None, None, "not compared" if row is None else str(row["error"] or "no modelled time"))
    share = row.get("share_of_peak")
    return Time(row["seconds"], row["seconds"] / own if own else None, share, "")


def _costs(budgets: Mapping[str, Any]) -> list[Cost]:
    """Configurations that differ from a plain one of the same sizes in one option."""
    plain: dict[tuple[Any, ...], str] = {}
    for name, case in compiled_cases.CASES.items():
        if name in budgets and not (case.options or case.config or case.more or case.operands):
            plain[_sizes(case)] = name
    found = []
    for name, case in compiled_cases.CASES.items():
        base = plain.get(_sizes(case))
        if name not in budgets or base is None or base == name:
            continue
        ratios: dict[str, float] = {}
        for generation, figures in budgets[name].items():
            cycles, without = figures.get("cycles") or {}, (budgets[base].get(generation) or {}).get("cycles") or {}
            common = sorted(set(cycles) & set(without))
            if common:
                ratios[generation] = cycles[common[-1]] / without[common[-1]]
        found.append(Cost(_words(case), name, ratios))
    return found


def _sizes(case: compiled_cases.AttentionCase) -> tuple[Any, ...]:
    return (case.head_dim, case.v_dim, case.q_len, case.kv_len, case.causal, case.heads, case.kv_heads)


def _words(case: compiled_cases.AttentionCase) -> str:
    parts = [f"{name} = {value}" for name, value in (*case.more, *case.config)]
    parts += [name.removeprefix("return_").replace("_", " ") for name in case.options]
    parts += [
        {"half": "rotary, halves", "interleaved": "rotary, interleaved"}.get(name, name) for name in case.operands
    ]
    mask = "causal" if case.causal else "full"
    return f"{', '.join(parts)} (head_dim {case.head_dim}, {case.q_len} tokens, {mask})"
