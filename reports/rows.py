"""Records as the rows of a page.

Records come from anywhere (other machines, campaigns, a user's own kernels), so that a field may be missing or odd; a
row holds what there is.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from reports.item import ATTENTION, INVERSE, LAYER
from reports.numbers import plural, severity, worst
from reports.profile import read_heat
from verify.records import decode_number
from verify.verdict import AXES, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

JUDGED = (Verdict.PASS, Verdict.FAIL, Verdict.NO_POWER)


@dataclasses.dataclass(frozen=True)
class Element:
    """One element of a result, where some measure is largest.

    Attributes:
        array: "out" or "lse".
        share: of the bound; None if the array was not compared with one.
    """

    array: str
    index: tuple[int, ...]
    share: float | None
    got: float | None
    want: float | None
    got_bits: str
    want_bits: str

    @property
    def bound(self) -> float | None:
        """The certified bound there, as |got - want| / share; None if it cannot be had so."""
        if self.got is None or self.want is None or self.share is None:
            return None
        error = abs(self.got - self.want)
        return error / self.share if self.share > 0 and math.isfinite(self.share) and math.isfinite(error) else None

    @property
    def where(self) -> str:
        """The index in words, such as "batch 0, head 1, row 2, lane 3"."""
        axes = AXES.get((self.array, len(self.index)), ())
        if not axes:
            return f"[{', '.join(map(str, self.index))}]"
        return ", ".join(f"{axis} {i}" for axis, i in zip(axes, self.index, strict=True))


@dataclasses.dataclass(frozen=True)
class Bias:
    """The bias statistics of one array of one case."""

    lean: float | None
    lean_limit: float | None
    mean_square: float | None
    mean_square_limit: float | None
    alarm: bool


@dataclasses.dataclass(frozen=True)
class Growth:
    """How the errors of one array depend on the token.

    Attributes:
        ranges: (first token, last token, worst normalised error).
        normalised_by: its unit.
        slope: exponent of the position, with its standard error.
        certain: the errors grow, beyond chance.
    """

    ranges: tuple[tuple[int, int, float], ...]
    normalised_by: str
    slope: float | None
    standard_error: float | None
    certain: bool


@dataclasses.dataclass(frozen=True)
class Part:
    """Measures of one array of one case.

    Attributes:
        ulp_counts: (upper edge, elements) per power of two, infinity and NaN last; empty if the record has none.
        nth_row: (rank, its share), see `reports.profile`; None if the record has none.
    """

    array: str
    format: str
    count: int
    mismatches: int
    absolute: float | None
    relative: float | None
    ulp: float | None
    share: float | None
    worst: Element | None
    worst_ulp: Element | None
    bias: Bias | None
    growth: Growth | None = None
    ulp_counts: tuple[tuple[float, int], ...] = ()
    nth_row: tuple[int, float] | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One record."""

    subject: str
    case: str
    family: str
    verdict: str
    reason: str
    notes: tuple[str, ...]
    parts: tuple[Part, ...]
    shape: Mapping[str, Any]
    replays: int | None
    query_blocks: int | None
    replay_map: tuple[tuple[tuple[int, ...], ...], ...] | None
    seconds: float | None
    sha256: str
    reproduce: str
    spec: str | None
    environment: Mapping[str, Any]
    unfinished: bool
    code: str
    operation: str = ATTENTION
    version: str = ""
    heat: tuple[list[int], list[int], np.ndarray] | None = None
    drawn: Mapping[str, str] = dataclasses.field(default_factory=dict)
    input: str = ""
    expected: str = ""
    contract: str = ""

    def part(self, array: str) -> Part | None:
        """Measures of one array; None if it was not compared."""
        return next((part for part in self.parts if part.array == array), None)

    @property
    def compared(self) -> int:
        """Elements that were compared with a reference."""
        return sum(part.count for part in self.parts)

    @property
    def judged(self) -> bool:
        """Whether the verdict is one about errors, and rests on something."""
        return self.verdict in JUDGED and (self.compared > 0 or self.verdict == Verdict.FAIL)

    @property
    def share(self) -> float | None:
        """The worst share of the bound over all arrays."""
        return worst([part.share for part in self.parts])

    @property
    def alarms(self) -> tuple[str, ...]:
        """Arrays with a bias alarm."""
        return tuple(part.array for part in self.parts if part.bias is not None and part.bias.alarm)

    @property
    def lean(self) -> tuple[int, float]:
        """The largest lean among the arrays with an alarm, as its severity."""
        return severity(worst([part.bias.lean for part in self.parts if part.bias is not None and part.bias.alarm]))

    @property
    def length(self) -> int:
        """Keys of the longest row, or tokens of the longest sequence; 0 if the record does not say."""
        length = self.shape.get("longest", self.shape.get("kv_len"))
        return length if isinstance(length, int) and length > 0 else 0

    @property
    def series(self) -> tuple[str, int | str] | None:
        """What tells lines of a figure apart, and its value: head_dim, or the family of keys; None if neither."""
        head_dim = self.shape.get("head_dim")
        if isinstance(head_dim, int):
            return "head_dim", head_dim
        return ("keys", self.drawn["keys"]) if self.drawn.get("keys") else None

    @property
    def shape_words(self) -> str:
        """Batch, query and KV heads, queries, keys, head_dim and mask; of Gated DeltaNet tokens and heads."""
        if self.operation == LAYER:
            tokens, sequences, heads = (self.shape.get(name) for name in ("tokens", "sequences", "heads"))
            counts = [plural(n, noun) if isinstance(n, int) else f"? {noun}s" for n, noun in
                      ((tokens, "token"), (sequences, "sequence"))]  # fmt: skip
            of_heads = f"{heads[1]}/{heads[0]}" if isinstance(heads, (list, tuple)) and len(heads) > 1 else "?"
            return f"{', '.join(counts)}, heads {of_heads}"
        if self.operation == INVERSE:
            return f"{self.shape.get('chunk', '?')} × {self.shape.get('chunk', '?')}"  # noqa: RUF001
        s = {name: self.shape.get(name, "?") for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")}
        mask = {True: "causal", False: "full"}.get(self.shape.get("causal", ""), "mask unknown")
        words = f"{s['batch']} × {s['heads']}/{s['kv_heads']} × {s['q_len']} × {s['kv_len']} × {s['head_dim']}, {mask}"  # noqa: RUF001
        packed = self.shape.get("sequences")
        return f"{words}, {plural(packed, 'sequence')}" if isinstance(packed, int) else words

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts a table so that what needs attention stands first."""
        place = {Verdict.FAIL: 0, Verdict.BACKEND_UNSOUND: 1}.get(Verdict(self.verdict), 2)
        kind, size = severity(self.share)
        return (place, -kind, -size, self.family, self.case)


def row_of(record: Mapping[str, Any]) -> Row:
    """One record as a row."""
    verdict = str(record["verdict"])
    if verdict not in set(Verdict):
        message = f"verdict must be one of {', '.join(Verdict)}, got {verdict!r} (case {record['case']!r})"
        raise ValueError(message)
    spec = record.get("case_spec")
    profile = record.get("profile") or {}
    parts = tuple(
        _part(array, body, profile.get(array) or {}) for array, body in (record["measures"] or {}).items() if body
    )
    contract = record.get("contract") or {}
    verdict, reason = _consistent(verdict, str(record["reason"]), parts)
    return Row(
        subject=str(record["subject"]),
        case=str(record["case"]),
        family=str(record["family"]),
        verdict=verdict,
        reason=reason,
        notes=tuple(str(note) for note in record.get("notes") or ()),
        parts=parts,
        shape=record["shape"] or {},
        replays=_count(record.get("replays")),
        query_blocks=_count(record.get("query_blocks")),
        replay_map=_replay_map(record.get("replay_map")),
        seconds=decode_number(record.get("seconds")),
        sha256=str(record.get("sha256") or ""),
        reproduce=str(record["reproduce"]),
        spec=None if spec is None else json.dumps(spec, indent=1),
        environment=record["environment"] or {},
        unfinished=bool(record.get("unfinished")),
        code=str(record.get("code") or ""),
        operation=str(record.get("operation") or ATTENTION),
        version=str(record.get("subject_version") or ""),
        heat=read_heat(profile.get("heat")),
        drawn={str(key): str(value) for key, value in (record.get("drawn") or {}).items()},
        input=str(record.get("input") or ""),
        expected=str(record.get("expected") or ""),
        contract=": ".join(str(contract[key]) for key in ("inside", "words") if contract.get(key)),
    )


def _consistent(verdict: str, reason: str, parts: tuple[Part, ...]) -> tuple[str, str]:
    """A pass that its own measures contradict is a failure, whoever claims it."""
    if verdict in (Verdict.PASS, Verdict.NO_POWER):
        for part in parts:
            if part.mismatches or (part.share is not None and not part.share <= 1):
                wrong = f"{part.array} has {part.mismatches} class mismatches and a share of the bound of {part.share}"
                return Verdict.FAIL.value, f"the record says {verdict}, but {wrong} ({reason})"
    return verdict, reason


def _count(value: Any) -> int | None:  # noqa: ANN401  from JSON
    return None if value is None else int(value)


def _replay_map(value: Any) -> tuple[tuple[tuple[int, ...], ...], ...] | None:  # noqa: ANN401  from JSON
    return None if value is None else tuple(tuple(tuple(int(x) for x in head) for head in batch) for batch in value)


def _part(array: str, body: Mapping[str, Any], profile: Mapping[str, Any]) -> Part:
    nth = profile.get("nth_row") or {}
    nth_share = decode_number(nth.get("share"))
    value = {name: _value(body.get(name)) for name in ("absolute", "relative", "ulp", "share")}
    return Part(
        array=array,
        format=str(body.get("format") or ""),
        count=int(body.get("count") or 0),
        mismatches=int(body.get("mismatches") or 0),
        worst=_element(array, body.get("share") or body.get("absolute"), value["share"]),
        worst_ulp=_element(array, body.get("ulp"), None),
        bias=_bias(body.get("bias")),
        growth=_growth(body.get("growth")),
        ulp_counts=tuple((float(edge), int(count)) for edge, count in profile.get("ulp") or ()),
        nth_row=None if nth_share is None else (int(nth["rank"]), nth_share),
        **value,
    )


def _growth(body: Mapping[str, Any] | None) -> Growth | None:
    if not body:
        return None
    ranges = [(int(r["first"]), int(r["last"]), _value(r.get("worst"))) for r in body.get("ranges") or ()]
    return Growth(
        ranges=tuple((first, last, value) for first, last, value in ranges if value is not None),
        normalised_by=str(body.get("normalised_by") or ""),
        slope=decode_number(body.get("slope")),
        standard_error=decode_number(body.get("standard_error")),
        certain=bool(body.get("certain")),
    )


def _element(array: str, place: Mapping[str, Any] | None, share: float | None) -> Element | None:
    if not place:
        return None
    return Element(
        array=array,
        index=tuple(int(i) for i in place.get("index") or ()),
        share=share,
        got=decode_number(place.get("got")),
        want=decode_number(place.get("want")),
        got_bits=str(place.get("got_bits") or ""),
        want_bits=str(place.get("want_bits") or ""),
    )


def _value(body: Mapping[str, Any] | None) -> float | None:
    return None if body is None else decode_number(body.get("value"))


def _bias(body: Mapping[str, Any] | None) -> Bias | None:
    if not body:
        return None
    lean, limit, square, square_limit = (
        decode_number(body.get(name)) for name in ("lean", "lean_limit", "mean_square", "mean_square_limit")
    )
    alarm = body.get("alarm")
    if alarm is None:
        alarm = not (_below(lean, limit) and _below(square, square_limit))
    return Bias(lean, limit, square, square_limit, bool(alarm))


def _below(x: float | None, limit: float | None) -> bool:
    return x is not None and limit is not None and x < limit
