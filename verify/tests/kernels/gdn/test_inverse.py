"""The triangular inverse: its contract, its structure, eight products, what it refuses."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flywheel.gdn import triangular_inverse
from flywheel.gdn.inverse import PER_STEP, PRODUCTS, chain_of
from flywheel.gdn.products import Precision, lockstep
from verify.backend import device_model
from verify.gdn.cases import BETAS, KEYS
from verify.gdn.inverse_contract import inverse_bound
from verify.gdn.inverse_judge import judge_inverse
from verify.gdn.inverse_steps import PRECISIONS, InverseSteps, invert
from verify.gdn.tables import matrix
from verify.verdict import Verdict

DECAYS = ("0", "mild", "strong")


def family(seeds: int) -> list[tuple[str, np.ndarray]]:
    """Every family of keys and write strengths, a decay in turn."""
    names = [(k, b) for k in KEYS for b in BETAS]
    return [
        (f"{k}, beta {b}, seed {s}", matrix(k, b, DECAYS[(n + s) % 3], s).astype(np.float32))
        for n, (k, b) in enumerate(names)
        for s in range(seeds)
    ]


def inverses(lower: np.ndarray, precision: Precision, interpret: Any = True) -> np.ndarray:
    """Of a batch."""
    return np.asarray(triangular_inverse(jnp.asarray(lower), precision=precision, interpret=interpret))


def judged(seeds: int, precision: Precision, every: int = 1) -> None:
    """No matrix of any family beyond its a-priori bound."""
    cases = family(seeds)[::every]
    found = inverses(np.stack([lower for _, lower in cases]), precision)
    steps = InverseSteps(precision, "add")
    for (name, lower), x in zip(cases, found, strict=True):
        judgement = judge_inverse(lower, x, steps, device_model(), power=False).judgement
        assert judgement.verdict is Verdict.PASS, (name, judgement.reason)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_within_the_bound_on_families(precision: Precision) -> None:
    """Matrices of every family of keys lie within the bound computed from L alone."""
    judged(1, precision, every=5)


@pytest.mark.deep
@pytest.mark.parametrize("precision", PRECISIONS)
def test_within_the_bound_on_many(precision: Precision) -> None:
    """Twelve matrices of each family."""
    judged(12, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_structure_is_exact(precision: Precision) -> None:
    """Ones on the diagonal and zeros above it, to the bit, on matrices of any size of entries."""
    rng = np.random.default_rng(5)
    sizes = 2.0 ** rng.integers(-40, 8, (5, 64, 64))
    lower = np.tril(rng.standard_normal((5, 64, 64)) * sizes, -1).astype(np.float32)
    found = inverses(lower, precision)
    assert (np.diagonal(found, axis1=1, axis2=2) == 1.0).all()
    assert not np.triu(found, 1).any()


def test_bf16_has_power() -> None:
    """On random keys the verdict is PASS with power, and a flipped sign lies outside of the bound."""
    lower = matrix("random", "up to 1", "mild", 3).astype(np.float32)
    x = inverses(lower, "bf16")
    steps = InverseSteps("bf16", "add")
    assert judge_inverse(lower, x, steps, device_model()).judgement.verdict is Verdict.PASS
    flipped = 2 * np.eye(64, dtype=np.float32) - x
    assert judge_inverse(lower, flipped, steps, device_model()).judgement.verdict is Verdict.FAIL


def test_split_products_are_sharper() -> None:
    """`bf16x3` errs by less than a hundredth of what `bf16` errs by, and its bound says so."""
    lower = matrix("near-duplicate", "up to 1", "0", 1).astype(np.float32)
    exact = inverse_bound(lower, InverseSteps("bf16x3", "add"), device_model()).exact
    rough, fine = (np.abs(inverses(lower, p) - exact).max() for p in PRECISIONS)
    assert fine < rough / 100


@pytest.mark.parametrize("count", [1, PER_STEP - 1, PER_STEP + 1])
def test_batch_is_each_alone(count: int) -> None:
    """A matrix's inverse does not depend, to the bit, on what else is in the batch, nor on the batch's shape."""
    cases = np.stack([lower for _, lower in family(1)[: PER_STEP + 1]])
    alone = inverses(cases[:1], "bf16")
    assert np.array_equal(inverses(cases[:count], "bf16")[0], alone[0])
    assert np.array_equal(inverses(cases[None, :count], "bf16")[0, 0], alone[0])
    assert inverses(cases[0], "bf16").shape == (64, 64)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_pairs_are_the_same_matrices(precision: Precision) -> None:
    """Two matrices side by side, as the fused kernel inverts them, each lie within their own bound."""
    rng = np.random.default_rng(11)
    names = [(k, b) for k in KEYS for b in BETAS]
    for _ in range(3):
        pair = [matrix(*names[rng.integers(len(names))], "mild", int(rng.integers(9))).astype(np.float32) for _ in "ab"]
        both = jnp.concatenate([jnp.asarray(x) for x in pair], axis=1)
        found = jax.jit(lambda x: lockstep([chain_of(x, precision)])[0])(both)
        for lower, x in zip(pair, np.split(np.asarray(found), 2, axis=1), strict=True):
            steps = InverseSteps(precision, "add")
            assert judge_inverse(lower, x, steps, device_model(), power=False).judgement.verdict is Verdict.PASS


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("width", [64, 128])
def test_eight_products(precision: Precision, width: int) -> None:
    """A chain holds exactly eight matrix products, all with BF16 operands and FP32 sums."""
    trace = jax.make_jaxpr(lambda x: lockstep([chain_of(x, precision)])[0])(jnp.zeros((64, width)))
    products = [e for e in trace.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(products) == PRODUCTS
    for one in products:
        assert {str(v.aval.dtype) for v in one.invars} == {"bfloat16"}  # type: ignore[attr-defined]
        assert str(one.outvars[0].aval.dtype) == "float32"  # type: ignore[attr-defined]


def test_traced_input_is_contained() -> None:
    """Under jit a non-finite matrix, or a beta above 1, gives NaN in that matrix and leaves its neighbours alone."""
    lower = np.stack([lower for _, lower in family(1)[:4]])
    good = inverses(lower, "bf16")
    bad = lower.copy()
    bad[1, 40, 3] = np.inf
    bad[2, 0, 63] = np.nan  # above the diagonal: not read
    beta = np.ones((4, 64), np.float32)
    beta[3, 7] = 1.5
    run = jax.jit(lambda x, b: triangular_inverse(x, beta=b, interpret=True))
    found = np.asarray(run(bad, beta))
    assert np.array_equal(found[0], good[0])
    assert np.array_equal(found[2], good[2])
    below = np.tril(np.ones((64, 64), bool), -1)
    for n in (1, 3):
        assert np.isnan(found[n][below]).all()
        assert np.array_equal(np.triu(found[n]), np.eye(64))


EYE = np.tril(np.ones((2, 64, 64), np.float32), -1)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"l": EYE.astype(np.float64)}, TypeError, "l must be a FP32 array, got float64"),
    ({"l": [1.0]}, TypeError, "l must be a FP32 array, got list"),
    ({"l": EYE[:, :32]}, ValueError, "l must have shape [..., 64, 64], got (2, 32, 64)"),
    ({"l": EYE[:0]}, ValueError, "l must not be empty in any axis, got shape (0, 64, 64)"),
    (
        {"l": EYE + np.eye(64, dtype=np.float32)},
        ValueError,
        "l must be strictly lower triangular, got 1.0 at [0, 0, 0]",
    ),
    (
        {"l": np.where(EYE > 0, EYE, np.float32(np.nan))},
        ValueError,
        "l must be strictly lower triangular, got nan at [0, 0, 0]",
    ),
    ({"l": np.where(EYE > 0, np.float32(np.nan), 0)}, ValueError, "l must be finite, got nan at [0, 1, 0]"),
    ({"precision": "fp32"}, ValueError, "precision must be one of ('bf16', 'bf16x3'), got 'fp32'"),
    ({"beta": np.ones((2, 64))}, TypeError, "beta must be a FP32 array, got float64"),
    (
        {"beta": np.ones((2, 32), np.float32)},
        ValueError,
        "beta must have shape (2, 64), one for each row of l, got (2, 32)",
    ),
    (
        {"beta": np.full((2, 64), 1.25, np.float32)},
        ValueError,
        "beta must be at most 1 with precision='bf16', got 1.25",
    ),
    (
        {"beta": np.full((2, 64), np.nan, np.float32)},
        ValueError,
        "beta must be at most 1 with precision='bf16', got nan",
    ),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("changes", "error", "words"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_refuses(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    """Bad input is refused before anything is launched, with the argument, its value and the rule."""
    with pytest.raises(error, match=re.escape(words)):
        triangular_inverse(**({"l": EYE, "interpret": True} | changes))


def test_beta_above_1_with_split_products() -> None:
    """`bf16x3` takes write strengths up to 2."""
    lower = matrix("random", "1 to 2", "mild", 0).astype(np.float32)
    beta = jnp.full((64,), 1.9, jnp.float32)
    found = np.asarray(triangular_inverse(jnp.asarray(lower), beta=beta, precision="bf16x3", interpret=True))
    steps = InverseSteps("bf16x3", "add")
    assert judge_inverse(lower, found, steps, device_model()).judgement.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("entries", "at", "due"),
    [
        # N = E D^-1 of the last level has 48 rows: lo x lo is left out.
        (((17, 16), (40, 17)), (40, 16), 1.0 + 2.0**-9),
        # D^-1 N and N N are one product of 80 rows: it is kept.
        (((40, 0), (41, 40)), (41, 0), (1.0 + 2.0**-10) ** 2),
    ],
)
def test_low_halves_meet_where_the_emulation_says(
    entries: tuple[tuple[int, int], ...], at: tuple[int, int], due: float
) -> None:
    """The product of two pairs 1 + 2^-10, with or without that of their low halves, in kernel and emulation."""
    lower = np.zeros((64, 64), np.float32)
    for place in entries:
        lower[place] = 1.0 + 2.0**-10
    found = np.asarray(triangular_inverse(jnp.asarray(lower), precision="bf16x3", interpret=True))
    assert found[at] == due
    assert (found == invert(lower, InverseSteps("bf16x3"))).all()
