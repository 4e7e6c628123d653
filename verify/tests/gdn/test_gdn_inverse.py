"""The inverse: oracles, certificate, contract and verdict."""

from __future__ import annotations

import numpy as np
import pytest
from gdn_inverses import MATRIX_DECAYS, matrices, matrix

from verify.devices import CPU_INTERPRET, V6E
from verify.gdn import inverse
from verify.gdn.inverse_contract import inverse_bound
from verify.gdn.inverse_judge import judge_inverse, trivial_answers
from verify.gdn.inverse_levels import half_spacing
from verify.gdn.inverse_steps import InverseSteps, invert, to_bf16
from verify.gdn.open_cases import equal_keys
from verify.verdict import Verdict

STEPS = [InverseSteps(p, f) for p in ("bf16", "bf16x3") for f in ("add", "multiply")]
IDS = [f"{s.precision}-{s.finish}" for s in STEPS]


@pytest.mark.parametrize("beta", [0.5, 0.58, 0.835, 1.0, 1.95, 2.0])
@pytest.mark.parametrize("g", [0.0, -1e-3])
def test_f1_equal_keys(beta: float, g: float) -> None:
    """One unit key repeated: the oracles give -beta exp(g (i - j)) (1 - beta)^(i - j - 1)."""
    n = 64
    i, j = np.indices((n, n))
    lower = np.where(i > j, beta * np.exp(g * (i - j)), 0.0)
    closed = equal_keys(beta, g)
    # L itself is rounded to float64: by |T^-1| |L| |T^-1| 2^-52, twice at most.
    size = np.abs(closed)
    room = 2.0**-51 * (size @ np.abs(lower) @ size + size)
    for oracle in (inverse.balls, inverse.float64):
        found = oracle(lower)
        assert (np.abs(found.value - closed) <= found.error + room).all()


def test_f1_published_values() -> None:
    """beta 0.835 and g -1e-3: T_10 = -0.8341654173608681, T_20 = -0.13749972536639182."""
    closed = equal_keys(0.835, -1e-3)
    assert abs(closed[1, 0] + 0.8341654173608681) <= 2.0**-52
    assert abs(closed[2, 0] + 0.13749972536639182) <= 2.0**-52


def test_oracles_agree() -> None:
    """Exact, ball and float64 inverses agree within their errors on every family."""
    for name, lower in list(matrices(1, decays=("mild",)))[::9]:
        wide = lower.astype(np.float64)
        exact, float64 = inverse.exact(wide), inverse.float64(wide)
        assert (np.abs(exact.value - float64.value) <= exact.error + float64.error).all(), name
    balls = inverse.balls(wide)
    assert (np.abs(exact.value - balls.value) <= exact.error + balls.error).all()


def test_float64_bound_on_the_worst_matrices() -> None:
    """Random signs make entries of 1e14: the float64 bound still holds."""
    rng = np.random.default_rng(3)
    for _ in range(6):
        lower = np.tril(rng.choice([-1.0, 1.0], (64, 64)), -1)
        exact, float64 = inverse.exact(lower), inverse.float64(lower)
        assert (np.abs(exact.value - float64.value) <= exact.error + float64.error).all()


def test_unit_keys_bound_the_inverse() -> None:
    """For keys of norm at most 1, beta <= 2 and decays <= 1, |T_ij| <= beta_i exp(g_i - g_j)."""
    rng = np.random.default_rng(9)
    for _ in range(20):
        k = rng.standard_normal((64, 6))
        k /= np.linalg.norm(k, axis=1, keepdims=True) * (1.0 + 2.0**-50)
        beta, g = rng.uniform(0.0, 2.0, (64, 1)), -np.abs(rng.standard_normal(64)) * 0.1
        total = np.cumsum(g)
        d = np.tril(np.exp(total[:, None] - total[None, :]))
        found = inverse.float64(np.tril(beta * (k @ k.T) * d, -1))
        below = np.tril_indices(64, -1)
        assert (np.abs(found.value)[below] <= (beta * d)[below] * (1.0 + 2.0**-40) + found.error[below]).all()


@pytest.mark.parametrize("oracle", [inverse.rational, inverse.balls, inverse.float64])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.eye(4), "strictly lower triangular"),
        (np.zeros((3, 4)), "square matrix"),
        (np.tril(np.full((4, 4), np.nan), -1), "finite"),
    ],
)
def test_bad_matrices_are_refused(oracle: object, bad: np.ndarray, message: str) -> None:
    """What is no strictly lower triangular finite matrix is refused by name."""
    with pytest.raises(ValueError, match=message):
        oracle(bad)  # type: ignore[operator]


def test_certificate_encloses_every_answer() -> None:
    """It bounds the error of any unit lower triangular X, right or wrong: that is why it is no criterion."""
    lower = matrix("near-duplicate", "up to 1", "mild", 0).astype(np.float64)
    exact = inverse.exact(lower)
    for x in trivial_answers(lower, exact.value).values():
        measured = inverse.certificate(lower, x)
        assert (np.abs(exact.value - x) <= measured + exact.error).all()
    good = invert(lower.astype(np.float32), InverseSteps("bf16x3")).astype(np.float64)
    error = np.abs(exact.value - good).max()
    assert error <= inverse.certificate(lower, good).max() <= 4.0 * error


def test_certificate_refuses_what_is_no_unit_lower_triangular_matrix() -> None:
    """A full or non-finite X has no certificate."""
    lower = np.tril(np.ones((4, 4)), -1)
    with pytest.raises(ValueError, match="x must be unit lower triangular"):
        inverse.certificate(lower, np.ones((4, 4)))
    with pytest.raises(ValueError, match="x must be finite"):
        inverse.certificate(lower, np.tril(np.full((4, 4), np.inf), -1) + np.eye(4))


def test_half_spacing_covers_the_rounding() -> None:
    """|bf16(x) - x| is at most half the spacing at the size of x, and attains it at ties."""
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.standard_normal(20000), 2.0 ** rng.integers(-100, 100, 2000), [1 + 2.0**-8, 1 - 2.0**-9]])
    x = x.astype(np.float32).astype(np.float64)
    assert (np.abs(to_bf16(x) - x) <= half_spacing(np.abs(x))).all()
    assert half_spacing(np.array([1.0 + 2.0**-8]))[0] == 2.0**-8
    assert half_spacing(np.zeros(1))[0] == 0.0
    low = to_bf16(x - to_bf16(x))
    assert (np.abs(x - to_bf16(x) - low) <= half_spacing(np.abs(x)) * 2.0**-9).all()


def check_contract(steps: InverseSteps, seeds: int, decays: tuple[str, ...], stride: int = 1) -> int:
    """The emulated algorithm stays within the contract on every family; returns how many matrices there were."""
    count = 0
    for name, lower in list(matrices(seeds, decays))[::stride]:
        bound = inverse_bound(lower, steps, CPU_INTERPRET)
        found = invert(lower, steps).astype(np.float64)
        assert (np.abs(found - bound.exact) <= bound.bound + bound.exact_error).all(), name
        assert (np.diag(found) == 1.0).all(), name
        assert not np.triu(found, 1).any(), name
        count += 1
    return count


@pytest.mark.parametrize("steps", STEPS[:3:2], ids=IDS[:3:2])
def test_contract_holds(steps: InverseSteps) -> None:
    """The eight products of both precisions, on a sample; diagonal and upper triangle are exact."""
    assert check_contract(steps, 1, ("mild",), stride=5) == 10


@pytest.mark.deep
@pytest.mark.parametrize("steps", STEPS, ids=IDS)
def test_contract_holds_on_many(steps: InverseSteps) -> None:
    """The same on more matrices, and with the last factor multiplied as it stands."""
    assert check_contract(steps, 6, MATRIX_DECAYS) == 864


@pytest.mark.deep
@pytest.mark.parametrize("steps", STEPS[:3:2], ids=IDS[:3:2])
def test_contract_holds_against_a_search(steps: InverseSteps) -> None:
    """A hill climb over keys and write strengths that maximises the error finds nothing beyond the bound."""
    rng = np.random.default_rng(11)
    worst = 0.0
    for trial in range(4):
        lower = matrix("near-duplicate", "up to 1" if trial % 2 else "1 to 2", "0", trial)
        best = 0.0
        for _ in range(150):
            change = rng.standard_normal(lower.shape) * (rng.random(lower.shape) < 0.02) * 10.0 ** rng.uniform(-4, -1)
            candidate = np.tril(lower + change, -1).astype(np.float32)
            error = np.abs(invert(candidate, steps) - inverse.float64(candidate.astype(np.float64)).value).max()
            if error > best:
                best, lower = error, candidate
        bound = inverse_bound(lower, steps, CPU_INTERPRET)
        found = np.abs(invert(lower, steps) - bound.exact)
        assert (found <= bound.bound + bound.exact_error).all()
        worst = max(worst, best)
    assert worst > 0.0


def test_contract_is_tight_where_it_matters() -> None:
    """On random keys with beta up to 1 the bound is at most ten times the largest error, in BF16."""
    for seed in range(4):
        lower = matrix("random", "up to 1", "0", seed)
        bound = inverse_bound(lower, InverseSteps(), CPU_INTERPRET)
        error = np.abs(invert(lower, InverseSteps()) - bound.exact).max()
        assert bound.bound.max() <= 10.0 * error


def test_sites_and_remainder_make_up_the_bound() -> None:
    """Every rounding site is named, and no share of the bound is without a name."""
    bound = inverse_bound(matrix("periodic", "1", "mild", 1), InverseSteps(), CPU_INTERPRET)
    total = sum(bound.sites.values()) + bound.remainder
    assert (bound.bound <= total * (1.0 + 2.0**-20) + 8.0 * bound.exact_error).all()
    assert {name.split(",")[0] for name in bound.sites} == {"level 4", "level 16", "level 64"}


def test_contract_of_a_representable_matrix() -> None:
    """Identical keys e1 with beta 1: every step is exact, and operands that are known to be exact cost nothing."""
    lower = np.tril(np.ones((64, 64), np.float32), -1)
    bound = inverse_bound(lower, InverseSteps(), CPU_INTERPRET)
    assert bound.sites["level 4, operand I - L"].max() == 0.0
    assert (invert(lower, InverseSteps()) == bound.exact).all()


def test_contract_with_an_uncertain_matrix() -> None:
    """An L known up to an error: the bound covers the inverse of every matrix within it."""
    rng = np.random.default_rng(8)
    lower = matrix("low-rank", "up to 1", "mild", 2)
    doubt = np.tril(np.abs(lower) * 2.0**-10, -1).astype(np.float64)
    bound = inverse_bound(lower, InverseSteps("bf16x3"), CPU_INTERPRET, lower_error=doubt)
    for _ in range(5):
        moved = lower + doubt * rng.choice([-1.0, 1.0], lower.shape)
        found = invert(moved.astype(np.float32), InverseSteps("bf16x3"))
        assert (np.abs(found - bound.exact) <= bound.bound + bound.exact_error).all()


def test_a_wider_machine_has_a_wider_bound() -> None:
    """Sums that truncate cost more than sums that round."""
    lower = matrix("random", "1", "mild", 3)
    steps = InverseSteps("bf16x3")
    assert inverse_bound(lower, steps, V6E).bound.max() > inverse_bound(lower, steps, CPU_INTERPRET).bound.max()


@pytest.mark.parametrize("steps", STEPS[:3:2], ids=IDS[:3:2])
@pytest.mark.parametrize("keys", ["random", "near-duplicate"])
def test_the_verdict_passes_the_algorithm_and_fails_trivial_answers(steps: InverseSteps, keys: str) -> None:
    """X = I, X = T, a sign-flipped inverse and a random X fail by the a-priori bound; the algorithm passes."""
    lower = matrix(keys, "up to 1", "mild", 0)
    assert judge_inverse(lower, invert(lower, steps), steps, CPU_INTERPRET).judgement.verdict is Verdict.PASS
    wide = lower.astype(np.float64)
    for name, x in trivial_answers(wide, inverse.float64(wide).value).items():
        judged = judge_inverse(lower, x.astype(np.float32), steps, CPU_INTERPRET)
        assert judged.judgement.verdict is Verdict.FAIL, name


def test_the_certificate_stands_beside_the_verdict() -> None:
    """A wrong X is convicted although its certificate encloses its error."""
    lower = matrix("random", "up to 1", "mild", 0)
    judged = judge_inverse(lower, np.eye(64, dtype=np.float32), InverseSteps(), CPU_INTERPRET)
    assert judged.judgement.verdict is Verdict.FAIL
    assert judged.certified >= np.abs(judged.bound.exact - np.eye(64)).max()
    assert "not a criterion" in judged.judgement.notes[0]


def test_structure_is_exact() -> None:
    """A diagonal of 1 + 2^-7, or anything above the diagonal, fails whatever its size."""
    lower = matrix("random", "up to 1", "mild", 0)
    good = invert(lower, InverseSteps())
    for index, value in (((5, 5), 1.0078125), ((3, 9), 1e-30)):
        bad = good.copy()
        bad[index] = value
        judged = judge_inverse(lower, bad, InverseSteps(), CPU_INTERPRET)
        assert judged.judgement.verdict is Verdict.FAIL
        assert f"[{index[0]}, {index[1]}]" in judged.judgement.reason


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_inverses_fail(value: float) -> None:
    """No bound excuses NaN or infinity."""
    lower = matrix("random", "up to 1", "mild", 0)
    bad = invert(lower, InverseSteps())
    bad[9, 2] = value
    judged = judge_inverse(lower, bad, InverseSteps(), CPU_INTERPRET)
    assert judged.judgement.verdict is Verdict.FAIL
    assert np.isnan(judged.certified)


def test_ill_conditioned_is_no_mistake() -> None:
    """Repeated keys with beta 2 in BF16: the bound accepts anything, and the verdict says ill-conditioned."""
    lower = matrix("identical", "2", "0", 0)
    judged = judge_inverse(lower, invert(lower, InverseSteps()), InverseSteps(), CPU_INTERPRET)
    assert judged.judgement.verdict is Verdict.NO_POWER
    assert judged.judgement.reason.startswith("ill-conditioned: the bound")


def test_wrong_shapes_and_sizes() -> None:
    """Sizes without a scheme are refused, other shapes fail."""
    with pytest.raises(ValueError, match=r"n one of 4, 16, 64, got \(8, 8\)"):
        inverse_bound(np.zeros((8, 8)), InverseSteps(), CPU_INTERPRET)
    with pytest.raises(ValueError, match="lower must hold FP32 numbers"):
        inverse_bound(np.tril(np.full((4, 4), 0.1), -1), InverseSteps(), CPU_INTERPRET)
    with pytest.raises(ValueError, match="precision must be one of bf16, bf16x3, got 'fp8'"):
        InverseSteps("fp8")
    with pytest.raises(ValueError, match="the chunk must have 4, 16, 64 tokens, got 32"):
        invert(np.zeros((32, 32), np.float32), InverseSteps())
    judged = judge_inverse(np.zeros((4, 4), np.float32), np.zeros((4, 3), np.float32), InverseSteps(), CPU_INTERPRET)
    assert judged.judgement.verdict is Verdict.FAIL
    assert "shapes differ" in judged.judgement.reason
