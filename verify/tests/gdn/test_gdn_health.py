"""The health check passes the oracles and catches wrong ones."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from verify.gdn import health, inverse, oracle_float64
from verify.gdn.problem import DeltaRuleProblem, GdnProblem, shapes
from verify.gdn.reference import GdnReference, OracleUnsound

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.gdn.problem import Problem


def test_the_oracles_are_healthy() -> None:
    """All tiers give every known answer within their bounds, and agree with each other."""
    health.check_oracles()


def recurrence(problem: DeltaRuleProblem, mistake: str) -> GdnReference:
    """The delta rule in plain numpy, with one mistake."""
    out = np.zeros((problem.tokens, problem.n_v, problem.d_v))
    state = problem.state.astype(np.float64)
    group = problem.n_v // problem.n_kq
    for sequence in range(problem.sequences.count):
        span, slot = problem.sequences.span(sequence), problem.sequences.initial_slot(sequence)
        for head in range(problem.n_v):
            s = np.zeros(state.shape[2:]) if slot is None else problem.state[slot, head].astype(np.float64)
            final = s
            running = np.zeros(problem.d_k)
            for t in range(span.start, span.stop):
                q, k = (x[t, head // group].astype(np.float64) for x in (problem.q, problem.k))
                v, beta = problem.v[t, head].astype(np.float64), float(problem.beta[t, head])
                g = np.zeros(problem.d_k)
                if problem.g is not None:
                    g = np.broadcast_to(problem.g[t, head].astype(np.float64), (problem.d_k,))
                s, out[t, head] = step(s, (q, k, v, beta, g), running, mistake)
                running = running + g
                out[t, head] *= problem.scale
                if t + 1 - span.start == problem.sequences.taken(sequence):
                    final = s
            if problem.sequences.write_slots[sequence] >= 0:
                state[problem.sequences.write_slots[sequence], head] = final
    error = np.full(out.shape, 1e-13)
    return GdnReference(out, error, state, np.full(state.shape, 1e-13), "wrong")


def step(
    s: np.ndarray,
    token: tuple[np.ndarray, np.ndarray, np.ndarray, float, np.ndarray],
    running: np.ndarray,
    mistake: str,
) -> tuple[np.ndarray, np.ndarray]:
    """One token."""
    q, k, v, beta, g = token
    with np.errstate(over="ignore", invalid="ignore"):
        decay = np.exp2(g) if mistake == "gates in log2" else np.exp(g)
        if mistake == "factored exp":  # exp(G_t) exp(-G_(t-1))
            decay = np.exp(running + g) * np.exp(-running)
        before = s if mistake == "decay after write" else decay[:, None] * s
        after = before + np.outer(k, beta * (v - k @ before))
        if mistake == "decay after write":
            after = decay[:, None] * after
        if mistake == "transposed state" and after.shape[0] == after.shape[1]:
            return after, after @ q
        return after, q @ after


MISTAKES = ("transposed state", "decay after write", "factored exp", "gates in log2")


def square_case() -> list[health.Known]:
    """A known answer with d_k = d_v, for which a transposed state has the right shape."""
    problem = health.GdnCase("random", "up to 1", "mild", seed=6, lengths=(3,), heads=(1, 1, 3, 3)).rule()
    return [health.Known("square", problem, health.by_decimal(problem))]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_oracles_are_caught(mistake: str) -> None:
    """Each well-known mistake in the recurrence fails the health check; without it the same code passes."""
    answers = [known for known in health.known_answers() if isinstance(known.problem, DeltaRuleProblem)]
    answers += square_case()
    health.check_oracle("plain", lambda problem: recurrence(problem, "none"), answers)  # type: ignore[arg-type]
    with pytest.raises(OracleUnsound, match=r"wrong on .*(out|state)"):
        health.check_oracle("wrong", lambda problem: recurrence(problem, mistake), answers)  # type: ignore[arg-type]


def layers() -> list[health.Known]:
    """Known answers of whole layers."""
    return [known for known in health.known_answers() if isinstance(known.problem, GdnProblem)]


def epsilon_outside(problem: Problem) -> GdnReference:
    """l2norm with eps outside the root, on the sum: x / (sqrt(sum x^2) + eps)."""
    assert isinstance(problem, GdnProblem)
    if problem.norm_eps is None or problem.activation != "none":
        return oracle_float64.gdn(problem)
    q, k, _ = problem.split(problem.qkv.astype(np.float64))
    norms = [np.linalg.norm(x, axis=2, keepdims=True) + problem.norm_eps for x in (q, k)]
    flat = [(x / np.where(n > 0, n, 1.0)).reshape(len(x), -1) for x, n in zip((q, k), norms, strict=True)]
    qkv = np.concatenate([*flat, problem.qkv[:, sum(x.shape[1] for x in flat) :]], axis=1).astype(np.float32)
    return oracle_float64.gdn(dataclasses.replace(problem, qkv=qkv, norm_eps=None))


def taps_reversed(problem: Problem) -> GdnReference:
    """Taps newest first."""
    assert isinstance(problem, GdnProblem)
    return oracle_float64.gdn(dataclasses.replace(problem, taps=problem.taps[::-1]))


def state_ignored(problem: Problem) -> GdnReference:
    """Every sequence starts from zero."""
    sequences = dataclasses.replace(problem.sequences, has_initial=np.zeros(problem.sequences.count, dtype=bool))
    return oracle_float64.gdn(dataclasses.replace(problem, sequences=sequences))


def heads_tiled(problem: Problem) -> GdnReference:
    """Value head h reads query/key head h mod n_kq."""
    n_kq, n_v, _, _ = shapes(problem)
    order = np.argsort(np.arange(n_v) % n_kq, kind="stable")
    back = np.argsort(order)
    if not isinstance(problem, DeltaRuleProblem):
        return oracle_float64.gdn(problem)
    g = None if problem.g is None else problem.g[:, order]
    moved = dataclasses.replace(
        problem, v=problem.v[:, order], beta=problem.beta[:, order], g=g, state=problem.state[:, order]
    )
    found = oracle_float64.gdn(moved)
    return GdnReference(
        found.out[:, back], found.out_error[:, back], found.state[:, back], found.state_error[:, back], "wrong"
    )


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("eps outside the root", epsilon_outside),
        ("taps newest first", taps_reversed),
        ("state ignored", state_ignored),
        ("heads tiled", heads_tiled),
    ],
)
def test_wrong_layers_are_caught(name: str, oracle: Callable[[Problem], GdnReference]) -> None:
    """Each well-known mistake around the recurrence fails the health check."""
    answers = list(health.known_answers()) if name in {"state ignored", "heads tiled"} else layers()
    with pytest.raises(OracleUnsound, match="wrong on"):
        health.check_oracle("wrong", oracle, answers)


def test_a_useless_bound_is_caught() -> None:
    """An oracle whose own bound covers everything judges nothing: it is refused."""

    def vague(problem: Problem) -> GdnReference:
        found = oracle_float64.gdn(problem)
        return dataclasses.replace(found, out_error=found.out_error + 1e-6)

    with pytest.raises(OracleUnsound, match="its own bound of out"):
        health.check_oracle("vague", vague)


def test_a_bound_that_is_too_small_is_caught() -> None:
    """An oracle that claims to be exact is not."""

    def proud(problem: Problem) -> GdnReference:
        found = oracle_float64.gdn(problem)
        zero = np.zeros_like
        return dataclasses.replace(found, out_error=zero(found.out), state_error=zero(found.state))

    known = [x for x in health.known_answers() if x.name == "grouped heads"]
    exact = dataclasses.replace(known[0].answer, out_error=np.zeros_like(known[0].answer.out))
    with pytest.raises(OracleUnsound, match="proud on grouped heads"):
        health.check_oracle("proud", proud, [dataclasses.replace(known[0], answer=exact)])


def test_a_wrong_inverse_is_caught() -> None:
    """(I - L)(I + L^2) .. on the whole chunk, in float64: useless, and noticed."""

    def series(lower: np.ndarray) -> inverse.Inverse:
        n = len(lower)
        x, power = np.eye(n) - lower, lower @ lower
        for _ in range(5):
            x, power = x @ (np.eye(n) + power), power @ power
        return inverse.Inverse(x, np.full((n, n), 1e-12), "series")

    with pytest.raises(OracleUnsound, match="series"):
        health.check_inverse({"series": series, "exact": inverse.exact})
