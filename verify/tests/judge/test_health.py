"""The oracles' health check notices reduced precision and wrong definitions."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from verify.attention import health, oracle_arb, oracle_float64, oracle_mpmath
from verify.attention.problem import AttentionProblem
from verify.attention.reference import OracleUnsound, Reference

if TYPE_CHECKING:
    from collections.abc import Callable

    Oracle = Callable[[AttentionProblem], Reference]

pytestmark = pytest.mark.smoke


def test_oracles_are_sound() -> None:
    """All tiers pass: known answers within small bounds, and agreement with each other."""
    health.check_oracles()


def test_oracles_share_no_code_with_the_kernels() -> None:
    """G3: judging imports neither the kernel package nor JAX, so that no mistake and no flag of theirs gets in."""
    program = (
        "import sys, verify.attention.judge, verify.attention.health as health; health.check_oracles(); "
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('flywheel', 'jax', 'jaxlib')))"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


def with_precision(problem: AttentionProblem, *, bits: int) -> Reference:
    """The arb tier held at a fixed precision."""
    rows = np.ndindex(problem.batch, problem.heads, problem.q_len)
    answers = [oracle_arb.attention_row(problem, *at, precision=bits, max_precision=bits) for at in rows]
    out = np.array([[float(ball.mid()) for ball in row] for row, _ in answers]).reshape(problem.q.shape)
    lse = np.array([float(ball.mid()) for _, ball in answers]).reshape(problem.q.shape[:3])
    return Reference(out, np.zeros_like(out), lse, np.zeros_like(lse), "arb")


REDUCED = {
    "float64 in float32": functools.partial(oracle_float64.attention, dtype=np.float32),
    "float64 in float16": functools.partial(oracle_float64.attention, dtype=np.float16),
    "mpmath with 10 digits": functools.partial(oracle_mpmath.attention, dps=10),
    "arb with 30 bits": functools.partial(with_precision, bits=30),
}


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_reduced_precision_is_noticed(name: str) -> None:
    """An oracle that computes with too few digits raises OracleUnsound."""
    with pytest.raises(OracleUnsound):
        health.check_oracle(name, REDUCED[name])


class TopLeft(AttentionProblem):
    """Causal mask aligned top-left."""

    def visible_to(self, rows: np.ndarray) -> np.ndarray:
        """Keys 0 .. row."""
        return np.minimum(rows + 1, self.kv_len) if self.causal else np.full_like(rows, self.kv_len)


class Strict(AttentionProblem):
    """Causal mask that hides the diagonal."""

    def visible_to(self, rows: np.ndarray) -> np.ndarray:
        """One key fewer."""
        return np.maximum(super().visible_to(rows) - 1, 0) if self.causal else np.full_like(rows, self.kv_len)


class Tiled(AttentionProblem):
    """Query heads tiled over KV heads."""

    def kv_head(self, head: int) -> int:
        """The remainder in place of the quotient."""
        return head % self.kv_heads


class WrongGroup(AttentionProblem):
    """The head divided by the number of KV heads, not by the size of a group."""

    def kv_head(self, head: int) -> int:
        """A wrong quotient, which is right when both numbers are equal."""
        return min(head // self.kv_heads, self.kv_heads - 1)


class Unscaled(AttentionProblem):
    """Logits without their scale."""

    def __post_init__(self) -> None:
        """Drop the scale."""
        object.__setattr__(self, "scale", 1.0)


MUTANTS = [TopLeft, Strict, Tiled, WrongGroup, Unscaled]


def mutated(oracle: Oracle, mutant: type[AttentionProblem]) -> Oracle:
    """The oracle, looking at problems through wrong eyes."""

    def wrong(problem: AttentionProblem) -> Reference:
        return oracle(mutant(problem.q, problem.k, problem.v, problem.causal, problem.scale))

    return wrong


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("tier", health.tiers())
def test_wrong_definitions_are_noticed(tier: str, mutant: type[AttentionProblem]) -> None:
    """A wrong mask, head map or scale contradicts the known answers, in each tier."""
    with pytest.raises(OracleUnsound, match=f"{tier} on "):
        health.check_oracle(tier, mutated(health.tiers()[tier], mutant))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_cross_check_notices_one_wrong_tier(mutant: type[AttentionProblem]) -> None:
    """One tier with a wrong definition disagrees with the others."""
    oracles = health.tiers() | {"float64": mutated(oracle_float64.attention, mutant)}
    [problem] = [known.problem for known in health.known_answers() if known.name == "grouped heads"]
    with pytest.raises(OracleUnsound, match="float64 against arb: "):
        health.cross_check(problem, oracles)


@pytest.mark.parametrize("name", ["visible_to", "kv_head"])
def test_a_mistake_that_all_tiers_share_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong mask or head map in the problem itself, which every tier asks, shows against the second definition."""
    wrong = {"visible_to": TopLeft.visible_to, "kv_head": Tiled.kv_head}[name]
    monkeypatch.setattr(AttentionProblem, name, wrong)
    with pytest.raises(OracleUnsound, match="float64 on "):
        health.check_oracles()


def test_an_understated_bound_is_noticed() -> None:
    """A tier that claims errors a million times too small is caught."""

    def boastful(problem: AttentionProblem) -> Reference:
        found = oracle_float64.attention(problem)
        return dataclasses.replace(found, out=found.out * (1.0 + 1e-12), out_error=found.out_error * 1e-6)

    with pytest.raises(OracleUnsound):
        health.check_oracle("boastful", boastful)


def test_a_wrong_class_is_noticed() -> None:
    """A tier that turns NaN into numbers is caught."""

    def forgiving(problem: AttentionProblem) -> Reference:
        found = oracle_float64.attention(problem)
        return dataclasses.replace(found, out=np.nan_to_num(found.out))

    with pytest.raises(OracleUnsound, match="nan"):
        health.check_oracle("forgiving", forgiving)
