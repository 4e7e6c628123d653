"""Evolution in the space of keys and write strengths: candidates are tried on the emulated inverse, many at a time.

What the emulation (`verify.gdn.inverse_steps`) calls worst becomes the case that the kernel is put to.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz.gdn.inverse_case import BETAS, CHUNK, FAMILIES, InverseCase, lower, unit
from verify.attention.problem import BF16
from verify.gdn.inverse_steps import InverseSteps, invert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.random import Generator

    from fuzz.case import Case
    from fuzz.outcome import Outcome

_ON_KEYS = 0.7
"""How often a case with written-out keys takes rows of another rather than a fresh family."""

_GRADIENT = 0.25
"""How often a step follows the gradient where bits may be flipped too."""

_WITH_NOISE = 0.7
"""How often a step along the gradient is blurred."""

_AT_LIMIT = 0.7
"""How often extreme strengths are the largest allowed rather than 0."""

PARENTS, CHILDREN, GENERATIONS = 16, 64, 40
FIRST = 96
"""Matrices of the families with which a population begins."""

NARROW = (3, 4, 8)
"""Widths at which the search goes furthest: few numbers to move, and still room for keys that nearly repeat."""

_TO_ISLAND = 0.6
"""How often a climb goes on with a population of narrow keys that no elite has entered."""

SETTLED = 4
"""Climbs without a gain after which such a population gives way to a new one."""

STEPS = (0.3, 0.1, 0.03, 0.01)
EVOLVED = "evolved"
UNDECAYED = "0x1p+0"


@dataclasses.dataclass(frozen=True, eq=False)
class _Point:
    """Keys `[64, width]` as float64 of BF16 numbers, write strengths, and their limit."""

    keys: np.ndarray
    beta: np.ndarray
    limit: float

    @staticmethod
    def of(case: Case) -> _Point:
        inputs = _inputs(case)
        beta = inputs.beta().astype(np.float64)
        return _Point(inputs.key_words().astype(np.float64), beta, max(float.fromhex(inputs.beta_max), beta.max()))


def _inputs(case: Case) -> InverseCase:
    assert isinstance(case.inputs, InverseCase)  # noqa: S101  the hunts of this operation make no others
    return case.inputs


def emulated_errors(keys: np.ndarray, beta: np.ndarray, decays: np.ndarray, precision: str) -> np.ndarray:
    """Largest error of an entry of the emulated inverse, per candidate."""
    matrices = lower(keys, beta, decays)
    found = invert(matrices, InverseSteps(precision, "add")).astype(np.float64)
    exact = np.linalg.inv(np.eye(CHUNK) + matrices.astype(np.float64))
    errors = np.abs(found - exact).max(axis=(1, 2))
    return np.where(np.isfinite(errors), errors, -1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class _People:
    """A population, the worst first."""

    keys: np.ndarray
    beta: np.ndarray
    errors: np.ndarray


def _judged(points: Sequence[_Point], decays: np.ndarray, precision: str) -> _People:
    keys, beta = np.array([point.keys for point in points]), np.array([point.beta for point in points])
    return _People(keys, beta, emulated_errors(keys, beta, decays, precision))


def _joined(people: _People | None, others: _People) -> _People:
    """The worst of both."""
    keys, beta, errors = others.keys, others.beta, others.errors
    if people is not None:
        keys = np.concatenate([people.keys, keys])
        beta = np.concatenate([people.beta, beta])
        errors = np.concatenate([people.errors, errors])
    order = np.argsort(-errors, kind="stable")[:PARENTS]
    return _People(keys[order], beta[order], errors[order])


def _families(inputs: InverseCase, limit: float, rng: Generator) -> list[_Point]:
    """Matrices of every family at the case's width."""
    points = []
    for n in range(FIRST):
        one = InverseCase(
            "",
            width=inputs.width,
            family=FAMILIES[n % len(FAMILIES)],
            period=2 + n % 7,
            noise=-(n % 6),
            beta_kind=BETAS[n % len(BETAS)],
            beta_max=limit.hex(),
            seed=int(rng.integers(2**16)),
        )
        points.append(_Point(one.key_words().astype(np.float64), one.beta().astype(np.float64), limit))
    return points


class InverseMoves:
    """`fuzz.hunts.Moves`; populations live as long as the worker does."""

    def __init__(self) -> None:
        self.populations: dict[tuple[object, ...], _People] = {}
        self.quiet: dict[tuple[object, ...], int] = {}

    def vary(self, case: Case, other: Case, rng: Generator) -> Case:
        """Rows of another case, or another family, period or strength."""
        inputs, theirs = _inputs(case), _inputs(other)
        if inputs.keys and rng.random() < _ON_KEYS:
            mine, second = _Point.of(case), _Point.of(other)
            width = min(mine.keys.shape[1], second.keys.shape[1])
            cut = int(rng.integers(1, CHUNK))
            keys = np.concatenate([mine.keys[:cut, :width], second.keys[cut:, :width]])
            beta = np.minimum(np.concatenate([mine.beta[:cut], second.beta[cut:]]), mine.limit)
            return case.with_inputs(inputs.written_out(unit(keys), beta, f"{EVOLVED} keys, {_limit_words(inputs)}"))
        changes: dict[str, Any] = {
            "seed": int(rng.integers(2**16)),
            "family": str(rng.choice(FAMILIES)),
            "period": int(rng.integers(1, 9)),
            "noise": int(rng.integers(-8, 1)),
            "beta_kind": str(rng.choice(BETAS)),
            "width": int(rng.choice([2, 4, 8, 16])),
        }
        chosen = rng.choice(list(changes), size=2, replace=False)
        fresh = dataclasses.replace(theirs, beta_max=inputs.beta_max, keys=(), betas=(), provenance="")
        fresh = dataclasses.replace(fresh, **{name: changes[name] for name in chosen})
        return case.with_inputs(dataclasses.replace(fresh, name=words(fresh)))

    def climb(self, case: Case, outcome: Outcome, rng: Generator, ways: Sequence[str]) -> Case:
        """Some generations of a population on the emulated inverse; its worst.

        The population is the one to which the case belongs, or an island: narrow keys without decay, at the largest
        strengths of the case's range.  Elites of every width and decay come here in turn; left to them, the search
        would spread over populations that each stay young, or gather at the first good one.
        """
        del outcome
        precision = str(case.asked("precision"))
        island = rng.random() < _TO_ISLAND
        if island:
            case = _islander(case, rng)
        inputs, point = _inputs(case), _Point.of(case)
        decays = inputs.decays()
        home = (
            precision,
            point.keys.shape[1],
            point.limit,
            inputs.decay,
            inputs.seed if inputs.decay == "random" else 0,
            island,
        )
        people = self.populations.get(home)
        before = -np.inf if people is None else people.errors[0]
        fresh = [point] if people is not None else [point, *_families(inputs, point.limit, rng)]
        people = _joined(people, _judged(fresh, decays, precision))
        for _ in range(GENERATIONS):
            parents = rng.integers(len(people.errors), size=CHILDREN)
            keys, beta = _mutated(people.keys[parents], people.beta[parents], point.limit, rng)
            if "gradient" in ways and (len(ways) == 1 or rng.random() < _GRADIENT):
                best = _Point(people.keys[0], people.beta[0], point.limit)
                half = CHILDREN // 2
                keys[:half], beta[:half] = _along(best, decays, half, rng)
            people = _joined(people, _People(keys, beta, emulated_errors(keys, beta, decays, precision)))
        self.populations[home] = people
        if island:
            self._settle(home, gained=people.errors[0] > before)
        name = f"{EVOLVED} keys, {_limit_words(inputs)}"
        return case.with_inputs(inputs.written_out(people.keys[0], people.beta[0], name))

    def _settle(self, home: tuple[object, ...], *, gained: bool) -> None:
        """Drop a population that finds nothing more; its worst has been put to the kernel."""
        self.quiet[home] = 0 if gained else self.quiet.get(home, 0) + 1
        if self.quiet[home] >= SETTLED:
            del self.populations[home], self.quiet[home]

    def forget(self) -> None:
        """See `fuzz.hunts.Moves`."""
        self.populations.clear()
        self.quiet.clear()

    def simpler(self, case: Case) -> Iterator[Case]:
        """Rows without effect (beta = 0), repeated keys, plain families."""
        inputs = _inputs(case)
        if not inputs.keys:
            plain = {
                "seed": 0,
                "family": FAMILIES[0],
                "beta_kind": BETAS[0],
                "width": 2,
                "decay": UNDECAYED,
                "period": 1,
            }
            for field, value in plain.items():
                if getattr(inputs, field) != value:
                    fresh = dataclasses.replace(inputs, **{field: value})  # type: ignore[arg-type]
                    yield case.with_inputs(dataclasses.replace(fresh, name=words(fresh)))
            return
        for family in FAMILIES[:3]:
            fresh = dataclasses.replace(inputs, keys=(), betas=(), family=family)
            yield case.with_inputs(dataclasses.replace(fresh, name=words(fresh)))
        point = _Point.of(case)
        size = CHUNK // 2
        while size:
            for first in range(0, CHUNK, size):
                beta = point.beta.copy()
                beta[first : first + size] = 0.0
                if not np.array_equal(beta, point.beta):
                    yield case.with_inputs(inputs.written_out(point.keys, beta, inputs.name))
            size //= 2


MOVES = InverseMoves()


def _islander(case: Case, rng: Generator) -> Case:
    """A fresh case of narrow keys with the precision and the range of strengths of this one."""
    inputs = _inputs(case)
    fresh = InverseCase(
        "",
        width=int(rng.choice(NARROW)),
        family=str(rng.choice(FAMILIES)),
        beta_max=(1.0 if float.fromhex(inputs.beta_max) <= 1.0 else 2.0).hex(),
        seed=int(rng.integers(2**16)),
    )
    return case.with_inputs(dataclasses.replace(fresh, name=words(fresh)))


def words(inputs: InverseCase) -> str:
    """What is special about a matrix of a family."""
    detail = {
        "periodic": f" of period {inputs.period}", "low-rank": f" of rank {inputs.period}",
        "near-duplicate": f" within 2^{inputs.noise}",
    }.get(inputs.family, "")  # fmt: skip
    decay = "" if inputs.decay == UNDECAYED else f", decay {inputs.decay}"
    return f"{inputs.family} keys{detail}, width {inputs.width}, beta {inputs.beta_kind} {_limit_words(inputs)}{decay}"


def _limit_words(inputs: InverseCase) -> str:
    return f"up to {float.fromhex(inputs.beta_max):g}"


def _rounded(keys: np.ndarray) -> np.ndarray:
    return unit(keys).astype(np.float64)


def _mutated(keys: np.ndarray, beta: np.ndarray, limit: float, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Children: noise on some rows, flipped bits, copied or rolled runs of tokens, moved or extreme strengths."""
    count, lanes = len(keys), keys.shape[2]
    scale = 10.0 ** rng.uniform(-3, 0, (count, 1, 1))
    rows = rng.random((count, CHUNK)) < 10.0 ** rng.uniform(-2, 0, (count, 1))
    rows[np.arange(count), rng.integers(CHUNK, size=count)] = True
    kind = rng.integers(7, size=count)
    noise = scale * rng.standard_normal(keys.shape) * rows[:, :, None]
    keys = np.where((kind <= 1)[:, None, None], keys + noise, keys)
    moved = np.clip(beta + scale[:, :, 0] * rng.standard_normal(beta.shape) * rows, 0.0, limit)
    beta = np.where((kind == 2)[:, None], moved, beta)
    for n in range(count):
        if kind[n] == 3:
            length = int(rng.integers(1, 17))
            to, start = (int(x) for x in rng.integers(CHUNK - length, size=2))
            keys[n, to : to + length] = keys[n, start : start + length].copy()
        elif kind[n] == 4:
            by = int(rng.integers(-8, 9))
            keys[n], beta[n] = np.roll(keys[n], by, axis=0), np.roll(beta[n], by)
        elif kind[n] == 5:
            beta[n, rows[n]] = limit if rng.random() < _AT_LIMIT else 0.0
        elif kind[n] == 6:
            bits = keys[n].astype(BF16).view(np.uint16)
            bits[rows[n], int(rng.integers(lanes))] ^= np.uint16(1 << int(rng.integers(7)))
            keys[n] = bits.view(BF16).astype(np.float64)
    return _rounded(keys), beta.astype(np.float32).astype(np.float64)


def _along(point: _Point, decays: np.ndarray, count: int, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Steps along the gradient of the smooth bound, with a little noise."""
    slopes = [np.asarray(x, dtype=np.float64) for x in _slope()(point.keys, point.beta, decays)]
    keys, beta = np.repeat(point.keys[None], count, axis=0), np.repeat(point.beta[None], count, axis=0)
    sizes = [float(np.abs(slope).max()) for slope in slopes]
    if not all(0.0 < size < np.inf for size in sizes):
        return _mutated(keys, beta, point.limit, rng)
    step = rng.choice(STEPS, size=(count, 1, 1)) * rng.random((count, 1, 1))
    noise = 0.3 * step * rng.standard_normal(keys.shape) * (rng.random((count, 1, 1)) < _WITH_NOISE)
    keys = _rounded(keys + step * slopes[0] / sizes[0] + noise)
    beta = np.clip(beta + step[:, :, 0] * slopes[1] / sizes[1], 0.0, point.limit)
    return keys, beta.astype(np.float32).astype(np.float64)


@functools.cache
def _slope() -> Callable[..., Any]:
    """Gradient of log of sum (|X_ij| |E_jk| |X_kl|)^2: what a rounding of each entry does to the inverse X."""
    import jax  # noqa: PLC0415  workers only
    import jax.numpy as jnp  # noqa: PLC0415

    def smooth_bound(keys: Any, beta: Any, decays: Any) -> Any:  # noqa: ANN401  traced
        ends = jnp.cumsum(jnp.log(jnp.maximum(decays, 1e-30)))
        factor = jnp.exp(jnp.minimum(ends[:, None] - ends[None, :], 0.0))
        strict = jnp.tril(jnp.ones((CHUNK, CHUNK)), -1)
        entries = beta[:, None] * jnp.einsum("id,jd->ij", keys, keys, precision="highest") * factor * strict
        inverse = jax.scipy.linalg.solve_triangular(
            jnp.eye(CHUNK) + entries, jnp.eye(CHUNK), lower=True, unit_diagonal=True
        )
        size = jnp.sqrt(jnp.square(inverse) + 1e-12)
        carried = size @ jnp.sqrt(jnp.square(entries) + 1e-12) @ size
        return jnp.log(jnp.square(carried).sum())

    return jax.jit(jax.grad(smooth_bound, argnums=(0, 1)))
