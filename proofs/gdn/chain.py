"""The chain of chunks: what rounding adds to updates, outputs and states, and how it is carried on."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
from flint import fmpq, fmpq_mat

from proofs.gdn.inverse import at_most, identity, sizes
from proofs.lemma import Assumption, Method, lemma, require
from verify.gdn import contract

_TOKENS, _CHANNELS, _LANES, _CHUNKS = 6, 3, 2, 5


def _draw(numbers: random.Random, rows: int, columns: int, size: int, *, of: int = 1) -> fmpq_mat:
    """A matrix of fractions n / of with |n| <= size."""
    return fmpq_mat(rows, columns, [fmpq(numbers.randint(-size, size), of) for _ in range(rows * columns)])


@lemma(
    statement="V^ - (V - W E) = delta, out^ - out and S^ - S are an exact map of E plus what this chunk adds, and "
    "|left E_m| <= sum over chunks of |left Phi K| |delta| + |left Phi| |rest|, for roundings of any size",
    rests_on=(),
    methods=(Method.EXACT, Method.INSTANCES),
    assumptions=(
        Assumption(
            "the kernel's steps are those of the contract",
            "verify/tests/kernels/gdn/test_gdn_chunk.py::test_one_tile_of_the_delta_rule",
        ),
    ),
)
def gdn_chain_bound() -> str:
    """Sections 5 and 6 of docs/gdn-contract.md.

    With X^ = X + xi, right-hand sides off by rho_v and rho_k, sums and roundings eU, eW, eV, and the state S + E as the
    operand S + E + sigma, multiplying out gives

        V^ - (V - W E) = xi (beta v - beta k exp(G) S) + X^ (rho_v - rho_k S) - X rho_k E - xi (beta k exp(G) + rho_k) E
                         + eU - eW S - eW E - W^ sigma + eV,

    an identity: nothing of second order is dropped.  With the residual first, r = beta v - beta k exp(G) S as the
    operand r - beta k exp(G) E + rho, it is xi (r - beta k exp(G) E) + X^ rho + eV, where with weights b = beta exp(G)

        rho = (written^ - beta v) - (b^ - b) (k S)^ - b (kappa (S + E) + k^ sigma + e) + roundings.

    Outputs and states are both Q S + P V, off by (Q - P W) E and
    P delta + (P^ - P) V^ + (Q^ - Q)(S + E) + Q^ sigma + sums.  With E_(m+1) = T_m E_m + K_m delta_m + rest_m, a row
    `left` of what meets the state is multiplied by exact transitions first and by K before sizes are taken.  Coq
    proves the four statements for matrices of every size (gdn_chain_bound.v).  Here they are tried on fractions, and
    `_Carried`, the contract's own bookkeeping, is run on integers: its bound is at least |left E| for errors as large
    as allowed, also where it merges transitions that have become small, and no larger than the theorem's.
    """
    numbers = random.Random(41)  # noqa: S311  not for secrets
    for _ in range(12):
        _updates_and_reads(numbers)
        _residual_updates(numbers)
    closest = max(_carries(numbers, small=small) for small in (False, True) for _ in range(6))
    _norms_bound_products(numbers)
    return f"12 chunks and 12 chains of {_CHUNKS} chunks; an error reaches {closest:.2f} of what is carried"


def _updates_and_reads(numbers: random.Random) -> None:
    """One chunk with errors of every kind, in fractions: the identities, and the bound term by term."""
    n, d, lanes = _TOKENS, _CHANNELS, _LANES

    def error(rows: int, columns: int) -> fmpq_mat:
        return _draw(numbers, rows, columns, 3, of=8)

    x, right_v, right_k, state = (_draw(numbers, *shape, 2) for shape in ((n, n), (n, lanes), (n, d), (d, lanes)))
    xi, rho_v, rho_k, moved = error(n, n), error(n, lanes), error(n, d), error(d, lanes)
    sigma, of_u, of_w, of_v = error(d, lanes), error(n, lanes), error(n, d), error(n, lanes)
    x_found = x + xi
    w_found = x_found * (right_k + rho_k) + of_w
    v_found = x_found * (right_v + rho_v) + of_u - w_found * (state + moved + sigma) + of_v
    right = right_v - right_k * state
    v, w = x * right, x * right_k
    delta = v_found - (v - w * moved)
    written = xi * right + x_found * (rho_v - rho_k * state) - x * rho_k * moved - xi * (right_k + rho_k) * moved
    written = written + of_u - of_w * state - of_w * moved - w_found * sigma + of_v
    require(delta == written, "the identity of the updates fails")
    allowed = sizes(xi * right) + sizes(x_found) * (sizes(rho_v) + sizes(rho_k) * sizes(state))
    allowed += sizes(x) * sizes(rho_k) * sizes(moved) + sizes(xi) * (
        sizes(right_k * moved) + sizes(rho_k) * sizes(moved)
    )
    allowed += sizes(of_u) + sizes(of_w) * (sizes(state) + sizes(moved)) + sizes(w_found) * sizes(sigma) + sizes(of_v)
    require(at_most(sizes(delta), allowed), "an update errs by more than the bound")
    q, p, of_q, of_p, of_o = (
        *(_draw(numbers, *s, 2) for s in ((n, d), (n, n))),
        error(n, d),
        error(n, n),
        error(n, lanes),
    )
    found = (q + of_q) * (state + moved + sigma) + (p + of_p) * v_found + of_o
    rest = found - (q * state + p * v) - (q - p * w) * moved
    written = p * delta + of_p * v_found + of_q * (state + moved) + (q + of_q) * sigma + of_o
    require(rest == written, "the identity of outputs and states fails")
    allowed = sizes(p) * sizes(delta) + sizes(of_p) * sizes(v_found) + sizes(of_q) * sizes(state + moved)
    require(at_most(sizes(rest), allowed + sizes(q + of_q) * sizes(sigma) + sizes(of_o)), "an output errs by more")


def _residual_updates(numbers: random.Random) -> None:
    """One chunk with the residual first, with errors of every kind."""
    n, d, lanes = _TOKENS, _CHANNELS, _LANES

    def error(rows: int, columns: int) -> fmpq_mat:
        return _draw(numbers, rows, columns, 3, of=8)

    def weighted(weights: list[fmpq], x: fmpq_mat) -> fmpq_mat:
        return fmpq_mat(x.nrows(), x.ncols(), [weights[i // x.ncols()] * y for i, y in enumerate(x.entries())])

    x, written, keys, state = (_draw(numbers, *shape, 2) for shape in ((n, n), (n, lanes), (n, d), (d, lanes)))
    weights, of_weights = (_draw(numbers, n, 1, 2, of=of).entries() for of in (1, 8))
    xi, of_written, kappa, moved = error(n, n), error(n, lanes), error(n, d), error(d, lanes)
    sigma, of_read, rounding, of_v = error(d, lanes), error(n, lanes), error(n, lanes), error(n, lanes)
    read = (keys + kappa) * (state + moved + sigma) + of_read
    has = [a + b for a, b in zip(weights, of_weights, strict=True)]
    operand = written + of_written - weighted(has, read) + rounding
    v_found = (x + xi) * operand + of_v
    right_k = weighted(weights, keys)
    right = written - right_k * state
    delta = v_found - (x * right - x * right_k * moved)
    of_product = kappa * (state + moved) + (keys + kappa) * sigma + of_read
    rho = of_written - weighted(of_weights, read) - weighted(weights, of_product) + rounding
    require(delta == xi * (right - right_k * moved) + (x + xi) * rho + of_v, "the identity of residuals fails")
    allowed = sizes(xi * right) + sizes(xi) * sizes(right_k * moved) + sizes(x + xi) * sizes(rho) + sizes(of_v)
    require(at_most(sizes(delta), allowed), "an update from a residual errs by more than the bound")


def _carries(numbers: random.Random, *, small: bool) -> float:
    """`_Carried` over a few chunks; returns the largest share of its bound that an error takes.

    `small`: a chunk in the middle forgets all but a 2**-70th, so that what came before is merged.
    """
    d = _CHANNELS
    carried = contract._Carried([], [])  # noqa: SLF001  the contract's own bookkeeping
    moved, theorem = fmpq_mat(d, _LANES), []
    for chunk in range(_CHUNKS):
        forgets = small and chunk == _CHUNKS // 2
        step = _draw(numbers, d, d, 2) * (fmpq(1, 2**70) if forgets else fmpq(1, 2))
        keys = _draw(numbers, d, _TOKENS, 2)
        delta, rest = _draw(numbers, _TOKENS, _LANES, 3, of=8), _draw(numbers, d, _LANES, 3, of=8)
        moved = step * moved + keys * delta + rest
        added = [(keys, delta), (identity(d), rest)]
        theorem = [(step * x, y) for x, y in theorem] + added
        carried.advance(_floats(step), [(_floats(x), np.abs(_floats(y))) for x, y in added])
    left = _draw(numbers, 2, d, 2)
    bound = carried.through(_floats(left), _LANES)
    error = np.abs(_floats(left * moved))
    require(bool((error <= bound * (1 + 2.0**-40)).all()), "an error of the state passes what is carried")
    exact = sum((sizes(left * x) * sizes(y) for x, y in theorem), fmpq_mat(2, _LANES))
    require(
        bool((bound <= _floats(exact) * (1 + 2.0**-40) + 2.0**-50).all()), "more is carried than the theorem asks for"
    )
    # A drawn row of zeros meets nothing: an error of 0 is then all of a bound of 0.
    return float(np.divide(error, bound, out=np.zeros_like(error), where=bound > 0.0).max())


def _norms_bound_products(numbers: random.Random) -> None:
    """|sum x_k y_k|^2 <= sum x_k^2 sum y_k^2, on squares of integers: the other bound of a carried product."""
    for _ in range(20):
        x, y = ([Fraction(numbers.randint(-9, 9)) for _ in range(7)] for _ in range(2))
        product = sum((a * b for a, b in zip(x, y, strict=True)), Fraction(0))
        require(
            product**2 <= sum(a * a for a in x) * sum(b * b for b in y), "a product passes the norms of its factors"
        )


def _floats(matrix: fmpq_mat) -> np.ndarray:
    return np.array([int(x.p) / int(x.q) for x in matrix.entries()]).reshape(matrix.nrows(), matrix.ncols())
