"""The gradient oracles pass their own checks, and a wrong oracle does not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from verify.attention.gradients import health, oracle_arb, oracle_float64, oracle_mpmath
from verify.attention.gradients.problem import GradientProblem, full_rows
from verify.attention.gradients.reference import Bounded, Gradients
from verify.attention.reference import OracleUnsound
from verify.tests.gradients.gradient_problems import fp32

if TYPE_CHECKING:
    from collections.abc import Callable

    Oracle = Callable[[GradientProblem], Gradients]

compute = oracle_float64.gradients


@pytest.mark.smoke
def test_the_oracles_are_sound() -> None:
    """Every tier gives every known answer, with a small bound, and all tiers agree."""
    health.check_oracles()


def at_fp32(problem: GradientProblem) -> Gradients:
    """Float64 tier with FP32 arrays."""
    return compute(problem, dtype=np.float32)


def few_digits(problem: GradientProblem) -> Gradients:
    """The definition with eight digits."""
    return oracle_mpmath.gradients(problem, dps=8)


def wide_balls(problem: GradientProblem) -> Gradients:
    """Balls of 20 bits."""
    return oracle_arb.gradients(problem, relative=2.0**-10, precision=20)


def no_mask(problem: GradientProblem) -> Gradients:
    """Every row sees every key."""
    return compute(dataclasses.replace(problem, mask=full_rows(problem.q_len, problem.kv_len)))


def top_left(problem: GradientProblem) -> Gradients:
    """Causal, aligned at the first key instead of the last."""
    keys = np.arange(problem.kv_len)
    return compute(dataclasses.replace(problem, mask=lambda _batch, rows: keys <= np.arange(problem.q_len)[rows, None]))


def next_key_too(problem: GradientProblem) -> Gradients:
    """A mask one key off."""

    def mask(batch: int, rows: slice) -> np.ndarray:
        seen = problem.mask(batch, rows).copy()
        seen[:, 1:] |= problem.mask(batch, rows)[:, :-1]
        return seen

    return compute(dataclasses.replace(problem, mask=mask))


def tiled_heads(problem: GradientProblem) -> Gradients:
    """Query head h reads KV head h mod kv_heads."""
    order = np.argsort(np.arange(problem.heads) % problem.kv_heads, kind="stable")
    back = np.argsort(order)
    swapped = {name: getattr(problem, name)[:, order] for name in ("q", "d_out")}
    if problem.d_lse is not None:
        swapped["d_lse"] = problem.d_lse[:, order]
    if problem.sinks is not None:
        swapped["sinks"] = problem.sinks[order]
    found = compute(dataclasses.replace(problem, **swapped))
    sinks = found.dsinks and Bounded(found.dsinks.value[back], found.dsinks.error[back])
    return dataclasses.replace(found, dq=Bounded(found.dq.value[:, back], found.dq.error[:, back]), dsinks=sinks)


def one_head_of_the_group(problem: GradientProblem) -> Gradients:
    """dk and dv of the group's first head instead of the sum."""
    first = np.arange(problem.heads) % (problem.heads // problem.kv_heads) == 0
    d_out = np.where(first[None, :, None, None], problem.d_out, problem.d_out.dtype.type(0))
    d_lse = None if problem.d_lse is None else np.where(first[None, :, None], problem.d_lse, np.float32(0))
    part = compute(dataclasses.replace(problem, d_out=d_out, d_lse=d_lse))
    return dataclasses.replace(compute(problem), dk=part.dk, dv=part.dv)


def no_scale(problem: GradientProblem) -> Gradients:
    """The factor `scale` of dq and dk left out."""
    found = compute(problem)
    parts = {
        name: Bounded(part.value / problem.scale, part.error / abs(problem.scale))
        for name, part in found.parts()
        if name in {"dq", "dk"}
    }
    return dataclasses.replace(found, **parts)


def no_delta(problem: GradientProblem) -> Gradients:
    """The term rowsum(dO * O) left out (put back through the LSE's cotangent, which enters with the other sign)."""
    delta = np.zeros(problem.q.shape[:3])
    for batch, head, row in np.ndindex(delta.shape):
        inputs = problem.head(batch, head)
        shares = oracle_mpmath.row_shares(inputs, row)
        delta[batch, head, row] = sum(float(w) * (inputs.d_out[row] @ inputs.v[j]) for j, w in shares.weights.items())
    d_lse = delta if problem.d_lse is None else delta + problem.d_lse
    return compute(dataclasses.replace(problem, d_lse=fp32(d_lse)))


def no_lse_cotangent(problem: GradientProblem) -> Gradients:
    """The cotangent of the LSE ignored."""
    return compute(dataclasses.replace(problem, d_lse=None))


def no_sinks(problem: GradientProblem) -> Gradients:
    """The sinks left out of the denominator."""
    if problem.sinks is None:
        return compute(problem)
    return compute(dataclasses.replace(problem, sinks=np.full(problem.heads, -np.inf, dtype=np.float32)))


def no_softcap(problem: GradientProblem) -> Gradients:
    """The soft cap ignored."""
    return compute(dataclasses.replace(problem, softcap=None))


def undefined_as_numbers(problem: GradientProblem) -> Gradients:
    """What a NaN reaches reported as a number."""
    found = compute(problem)
    for _, part in found.parts():
        part.error[np.isnan(part.value)] = 0.0
        part.value[np.isnan(part.value)] = 0.0
    return found


WRONG: dict[str, Oracle] = {
    oracle.__name__: oracle
    for oracle in (
        at_fp32,
        few_digits,
        wide_balls,
        no_mask,
        top_left,
        next_key_too,
        tiled_heads,
        one_head_of_the_group,
        no_scale,
        no_delta,
        no_lse_cotangent,
        no_sinks,
        no_softcap,
        undefined_as_numbers,
    )
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_oracle_is_caught(name: str) -> None:
    """Reduced precision, a wrong mask, a wrong head map, or a missing term does not pass the known answers."""
    with pytest.raises(OracleUnsound, match=name):
        health.check_oracle(name, WRONG[name])


def test_a_cap_without_its_slope_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain rule's factor 1 - tanh^2 left out."""
    monkeypatch.setattr(oracle_mpmath, "_slope", lambda _head, _logit: 1)
    with pytest.raises(OracleUnsound, match="sinks, soft cap and LSE"):
        health.check_oracle("mpmath", oracle_mpmath.gradients)


def test_tiers_that_differ_are_caught() -> None:
    """Two tiers further apart than their bounds together fail the cross-check, which names both."""
    known = health.known_answers()[0]
    with pytest.raises(OracleUnsound, match="right against wrong: dq"):
        health.cross_check(known.problem, {"right": compute, "wrong": no_scale})


def test_a_missing_derivative_is_caught() -> None:
    """An oracle that gives no dsinks where there are sinks is named."""
    with pytest.raises(OracleUnsound, match="dsinks"):
        health.check_oracle("x", lambda problem: dataclasses.replace(compute(problem), dsinks=None))
