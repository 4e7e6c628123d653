"""How layer calls are varied and made simpler; local search means other draws of the same structure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fuzz.gdn.layer_case import GATES, LayerCase
from verify.gdn.cases import BETAS, DECAYS, KEYS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.random import Generator

    from fuzz.case import Case
    from fuzz.outcome import Outcome


_STATIC = ("width", "biased", "norm", "activation", "doubled")
"""Fields that select a compiled kernel: made simpler last."""

_LEFT_ALONE = ("name", "provenance", "lengths", "initial", "reads", "writes", "slots", "heads")
"""Fields without a simpler value of their own."""

_FROM_OTHER = 0.5
"""How often a field comes from the other parent."""

_RESCALED = 0.3
"""How often a step changes the scale of a projection rather than the seed."""


def _inputs(case: Case) -> LayerCase:
    assert isinstance(case.inputs, LayerCase)  # noqa: S101  the hunts of this operation make no others
    return case.inputs


class LayerMoves:
    """`fuzz.hunts.Moves`."""

    def vary(self, case: Case, other: Case, rng: Generator) -> Case:
        """One family, gate or size, from another case or anew; or tokens moved from one sequence to another."""
        inputs, theirs = _inputs(case), _inputs(other)
        tables = {"keys": KEYS, "beta": BETAS, "decay": DECAYS, "gates": GATES}
        packed = ["lengths"] if len(inputs.lengths) > 1 else []
        field = str(rng.choice([*tables, "size", "seed", *packed]))
        if field == "lengths":
            lengths = [*inputs.lengths]
            source, target = (int(n) for n in rng.permutation(len(lengths))[:2])
            moved = int(rng.integers(lengths[source] + 1))
            lengths[source], lengths[target] = lengths[source] - moved, lengths[target] + moved
            return _named(case, dataclasses.replace(inputs, lengths=tuple(lengths), provenance=""))
        if field in tables:
            value = getattr(theirs, field) if rng.random() < _FROM_OTHER else str(rng.choice(list(tables[field])))
        else:
            value = int(rng.integers(-8, 9)) if field == "size" else int(rng.integers(2**16))
        return _named(case, dataclasses.replace(inputs, **{field: value}, provenance=""))  # type: ignore[arg-type]

    def climb(self, case: Case, outcome: Outcome, rng: Generator, ways: Sequence[str]) -> Case:
        """Another draw, or the scale of the projection one power of two away."""
        del outcome, ways
        inputs = _inputs(case)
        if rng.random() < _RESCALED:
            return _named(case, dataclasses.replace(inputs, size=inputs.size + int(rng.choice([-1, 1])), provenance=""))
        return _named(case, dataclasses.replace(inputs, seed=int(rng.integers(2**16)), provenance=""))

    def forget(self) -> None:
        """See `fuzz.hunts.Moves`: nothing is kept."""

    def simpler(self, case: Case) -> Iterator[Case]:
        """The default of one field after the other, fewer tokens, then what needs another compilation."""
        inputs = _inputs(case)
        plain = [field for field in dataclasses.fields(LayerCase) if field.name not in _LEFT_ALONE]
        changed = [field for field in plain if getattr(inputs, field.name) != field.default]
        for field in changed:
            if field.name not in _STATIC:
                yield _named(case, dataclasses.replace(inputs, **{field.name: field.default}))  # type: ignore[arg-type]
        for n, length in enumerate(inputs.lengths):
            for less in sorted({0, length // 2, length - 1} - {length, -1}):
                lengths = (*inputs.lengths[:n], less, *inputs.lengths[n + 1 :])
                yield _named(case, dataclasses.replace(inputs, lengths=lengths))
        for field in changed:
            if field.name in _STATIC:
                yield _named(case, dataclasses.replace(inputs, **{field.name: field.default}))  # type: ignore[arg-type]


MOVES = LayerMoves()


def _named(case: Case, inputs: LayerCase) -> Case:
    return case.with_inputs(dataclasses.replace(inputs, name=words(inputs)))


def words(inputs: LayerCase) -> str:
    """What is special about a call."""
    parts = [f"keys {inputs.keys}", f"beta {inputs.beta}", f"decay {inputs.decay}", f"lengths {list(inputs.lengths)}"]
    if inputs.gates != "ordinary":
        parts.append(inputs.gates)
    if inputs.size:
        parts.append(f"projection 2^{inputs.size}")
    plain = LayerCase("")
    if any(getattr(inputs, name) != getattr(plain, name) for name in _STATIC):
        bias = ", a bias" if inputs.biased else ""
        parts.append(f"{inputs.width} taps{bias}, activation {inputs.activation}, norm {inputs.norm}")
    if inputs.doubled:
        parts.append("write strengths twice a sigmoid")
    if not all(inputs.initial):
        parts.append("some initial states do not count")
    if inputs.reads != inputs.writes:
        parts.append(f"reads {list(inputs.reads)} writes {list(inputs.writes)}")
    if inputs.spoilt >= 0:
        parts.append(f"sequence {inputs.spoilt} is NaN by its {inputs.spoilt_by}")
    if inputs.poison:
        parts.append("poison where nothing is read")
    return "; ".join(parts)
