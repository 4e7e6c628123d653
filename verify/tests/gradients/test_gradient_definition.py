"""The definition tier is the derivative of the forward definition; inputs are checked, edges are as documented."""

from __future__ import annotations

import dataclasses
from typing import Any

import mpmath
import numpy as np
import pytest

from verify.attention import oracle_float64 as forward_float64
from verify.attention import oracle_mpmath as forward_oracle
from verify.attention.gradients import oracle_arb, oracle_float64, oracle_mpmath
from verify.attention.gradients.problem import GradientProblem, dense_rows, exact
from verify.attention.oracle_float64 import UNIT
from verify.attention.problem import AttentionProblem
from verify.tests.gradients.gradient_problems import bf16, fp32, normal_problem, rich_problem

STEP = mpmath.mpf(10) ** -20


class Forward:
    """The loss with inputs that are mpmath numbers."""

    def __init__(self, problem: GradientProblem) -> None:
        self.problem = problem
        self.arrays = {
            name: np.vectorize(mpmath.mpf, otypes=[object])(exact(getattr(problem, name)))
            for name in ("q", "k", "v", "d_out", "d_lse", "sinks")
            if getattr(problem, name) is not None
        }

    def row(self, batch: int, head: int, row: int) -> tuple[list[Any], Any]:
        """Output and LSE of one row."""
        problem, arrays = self.problem, self.arrays
        kv_head = problem.kv_head(head)
        keys = np.flatnonzero(problem.mask(batch, slice(row, row + 1))[0]).tolist()
        scores = [problem.scale * (arrays["q"][batch, head, row] @ arrays["k"][batch, kv_head, j]) for j in keys]
        if problem.softcap is not None:
            scores = [problem.softcap * mpmath.tanh(s / problem.softcap) for s in scores]
        weights = [mpmath.exp(s) for s in scores]
        total = mpmath.fsum(weights) + (mpmath.exp(arrays["sinks"][head]) if "sinks" in arrays else 0)
        if total == 0:
            return [mpmath.mpf(0)] * problem.v_dim, mpmath.mpf(0)
        values = [arrays["v"][batch, kv_head, j] for j in keys]
        out = [
            mpmath.fsum(w * v[d] for w, v in zip(weights, values, strict=True)) / total for d in range(problem.v_dim)
        ]
        return out, mpmath.log(total)

    def loss(self) -> Any:
        """<out, d_out> + <lse, d_lse>."""
        total = mpmath.mpf(0)
        for at in np.ndindex(self.problem.q.shape[:3]):
            out, lse = self.row(*at)
            total += mpmath.fsum(a * b for a, b in zip(out, self.arrays["d_out"][at], strict=True))
            total += lse * self.arrays["d_lse"][at] if "d_lse" in self.arrays else 0
        return total

    def slope(self, name: str, index: tuple[int, ...]) -> Any:
        """Central difference."""
        array = self.arrays[name]
        here, losses = array[index], []
        for step in (STEP, -STEP):
            array[index] = here + step
            losses.append(self.loss())
        array[index] = here
        return (losses[0] - losses[1]) / (2 * STEP)


@pytest.mark.parametrize("rich", [False, True])
def test_derivatives_are_finite_differences_of_the_definition(rich: bool) -> None:
    """Central differences of the mpmath forward definition, in inputs of every kind, agree to the last digit."""
    case = (rich_problem if rich else normal_problem)(7, heads=4, q_len=2, kv_len=3, head_dim=2, v_dim=1)
    rng = np.random.default_rng(0)
    found = oracle_mpmath.gradients(case)
    with mpmath.workdps(60):
        forward = Forward(case)
        for name, part in (("q", found.dq), ("k", found.dk), ("v", found.dv), ("sinks", found.dsinks)):
            if part is None:
                continue
            indices = list(np.ndindex(part.value.shape))
            for at in rng.choice(len(indices), size=min(8, len(indices)), replace=False):
                index = indices[at]
                distance = abs(forward.slope(name, index) - float(part.value[index]))
                assert distance <= float(part.error[index]) + 1e-30, f"{name}{index}"


def test_the_differenced_function_is_the_forward_oracle() -> None:
    """The function that is differenced equals the forward mpmath oracle on a causal problem."""
    rng = np.random.default_rng(3)
    q, k, v = (bf16(rng.standard_normal(shape)) for shape in ((1, 4, 3, 2), (1, 2, 5, 2), (1, 2, 5, 2)))
    plain = AttentionProblem(q, k, v, causal=True, scale=0.7)
    case = GradientProblem.of(plain, fp32(np.ones(q.shape)))
    with mpmath.workdps(60):
        forward = Forward(case)
        for at in np.ndindex(1, 4, 3):
            out, lse = forward.row(*at)
            wanted_out, wanted_lse = forward_oracle.attention_row(plain, *at)
            assert abs(lse - wanted_lse) < 1e-55
            assert max(abs(a - b) for a, b in zip(out, wanted_out, strict=True)) < 1e-55


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (2, 0)},
    "soft cap and sinks": {"softcap": 1.5, "sinks": fp32([0.5, -1.0, 2.0, 0.0])},
    "segments": {
        "q_segments": np.array([[0, 0, 1, 2], [3, 1, 1, 1]]),
        "k_segments": np.array([[0, 1, 1, 0, 2, 5], [1, 3, 1, 1, 0, 0]]),
    },
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_backward_problem_follows_its_forward_problem(name: str) -> None:
    """Out is linear in v, so <dv, v> = <out, d_out> by the forward oracle; dsink for d_lse = 1 is exp(sink - lse)."""
    rng = np.random.default_rng(9)
    q, k, v = (bf16(rng.standard_normal(shape)) for shape in ((2, 4, 4, 3), (2, 2, 6, 3), (2, 2, 6, 2)))
    plain = AttentionProblem(q, k, v, causal=True, scale=0.7, **FEATURES[name])
    d_out = fp32(rng.standard_normal((2, 4, 4, 2)))
    forward = forward_float64.attention(plain)
    found = oracle_float64.gradients(GradientProblem.of(plain, d_out))
    for batch, kv_head in np.ndindex(2, 2):
        heads = slice(2 * kv_head, 2 * kv_head + 2)
        loss = np.sum(forward.out[batch, heads] * d_out[batch, heads])
        assert abs(np.sum(found.dv.value[batch, kv_head] * exact(v[batch, kv_head])) - loss) < 1e-12
    if plain.sinks is not None:
        found = oracle_float64.gradients(GradientProblem.of(plain, fp32(0 * d_out), fp32(np.ones((2, 4, 4)))))
        shares = np.exp(plain.sinks[None, :, None] - forward.lse).sum(axis=(0, 2))
        assert found.dsinks is not None
        assert np.abs(found.dsinks.value - shares).max() < 1e-12


def test_rows_without_a_key_add_nothing() -> None:
    """Five queries, two keys, causal: the first three rows have gradients of exactly 0 with error 0."""
    case = normal_problem(1, q_len=5, kv_len=2)
    for oracle in (oracle_float64, oracle_arb, oracle_mpmath):
        found = oracle.gradients(case)
        assert np.all(found.dq.value[:, :, :3] == 0.0)
        assert np.all(found.dq.error[:, :, :3] == 0.0)


def test_no_keys_and_no_queries() -> None:
    """Zero-length sides give empty or zero gradients in every tier."""
    for lengths in ({"q_len": 0, "kv_len": 3}, {"q_len": 2, "kv_len": 0}):
        case = normal_problem(1, causal=False, **lengths)
        for oracle in (oracle_float64, oracle_arb, oracle_mpmath):
            for name, part in oracle.gradients(case).parts():
                assert np.all(part.value == 0.0), name
                assert np.all(part.error == 0.0), name


def test_subnormal_inputs_are_zero() -> None:
    """BF16 and FP32 subnormals read as zero: the gradients equal those of zeros."""
    case = normal_problem(2)
    q, d_out = case.q.copy(), case.d_out.copy()
    q[0, 0, :, 0], d_out[..., 0] = bf16(2.0**-130), np.float32(2.0**-140)
    tiny = dataclasses.replace(case, q=q, d_out=d_out)
    zero = dataclasses.replace(
        case, q=np.where(q == bf16(2.0**-130), bf16(0.0), q), d_out=np.where(d_out == 2.0**-140, np.float32(0), d_out)
    )
    for (name, a), (_, b) in zip(
        oracle_float64.gradients(tiny).parts(), oracle_float64.gradients(zero).parts(), strict=True
    ):
        assert np.array_equal(a.value, b.value), name


def test_tanh_is_within_the_assumed_ulps() -> None:
    """numpy's float64 tanh keeps to TANH_ULPS over its range, in arrays of odd length and stride."""
    rng = np.random.default_rng(5)
    points = np.concatenate([rng.uniform(-20, 20, 3001), rng.standard_normal(2000), 2.0 ** rng.uniform(-40, 5, 2000)])
    for stride in (1, 3):
        x = points[::stride]
        got = np.tanh(x)
        assert np.all(np.abs(got) <= 1.0)
        with mpmath.workdps(40):
            worst = max(
                abs(mpmath.tanh(a) - b) / (2 * UNIT * abs(mpmath.mpf(b)))
                for a, b in zip(x.tolist(), got.tolist(), strict=True)
            )
        assert worst <= oracle_float64.TANH_ULPS / 2  # an ulp is at least UNIT times the value


BAD = {
    "q must be bfloat16 .*got float32 of rank 4": {"q": fp32(np.zeros((1, 6, 7, 5)))},
    "d_out must be bfloat16 or float32 .*got float64": {"d_out": np.zeros((1, 6, 7, 3))},
    r"d_out must have shape \(1, 6, 7, 3\), got \(1, 6, 7, 4\)": {"d_out": fp32(np.zeros((1, 6, 7, 4)))},
    r"k must have shape \(1, 2, 9, 5\), got \(1, 2, 9, 4\)": {"k": bf16(np.zeros((1, 2, 9, 4)))},
    r"v must have shape": {"v": bf16(np.zeros((1, 2, 8, 3)))},
    "heads must be a multiple of kv_heads, got 6 and 4": {"k": bf16(np.zeros((1, 4, 9, 5)))},
    r"d_lse must have shape \(1, 6, 7\), got \(6, 7\)": {"d_lse": fp32(np.zeros((6, 7)))},
    "d_lse must be bfloat16 or float32, got float64": {"d_lse": np.zeros((1, 6, 7))},
    r"sinks must have shape \(6,\), got \(2,\)": {"sinks": fp32(np.zeros(2))},
    "sinks must be finite, or -inf for none": {"sinks": np.full(6, np.inf, np.float32)},
    "scale must be finite, got nan": {"scale": float("nan")},
    "softcap must be positive and finite, got 0.0": {"softcap": 0.0},
    r"mask must give \[rows, kv_len\] = \(1, 9\) for one row, got \(1, 8\)": {
        "mask": dense_rows(np.ones((7, 8), dtype=bool))
    },
}


@pytest.mark.parametrize("message", BAD)
def test_bad_problems_are_refused(message: str) -> None:
    """Each wrong argument is named, with its value and the rule."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(normal_problem(0), **BAD[message])


def test_a_dense_mask_must_be_boolean() -> None:
    """Numbers are no mask."""
    with pytest.raises(ValueError, match=r"mask must be bool .*got float64 of rank 2"):
        dense_rows(np.ones((2, 2)))
