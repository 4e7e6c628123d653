"""The inverse of I + L, L strictly lower triangular 64 x 64, from 4 x 4 blocks upwards in eight products.

L_ij = beta_i <k_i, k_j> exp(g_i - g_j) for i > j.  Decays are rational factors here, keys rational unit vectors, so
that every identity is tried exactly.
"""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from typing import TYPE_CHECKING
from unittest import mock

import jax.numpy as jnp
import numpy as np
from flint import fmpq, fmpq_mat

from flywheel.gdn import inverse as kernel
from flywheel.gdn.products import lockstep
from proofs.exact import BF16, ball, ball_precision
from proofs.lemma import Method, lemma, require
from verify.gdn import inverse as measured
from verify.gdn import inverse_levels, inverse_steps

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK, LEVELS = kernel.CHUNK, kernel.LEVELS
_BLOCKS = 4
"""Blocks that one level merges."""


def identity(n: int) -> fmpq_mat:
    """The unit matrix."""
    return fmpq_mat(n, n, [fmpq(int(i == j)) for i in range(n) for j in range(n)])


def _masked(matrix: fmpq_mat, keep: Callable[[int, int], bool]) -> fmpq_mat:
    n = matrix.nrows()
    return fmpq_mat(n, n, [matrix[i, j] if keep(i, j) else fmpq(0) for i in range(n) for j in range(n)])


def diagonal_blocks(matrix: fmpq_mat, size: int) -> fmpq_mat:
    """D: the entries in diagonal blocks of this size."""
    return _masked(matrix, lambda i, j: i // size == j // size)


def sizes(matrix: fmpq_mat) -> fmpq_mat:
    """|.| of each entry."""
    return fmpq_mat(matrix.nrows(), matrix.ncols(), [abs(x) for x in matrix.entries()])


def at_most(left: fmpq_mat, right: fmpq_mat) -> bool:
    """Whether each entry is at most the other matrix's."""
    return all(a <= b for a, b in zip(left.entries(), right.entries(), strict=True))


def largest(matrix: fmpq_mat) -> fmpq:
    """The largest |entry|."""
    return max(abs(x) for x in matrix.entries())


def integers(numbers: random.Random, n: int, size: int) -> fmpq_mat:
    """A strictly lower triangular matrix of small integers."""
    return fmpq_mat(n, n, [fmpq(numbers.randint(-size, size) if j < i else 0) for i in range(n) for j in range(n)])


class Chunk:
    """Unit keys of four rational coordinates, write strengths up to `strongest`, decays up to 1."""

    def __init__(self, numbers: random.Random, n: int, strongest: int) -> None:
        self.n = n
        self.keys = [_unit_vector(numbers) for _ in range(n)]
        if numbers.random() < 0.5:  # repeated keys are where intermediates are large
            self.keys = [self.keys[i % 3] for i in range(n)]
        self.betas = [fmpq(numbers.choice((0, 1, 2, 3, 4)), 4) * strongest for _ in range(n)]
        self.decays = [fmpq(numbers.choice((1, 2, 3, 4, 4)), 4) for _ in range(n)]

    def decay(self, i: int, j: int) -> fmpq:
        """exp(g_i - g_j)."""
        product = fmpq(1)
        for m in range(j + 1, i + 1):
            product *= self.decays[m]
        return product

    @property
    def lower(self) -> fmpq_mat:
        """L."""
        n = self.n
        entries = [
            self.betas[i] * _dot(self.keys[i], self.keys[j]) * self.decay(i, j) if j < i else fmpq(0)
            for i in range(n)
            for j in range(n)
        ]
        return fmpq_mat(n, n, entries)

    def carried(self, key: int, first: int, stop: int) -> list[fmpq]:
        """(I - beta_m k_m k_m^T) ... (I - beta_first k_first k_first^T) k_key, the product over first <= m < stop."""
        vector = self.keys[key]
        for m in range(first, stop):
            along = self.betas[m] * _dot(self.keys[m], vector)
            vector = [x - along * y for x, y in zip(vector, self.keys[m], strict=True)]
        return vector


def _dot(x: list[fmpq], y: list[fmpq]) -> fmpq:
    return sum((a * b for a, b in zip(x, y, strict=True)), fmpq(0))


def _unit_vector(numbers: random.Random) -> list[fmpq]:
    """A rational point of the sphere, by stereographic projection."""
    a = [fmpq(numbers.randint(-3, 3)) for _ in range(3)]
    square = _dot(a, a)
    return [2 * x / (square + 1) for x in a] + [(square - 1) / (square + 1)]


def _chunks(n: int, count: int, strongest: int) -> list[Chunk]:
    numbers = random.Random(64)  # noqa: S311  not for secrets
    return [Chunk(numbers, n, strongest) for _ in range(count)]


@lemma(
    statement="(I - N)(I + N^2)(I + N) = I - N^4; a product of four block-strictly-lower-triangular matrices of "
    "four blocks "
    "is 0; (I + L)^-1 = D^-1 (I - N)(I + N^2), N = E D^-1",
    rests_on=(),
    methods=(Method.EXACT, Method.INSTANCES),
)
def nilpotent_identities() -> str:
    """Why two factors suffice at each level.

    In any ring (1 - x)(1 + x^2)(1 + x) = 1 - x^4: a polynomial identity in one variable, checked on coefficients.
    With T = D + E, D block diagonal and E strictly below it, T = (I + E D^-1) D.  N = E D^-1 is strictly block lower
    triangular: an entry of N^4 needs a chain of five block indices that fall, of which there are four.  Hence N^4 = 0
    and T^-1 = D^-1 (I - N)(I + N^2).  At the lowest level the blocks are single entries and D = I.
    """
    product = np.polymul(np.polymul([-1, 1], [1, 0, 1]), [1, 1])
    require(product.tolist() == [-1, 0, 0, 0, 1], f"the polynomial identity gives coefficients {product.tolist()}")
    falling = np.tril(np.ones((_BLOCKS, _BLOCKS), dtype=int), -1)
    require(not np.linalg.matrix_power(falling, _BLOCKS).any(), "four blocks admit a chain of five")
    require(bool(np.linalg.matrix_power(falling, _BLOCKS - 1).any()), "N^3 vanishes already")
    numbers = random.Random(4)  # noqa: S311
    for _ in range(20):
        lower = integers(numbers, 16, 3)
        one = identity(16)
        d = one + diagonal_blocks(lower, 4)
        n = (one + lower - d) * d.inv()
        require(n * n * n * n == fmpq_mat(16, 16), "N^4 is not 0")
        require(d.inv() * (one - n) * (one + n * n) * (one + lower) == one, "the identity fails")
    return "polynomial coefficients, chains of blocks, 20 integer matrices of 16 x 16"


@lemma(
    statement="levels 4 -> 16 -> 64 take 2 + 3 + 3 = 8 matrix products, and their result is (I + L)^-1, exactly, "
    "with ones "
    "on the diagonal and zeros above",
    rests_on=("gdn_inverse.CHUNK", "gdn_inverse.PRODUCTS"),
    methods=(Method.EXACT, Method.INSTANCES),
)
def eight_products() -> str:
    """The count, by doing it in exact arithmetic with a counter.

    Level 4: L^2 and (I - L)(I + L^2).  Each merge: N = E D^-1; [D^-1; N] N, one product with a stacked left operand,
    whose right operand is pushed once; (D^-1 - D^-1 N)(I + N^2).  Diagonal and upper triangle are exact in any
    precision: they come from 1 * 1, 0 + 0 and 0 * x alone.  The kernel's own chain is run on equal keys, whose
    intermediates are small integers, and its products counted.
    """
    require(kernel.CHUNK == inverse_steps.CHUNK, f"the contract is about chunks of {inverse_steps.CHUNK} tokens")
    require(kernel.LEVELS == inverse_steps.LEVELS, f"the contract's levels are {inverse_steps.LEVELS}")
    require(LEVELS[0] ** len(LEVELS) == CHUNK == LEVELS[-1], "three levels of four do not reach the chunk")
    require(kernel.PRODUCTS == 8, f"PRODUCTS is {kernel.PRODUCTS}: two products, and three per merge, are eight")
    numbers = random.Random(8)  # noqa: S311
    for _ in range(3):
        lower = integers(numbers, CHUNK, 1)
        found, products = _in_products(lower)
        require(products == kernel.PRODUCTS, f"the inverse took {products} products")
        require(found * (identity(CHUNK) + lower) == identity(CHUNK), "eight products do not give the inverse")
    _kernel_counts()
    return "3 integer matrices of 64 x 64, 8 products each, in rationals and in the kernel"


def _kernel_counts() -> None:
    """The kernel's chain on strict lower ones: eight products, and the bidiagonal inverse without an error."""
    ones = jnp.asarray(np.tril(np.ones((kernel.CHUNK, kernel.CHUNK), np.float32), -1))
    with mock.patch.object(kernel, "dot", wraps=kernel.dot) as product:
        (found,) = lockstep([kernel.chain_of(ones, "bf16")])
    require(product.call_count == kernel.PRODUCTS, f"the kernel's inverse takes {product.call_count} products")
    expected = np.eye(kernel.CHUNK) - np.eye(kernel.CHUNK, k=-1)
    require(bool((np.asarray(found) == expected).all()), "the kernel's inverse of equal keys is not the bidiagonal one")


def _in_products(lower: fmpq_mat) -> tuple[fmpq_mat, int]:
    """The inverse of I + L and the number of products."""
    one, count = identity(CHUNK), 0

    def dot(left: fmpq_mat, right: fmpq_mat) -> fmpq_mat:
        nonlocal count
        count += 1
        return left * right

    base = diagonal_blocks(lower, LEVELS[0])
    x = dot(one - base, one + dot(base, base))
    for below, level in itertools.pairwise(LEVELS):
        outer = diagonal_blocks(lower, level) - diagonal_blocks(lower, below)
        n = dot(outer, x)
        stacked = dot(fmpq_mat(2 * CHUNK, CHUNK, x.entries() + n.entries()), n)
        entries = stacked.entries()
        y, square = (fmpq_mat(CHUNK, CHUNK, entries[k * CHUNK**2 : (k + 1) * CHUNK**2]) for k in (0, 1))
        x = dot(x - y, one + square)
    return x, count


@lemma(
    statement="the largest intermediate of the 4 x 4 level is exactly 2 beta^2: 2 for beta <= 1, 8 for beta <= 2",
    rests_on=(),
    methods=(Method.EXACT, Method.EXHAUSTIVE),
)
def level_four_maxima() -> str:
    """L^2 is the only intermediate that is not L or a bounded inverse.

    (L^2)_ij is multilinear in the entries, |L_ij| <= beta for unit keys and decays of at most 1: its maximum over the
    box is taken at a corner, and all 64 corners are tried.  Two chains lead from row 4 to row 1, one from row 3 or row
    4 to the row two above.  Identical keys without decay attain it.  The result (I - L)(I + L^2) is the inverse, whose
    entries are at most beta_i (`inverse_entries_bounded`).
    """
    for beta, expected in ((1, 2), (2, 8)):
        worst = 0
        for corner in itertools.product((-beta, beta), repeat=6):
            matrix = np.zeros((4, 4), dtype=int)
            matrix[np.tril_indices(4, -1)] = corner
            worst = max(worst, int(np.abs(matrix @ matrix).max()))
        require(worst == expected, f"with beta <= {beta} the largest entry of L^2 is {worst}")
        same_keys = beta * np.tril(np.ones((4, 4), dtype=int), -1)
        require(int((same_keys @ same_keys).max()) == expected, "identical keys do not attain the maximum")
    return "64 corners each; attained by identical keys"


@lemma(
    statement="unit keys, beta in [0, 2], decays <= 1: |(T^-1)_ij| <= beta_i exp(g_i - g_j) for i > j, attained; "
    "|N_ij| <= "
    "beta_i, |(N^2)_ij| <= 4 beta_i",
    rests_on=(),
    methods=(Method.EXACT, Method.INSTANCES),
)
def inverse_entries_bounded() -> str:
    """The inverse is the delta rule written out.

    Write H_m = I - beta_m k_m k_m^T, a symmetric matrix with eigenvalues 1 and 1 - beta_m in [-1, 1], so |H_m x| <=
    |x|.

    - (T^-1)_ij = -beta_i exp(g_i - g_j) <k_i, H_(i-1) ... H_(j+1) k_j> for i > j, by induction over forward
      substitution: T^-1_ij = -sum_m L_im T^-1_mj, and H_m x = x - beta_m k_m <k_m, x> telescopes.  Cauchy-Schwarz gives
      the bound; a chunk whose keys i, j agree, with beta = 0 between them, attains it.
    - N = E D^-1: for i in a later block than j, N_ij = beta_i exp(g_i - g_j) <k_i, H_(e-1) ... H_(j+1) k_j>, e the end
      of j's block: at most beta_i.
    - (N^2)_ij = sum over blocks B between of beta_i <k_i, ... (sum over m in B of H ... beta_m k_m k_m^T ...) k_j>;
      the sum over m telescopes to I - H_B, H_B the product over the block, of norm at most 2.  At most two blocks lie
      between the first and the fourth: 4 beta_i.

    The identities are tried exactly on chunks of 16 rational unit keys, random and repeated.
    """
    extreme = fmpq(0)
    for chunk in _chunks(16, 12, strongest=2):
        lower = chunk.lower
        one = identity(16)
        inverse = (one + lower).inv()
        d = one + diagonal_blocks(lower, 4)
        n = (one + lower - d) * d.inv()
        square = n * n
        for i, j in itertools.product(range(16), range(16)):
            if j >= i:
                continue
            beta, decay = chunk.betas[i], chunk.decay(i, j)
            written = -beta * decay * _dot(chunk.keys[i], chunk.carried(j, j + 1, i))
            require(inverse[i, j] == written, f"entry ({i}, {j}) of the inverse is not the delta rule's")
            require(abs(inverse[i, j]) <= beta * decay, f"entry ({i}, {j}) of the inverse passes its bound")
            if i // 4 > j // 4:
                end = (j // 4 + 1) * 4
                written = beta * decay * _dot(chunk.keys[i], chunk.carried(j, j + 1, end))
                require(n[i, j] == written, f"entry ({i}, {j}) of N is not what the argument says")
                require(abs(n[i, j]) <= beta, f"entry ({i}, {j}) of N passes beta")
            require(abs(square[i, j]) <= 4 * beta, f"entry ({i}, {j}) of N^2 passes 4 beta")
            if beta:
                extreme = max(extreme, abs(square[i, j]) / beta)
    _attained()
    return f"12 chunks of 16 keys; (N^2)_ij reaches {float(Fraction(int(extreme.p), int(extreme.q))):.2f} beta_i there"


def _attained() -> None:
    """Equal keys at i and j, beta = 0 between."""
    chunk = _chunks(16, 1, strongest=2)[0]
    i, j = 13, 2
    chunk.keys[i] = chunk.keys[j]
    chunk.betas = [fmpq(0)] * 16
    chunk.betas[i] = fmpq(2)
    inverse = (identity(16) + chunk.lower).inv()
    require(abs(inverse[i, j]) == 2 * chunk.decay(i, j), "the bound of an entry is not attained")


@lemma(
    statement="keys rounded to BF16 have |k|^2 <= (1 + 2^-8)^2: for beta <= 1.984 entries of the inverse stay "
    "within 1.008 "
    "beta_i, and up to beta = 2 each token between may add 1.6 %",
    rests_on=("devices.BF16_UNIT_ROUNDOFF",),
    methods=(Method.EXACT, Method.BALLS),
)
def rounded_keys() -> str:
    """What rounding the normalised keys costs.

    Each coordinate grows by at most 1 + 2**-8, so |k|**2 <= (1 + 2**-8)**2 = 1.00783.  H_m has the eigenvalue
    1 - beta |k|**2, within [-1, 1] while beta |k|**2 <= 2; beyond, its size is at most 2 |k|**2 - 1.  Cauchy-Schwarz
    costs |k_i| |k_j| once.
    """
    longest = (1 + BF16.unit_roundoff) ** 2
    require(longest < Fraction(10079, 10000), f"|k|^2 reaches {float(longest)}")
    require(Fraction(1984, 1000) * longest <= 2, "beta = 1.984 is too large for rounded keys")
    per_token = 2 * longest - 1
    require(per_token < Fraction(1016, 1000), f"a token may add {float(per_token - 1):.4f}")
    with ball_precision():
        whole = float((ball(per_token).log() * (CHUNK - 2)).exp().mid()) * float(longest)
    return f"|k|^2 <= {float(longest):.5f}; a chunk at beta = 2: at most {whole:.2f} beta_i"


@lemma(
    statement="the whole-chunk product passes through C(62, 31) = 465428353255261088, the largest entry of (strict "
    "lower "
    "ones)^32: useless in any precision below 60 bits",
    rests_on=(),
    methods=(Method.EXACT,),
)
def whole_chunk_power() -> str:
    """Identical keys, beta = 1, no decay: (L^k)_ij counts chains of k steps from i down to j, C(i - j - 1, k - 1).

    The largest is C(62, 31), while the inverse has entries of at most 1.  Even FP32 keeps errors of 2**-24 of it.
    """
    power = np.tril(np.ones((CHUNK, CHUNK), dtype=object), -1)
    for _ in range(5):
        power = power.dot(power)
    found = max(int(x) for x in power.ravel())
    require(found == math.comb(62, 31) == 465428353255261088, f"the largest entry of L^32 is {found}")
    ones = [[1 if i == j else (-1 if i == j + 1 else 0) for j in range(CHUNK)] for i in range(CHUNK)]
    lower = fmpq_mat(CHUNK, CHUNK, [fmpq(int(j < i)) for i in range(CHUNK) for j in range(CHUNK)])
    inverse = (identity(CHUNK) + lower).inv()
    require(
        [[int(inverse[i, j].p) for j in range(CHUNK)] for i in range(CHUNK)] == ones, "the inverse is not bidiagonal"
    )
    return f"C(62, 31) = {found}; half an FP32 ulp of it is {found * 2.0**-24:.1e}, the inverse has entries of 1"


@lemma(
    statement="|T^-1 - X| <= |X| |R| (I - |R|)^-1 with R = I - T X, for every unit lower triangular X; and |(I + "
    "M)^-1 - (I + "
    "N)^-1| is covered by its first order and the tail that the a-priori bound charges",
    rests_on=(),
    methods=(Method.EXACT, Method.INSTANCES),
)
def inverse_error_measures() -> str:
    """Both bounds, on right and wrong inverses.

    A posteriori: T X = I - R, so T^-1 = X (I - R)^-1 = X + X R (I + R + R^2 + ...), a finite sum as R is strictly lower
    triangular; sizes give the bound, and all terms of (I - |R|)^-1 are non-negative, so that computing it by
    substitution loses only roundings.  With R' = I - X T the order of factors would be another.
    `verify.gdn.inverse.of_residual` is run on integers and compared exactly.

    A priori: H = (I + N)^-1, M = N + d, |d| <= s: (I + M)^-1 = (I + H d)^-1 H = H - H d H + (H d)^2 H - ...; all
    factors H d are strictly block lower triangular, so that four factors vanish.  The first order H d H is carried
    exactly; the tail is at most S first + S^2 first with S = |H| s, first = S |H|, and the charge of
    `verify.gdn.inverse_levels._neumann_tail` is first + S first + S^2 first.
    """
    numbers = random.Random(16)  # noqa: S311
    for n, size in ((4, 1), (8, 1), (16, 1), (16, 2)):
        for wrong in (0, 1, 3):
            _a_posteriori(numbers, n, size, wrong)
    for _ in range(6):
        _a_priori(numbers)
    return "12 inverses, right and wrong; 6 perturbed levels; both functions of the suite agree with exact arithmetic"


def _a_posteriori(numbers: random.Random, n: int, size: int, wrong: int) -> None:
    one, lower = identity(n), integers(numbers, n, size)
    x = (one + lower).inv() + integers(numbers, n, wrong)
    residual = one - (one + lower) * x
    allowed = sizes(x) * sizes(residual) * (one - sizes(residual)).inv()
    require(at_most(sizes((one + lower).inv() - x), allowed), f"an inverse of {n} x {n} errs by more than is measured")
    computed = measured.of_residual(_floats(sizes(x)), _floats(sizes(residual)))
    exact = _floats(allowed)
    require(bool((computed >= exact).all()), "of_residual is below the exact measure")
    require(bool((computed <= exact * (1 + 2.0**-30) + 1e-300).all()), "of_residual is far above the exact measure")


def _a_priori(numbers: random.Random) -> None:
    one = identity(16)

    def below(matrix: fmpq_mat) -> fmpq_mat:
        return _masked(matrix, lambda i, j: i // 4 > j // 4)

    n, d = below(integers(numbers, 16, 1)), below(integers(numbers, 16, 2))
    inner = (one + n).inv()
    step = sizes(inner) * sizes(d)
    first = step * sizes(inner)
    moved = (one + n + d).inv() - inner
    tail = _floats(step * first + step * step * first)
    higher = _floats(sizes(moved + inner * d * inner))
    require(bool((higher <= tail).all()), "the terms of higher order pass the tail")
    charged = inverse_levels._neumann_tail(_floats(step), _floats(first))  # noqa: SLF001  the suite's own charge
    require(bool((charged == tail + _floats(first)).all()), "_neumann_tail is not first + S first + S^2 first")
    require(bool((_floats(sizes(moved)) <= charged).all()), "a perturbed level errs by more than is charged")


def _floats(matrix: fmpq_mat) -> np.ndarray:
    """Exact where entries are integers below 2**53."""
    n = matrix.nrows()
    return np.array([int(x.p) / int(x.q) for x in matrix.entries()]).reshape(n, matrix.ncols())
