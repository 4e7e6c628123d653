"""How attention cases are varied, climbed and made simpler, beyond what Hypothesis does."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz.attention.buckets import LOG2_E
from verify.attention.cases import AttentionCase, Edit
from verify.attention.problem import BF16, widen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.random import Generator

    from fuzz.case import Case
    from fuzz.outcome import Outcome
    from verify.attention.problem import AttentionProblem

_MOST_EXPONENT = 126
"""Of a base value's standard deviation: base values are sums of four uniform ones and lie within 3.47 of it, which is
finite in BF16; beyond, a case would lie outside the domain."""

_STRUCTURE = 0.3
"""How often a case takes the exponents and seed of another rather than some of its edits."""

_LOW_BITS = 0.75
"""How often a flipped bit is one of the significand."""

MOST_EDITS = 200
"""A case that holds more is a list of words, which nobody reads."""

FLIPS = (1, 1, 2, 4, 16)
ALIGNED = (1, 4, 16, 64)
VARIED, CLIMBED = "varied", "climbed"


def _inputs(case: Case) -> AttentionCase:
    assert isinstance(case.inputs, AttentionCase)  # noqa: S101  the hunts of this operation make no others
    return case.inputs


def _changed(case: Case, how: str, **fields: Any) -> Case:  # noqa: ANN401  fields of AttentionCase
    inputs = _inputs(case)
    name = inputs.name.removesuffix(f"; {VARIED}").removesuffix(f"; {CLIMBED}")
    return case.with_inputs(dataclasses.replace(inputs, name=f"{name}; {how}", provenance="", **fields))


class AttentionMoves:
    """`fuzz.hunts.Moves`."""

    def vary(self, case: Case, other: Case, rng: Generator) -> Case:
        """One or two structural changes."""
        ways = (_new_seed, _new_base, _dropped, _shifted, _resized, _crossed, _new_seed)
        for _ in range(int(rng.integers(1, 3))):
            way: Callable[[Case, Case, Generator], Case] = ways[int(rng.integers(len(ways)))]
            case = way(case, other, rng)
        return case

    def climb(self, case: Case, outcome: Outcome, rng: Generator, ways: Sequence[str]) -> Case:
        """Flip bits of words that reach the worst element, or align values with the rounding of the weights."""
        place = outcome.places.get("out") or outcome.places.get("lse")
        if place is None or len(_inputs(case).edits) > MOST_EDITS:
            return _new_seed(case, case, rng)
        way = ways[int(rng.integers(len(ways)))]
        edits = _aligned(case, place, rng) if way == "gradient" and len(place) == 4 else _flipped(case, place, rng)
        kept = [edit for edit in _inputs(case).edits if edit not in edits]
        return _changed(case, CLIMBED, edits=(*kept, *edits))

    def forget(self) -> None:
        """See `fuzz.hunts.Moves`: nothing is kept."""

    def simpler(self, case: Case) -> Iterator[Case]:
        """Fewer edits, plainer bases, smaller numbers in what is asked."""
        inputs = _inputs(case)
        count = len(inputs.edits)
        size = count
        while size:
            for first in range(0, count, size):
                kept = inputs.edits[:first] + inputs.edits[first + size :]
                yield case.with_inputs(dataclasses.replace(inputs, edits=kept))
            size //= 2
        for n, exponent in enumerate(inputs.exponents):
            for plain in (None, 0) if n < 2 else (0,):
                if exponent != plain and (exponent is not None or plain is None):
                    exponents = (*inputs.exponents[:n], plain, *inputs.exponents[n + 1 :])
                    yield case.with_inputs(dataclasses.replace(inputs, exponents=exponents))  # type: ignore[arg-type]
        if inputs.seed:
            yield case.with_inputs(dataclasses.replace(inputs, seed=0))
        for n, (name, value) in enumerate(case.ask):
            if isinstance(value, int) and value > 1:
                for less in (0, 1, value // 2):
                    yield dataclasses.replace(case, ask=(*case.ask[:n], (name, less), *case.ask[n + 1 :]))


MOVES = AttentionMoves()


def _new_seed(case: Case, other: Case, rng: Generator) -> Case:
    del other
    return _changed(case, VARIED, seed=int(rng.integers(2**16)))


def _new_base(case: Case, other: Case, rng: Generator) -> Case:
    """Another standard deviation of q, k or v."""
    del other
    exponents = list(_inputs(case).exponents)
    n = int(rng.integers(3))
    moved = (0 if exponents[n] is None else exponents[n]) + int(rng.integers(-2, 3))  # type: ignore[operator]
    exponents[n] = min(moved, _MOST_EXPONENT)
    return _changed(case, VARIED, exponents=tuple(exponents))


def _dropped(case: Case, other: Case, rng: Generator) -> Case:
    del other
    edits = _inputs(case).edits
    if not edits:
        return _new_seed(case, case, rng)
    n = int(rng.integers(len(edits)))
    return _changed(case, VARIED, edits=edits[:n] + edits[n + 1 :])


def _edited(case: Case, rng: Generator, change: Callable[[Edit], Edit]) -> Case:
    edits = _inputs(case).edits
    if not edits:
        return _new_seed(case, case, rng)
    n = int(rng.integers(len(edits)))
    return _changed(case, VARIED, edits=(*edits[:n], change(edits[n]), *edits[n + 1 :]))


def _shifted(case: Case, other: Case, rng: Generator) -> Case:
    """One edit, some tokens further on or back."""
    del other
    shape = _inputs(case).shape

    def change(edit: Edit) -> Edit:
        tokens = shape[3] if edit.tensor == "q" else shape[4]
        by = int(rng.choice([-128, -16, -1, 1, 16, 128]))
        start = min(max(edit.start + by, 0), tokens - 1)
        stop = None if edit.stop is None else min(max(edit.stop + by, start + 1), tokens)
        return dataclasses.replace(edit, start=start, stop=stop)

    return _edited(case, rng, change)


def _resized(case: Case, other: Case, rng: Generator) -> Case:
    """One edit's word moved to a neighbour, doubled, halved or negated."""
    del other

    def change(edit: Edit) -> Edit:
        if edit.op != "set":
            return edit
        word = np.array(float.fromhex(edit.value)).astype(BF16).view(np.uint16)
        near = int(word) + int(rng.choice([-128, -16, -1, 1, 16, 128]))
        value = float(np.array(near % 2**16, dtype=np.uint16).view(BF16))
        return edit if not math.isfinite(value) else dataclasses.replace(edit, value=value.hex())

    return _edited(case, rng, change)


def _crossed(case: Case, other: Case, rng: Generator) -> Case:
    """An edit, or the base, of another case of the same shape."""
    mine, theirs = _inputs(case), _inputs(other)
    if mine.shape != theirs.shape or mine.v_dim != theirs.v_dim:
        return _resized(case, other, rng)
    if not theirs.edits or rng.random() < _STRUCTURE:
        return _changed(case, VARIED, exponents=theirs.exponents, seed=theirs.seed)
    first = int(rng.integers(len(theirs.edits)))
    stop = first + int(rng.integers(1, 5))
    return _changed(case, VARIED, edits=(*mine.edits[: MOST_EDITS - 4], *theirs.edits[first:stop]))


def _word(tensor: str, x: np.ndarray, where: tuple[int, int, int], word: int) -> Edit | None:
    """An edit that sets one word, in every batch entry; None if it is not finite."""
    head, token, lane = where
    value = float(np.array(word, dtype=np.uint16).view(BF16))
    if not math.isfinite(value) or int(x[0, head, token, lane].view(np.uint16)) == word:
        return None
    return Edit(tensor, "set", value.hex(), heads=(head,), start=token, stop=token + 1, lanes=(lane, lane + 1))


def _flipped(case: Case, place: tuple[int, ...], rng: Generator) -> list[Edit]:
    """Random bits of words that reach the worst element: its query, the keys that it sees, their values in its lane."""
    problem: AttentionProblem = case.problem
    b, h, row = place[:3]
    kv, seen = problem.kv_head(h), problem.seen(b, row)
    edits = []
    for _ in range(int(rng.choice(FLIPS))):
        tensor = str(rng.choice(["q", "k", "v"] if seen.size else ["q"]))
        x = getattr(problem, tensor)
        token = row if tensor == "q" else int(rng.choice(seen))
        lane = int(place[3]) if tensor == "v" and len(place) == 4 else int(rng.integers(x.shape[3]))
        where = (h if tensor == "q" else kv, token, lane)
        # Significand bits mostly: a flip among the exponents changes everything at once.
        bit = int(rng.integers(7)) if rng.random() < _LOW_BITS else int(rng.integers(7, 16))
        edit = _word(tensor, x, where, int(x[0, where[0], token, lane].view(np.uint16)) ^ (1 << bit))
        if edit is not None:
            edits.append(edit)
    return edits


def _aligned(case: Case, place: tuple[int, ...], rng: Generator) -> list[Edit]:
    """Gradient ascent on the share of the bound, with the rounding of the weights frozen at the present point.

    With d_k the relative rounding error of weight p_k, the error of o is about sum p_k d_k v_k and the bound about
    sum p_k u |v_k|; the gradient of their quotient r is p_k (d_k - r u sign v_k) up to a factor.  Values are set to
    the largest present size with the gradient's sign where it is largest, and to zero where the weight only pays.
    """
    problem: AttentionProblem = case.problem
    b, h, row, lane = place
    kv, seen = problem.kv_head(h), problem.seen(b, row)
    if not seen.size:
        return []
    with np.errstate(all="ignore"):
        scores = (widen(problem.k[b, kv, seen]) @ widen(problem.q[b, h, row])) * (problem.scale * LOG2_E)
        weights = np.exp2(scores - np.ceil(scores.max()))
        rounded = widen(weights.astype(BF16))
        drift = np.where(weights > 0, rounded - weights, 0.0)
        values = widen(problem.v[b, kv, seen, lane])
        bound = (weights * 2.0**-8 * np.abs(values)).sum()
        share = (drift * values).sum() / bound if bound > 0 else 0.0
    if not np.isfinite(drift).all() or not np.isfinite(share):
        return []
    sign = 1.0 if share >= 0 else -1.0
    gradient = sign * drift - abs(share) * weights * 2.0**-8 * np.sign(values)
    size = np.abs(values).max() or 1.0
    edits = []
    for n in np.argsort(-np.abs(gradient))[: int(rng.choice(ALIGNED))]:
        pays = abs(drift[n]) >= abs(share) * weights[n] * 2.0**-8
        value = size * np.sign(sign * drift[n]) if pays else 0.0
        word = int(np.array(value).astype(BF16).view(np.uint16))
        edit = _word("v", problem.v, (kv, int(seen[n]), lane), word)
        if edit is not None:
            edits.append(edit)
    return edits
