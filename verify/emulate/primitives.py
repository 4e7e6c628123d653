"""JAX's primitives in float64: what each equation computes exactly, but for float64's own rounding.

Floating-point arrays are float64 whatever their dtype in the jaxpr; integers and booleans keep theirs.  Sums and matrix
products come with their terms (`Terms`), so that an arithmetic can add them up in its own way.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np
from jax import lax
from scipy import special

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import jax.extend.core as jex

    Evaluate = Callable[[Mapping[str, Any], tuple[np.ndarray, ...]], np.ndarray]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def is_float(dtype: Any) -> bool:  # noqa: ANN401  numpy's or JAX's
    """Whether values of that dtype are held in float64."""
    return bool(jax.numpy.issubdtype(dtype, np.floating))


def held(x: Any, dtype: Any) -> np.ndarray:  # noqa: ANN401
    """A value as the interpreter holds it."""
    array = np.asarray(x)
    return array.astype(np.float64) if is_float(dtype) else array.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a sum adds up.

    Attributes:
        each: the terms in the order in which they are written, each of the result's shape.
        size: the sum of their absolute values.
        count: how many there are.
        products: each is a product of two numbers, which an arithmetic may have to round.
    """

    each: Callable[[], Iterator[np.ndarray]]
    size: Callable[[], np.ndarray]
    count: int
    products: bool = False


def _quotient(_: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
    a, b = args
    if np.issubdtype(a.dtype, np.integer):
        quotient = np.where(b == 0, -1, np.abs(a) // np.where(b == 0, 1, np.abs(b)))
        return (np.where(b == 0, quotient, quotient * np.sign(a) * np.sign(b))).astype(a.dtype)
    return a / b


def _logistic(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _round(params: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
    (x,) = args
    to_even = params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return np.rint(x) if to_even else np.copysign(np.floor(np.abs(x) + 0.5), x)


def _power(params: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
    (x,) = args
    n = int(params["y"])
    found = np.ones_like(x)
    for _ in range(abs(n)):
        found = found * x
    return found if n >= 0 else 1.0 / found


def _shift(args: tuple[np.ndarray, ...], *, left: bool = False, logical: bool = True) -> np.ndarray:
    x, by = args
    bits = x.dtype.itemsize * 8
    within = (by >= 0) & (by < bits)
    by = np.where(within, by, 0).astype(x.dtype)
    if left:
        return np.where(within, x << by, 0).astype(x.dtype)
    if logical:
        unsigned = x.view(np.dtype(f"u{x.dtype.itemsize}"))
        return np.where(within, (unsigned >> by.astype(unsigned.dtype)).view(x.dtype), 0).astype(x.dtype)
    return (x >> np.where(within, by, bits - 1).astype(x.dtype)).astype(x.dtype)


def _select(_: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
    which, *cases = args
    if which.ndim == 0:
        return cases[int(which)]
    if len(cases) > 2:
        return np.choose(which.astype(np.intp), cases)
    return np.where(which.astype(bool), cases[-1], cases[0])


def _unary(function: Callable[[np.ndarray], np.ndarray]) -> Evaluate:
    return lambda _, args: function(args[0])


def _binary(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Evaluate:
    return lambda _, args: function(args[0], args[1])


def _broadcast(params: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
    x, shape = args[0], params["shape"]
    inner = [1] * len(shape)
    for axis, place in enumerate(params["broadcast_dimensions"]):
        inner[place] = x.shape[axis]
    return np.broadcast_to(x.reshape(inner), shape)


def _slice(params: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
    strides = params["strides"] or (1,) * args[0].ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return args[0][tuple(slice(a, b, s) for a, b, s in bounds)]


def _starts(x: np.ndarray, sizes: tuple[int, ...], indices: tuple[np.ndarray, ...]) -> tuple[slice, ...]:
    """Where a dynamic slice lies: moved inside, as XLA does."""
    found: list[slice] = []
    for extent, size, index in zip(x.shape, sizes, indices, strict=True):
        start = min(max(int(index), 0), extent - size)
        found.append(slice(start, start + size))
    return tuple(found)


def _dynamic_slice(params: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
    return args[0][_starts(args[0], params["slice_sizes"], args[1:])]


def _dynamic_update_slice(_: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
    x, update, *indices = args
    found = x.copy()
    found[_starts(x, update.shape, tuple(indices))] = update
    return found


def _pad(params: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
    x, value = args
    for axis, (low, high, interior) in enumerate(params["padding_config"]):
        moved = np.moveaxis(x, axis, 0)
        n = len(moved) + max(len(moved) - 1, 0) * interior
        spread = np.full((n, *moved.shape[1:]), value, moved.dtype)
        spread[:: interior + 1] = moved
        padded = np.full((max(low, 0) + n + max(high, 0), *moved.shape[1:]), value, moved.dtype)
        padded[max(low, 0) : max(low, 0) + n] = spread
        stop = len(padded) + min(high, 0)
        x = np.moveaxis(padded[max(-low, 0) : stop], 0, axis)
    return x


def _gather(params: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
    """JAX gathers the numbers of the elements, and these gather the elements; out-of-bounds ones are NaN or 0."""
    x, indices = args
    numbers = np.arange(x.size, dtype=np.int32).reshape(x.shape)
    taken = np.asarray(lax.gather_p.bind(numbers, indices, **(dict(params) | {"fill_value": -1})))
    missing = np.nan if x.dtype == np.float64 else 0
    fill = missing if params["fill_value"] is None else params["fill_value"]
    return np.where(taken < 0, np.asarray(fill, x.dtype), x.ravel()[np.maximum(taken, 0)])


def _iota(params: Mapping[str, Any], _: tuple[np.ndarray, ...]) -> np.ndarray:
    shape, axis = params["shape"], params["dimension"]
    inner = [1] * len(shape)
    inner[axis] = shape[axis]
    return np.broadcast_to(held(np.arange(shape[axis]).reshape(inner), params["dtype"]), shape)


def _converted(params: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
    (x,), dtype = args, params["new_dtype"]
    if is_float(dtype) or x.dtype != np.float64:
        return held(x, dtype)
    if np.dtype(dtype) == np.bool_:
        return x != 0
    info = np.iinfo(dtype)
    # Towards zero; NaN gives 0 and what is too large the extremes, as XLA does.
    clipped = np.clip(np.nan_to_num(np.trunc(x), nan=0.0), float(info.min), float(info.max))
    return np.where(clipped >= float(info.max), info.max, clipped.astype(np.int64)).astype(dtype)


def _reduce(function: Callable[..., np.ndarray]) -> Evaluate:
    return lambda params, args: np.asarray(function(args[0], axis=tuple(params["axes"])))


def _arg(function: Callable[..., np.ndarray]) -> Evaluate:
    return lambda params, args: np.asarray(function(args[0], axis=params["axes"][0])).astype(params["index_dtype"])


def _cumulative(function: np.ufunc) -> Evaluate:
    def run(params: Mapping[str, Any], args: tuple[np.ndarray, ...]) -> np.ndarray:
        axis = params["axis"]
        x = np.flip(args[0], axis) if params["reverse"] else args[0]
        found = function.accumulate(x, axis=axis)
        return np.flip(found, axis) if params["reverse"] else found

    return run


EXACT: dict[str, Evaluate] = {
    # What moves, chooses or compares.
    "broadcast_in_dim": _broadcast,
    "reshape": lambda p, a: a[0].reshape(p["new_sizes"]),
    "transpose": lambda p, a: a[0].transpose(p["permutation"]),
    "squeeze": lambda p, a: np.squeeze(a[0], tuple(p["dimensions"])),
    "expand_dims": lambda p, a: np.expand_dims(a[0], tuple(p["dimensions"])),
    "rev": lambda p, a: np.flip(a[0], tuple(p["dimensions"])),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "concatenate": lambda p, a: np.concatenate(a, axis=p["dimension"]),
    "pad": _pad,
    "iota": _iota,
    "copy": lambda _, a: a[0],
    "copy_p": lambda _, a: a[0],
    "stop_gradient": lambda _, a: a[0],
    "optimization_barrier": lambda _, a: a[0],
    "select_n": _select,
    "clamp": lambda _, a: np.minimum(np.maximum(a[1], a[0]), a[2]),
    "max": _binary(np.maximum),
    "min": _binary(np.minimum),
    "neg": _unary(np.negative),
    "abs": _unary(np.abs),
    "sign": _unary(np.sign),
    "floor": _unary(np.floor),
    "ceil": _unary(np.ceil),
    "round": _round,
    "is_finite": _unary(np.isfinite),
    "eq": _binary(np.equal),
    "ne": _binary(np.not_equal),
    "lt": _binary(np.less),
    "le": _binary(np.less_equal),
    "gt": _binary(np.greater),
    "ge": _binary(np.greater_equal),
    "and": _binary(np.bitwise_and),
    "or": _binary(np.bitwise_or),
    "xor": _binary(np.bitwise_xor),
    "not": _unary(np.bitwise_not),
    "shift_left": lambda _, a: _shift(a, left=True),
    "shift_right_logical": lambda _, a: _shift(a),
    "shift_right_arithmetic": lambda _, a: _shift(a, logical=False),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "cummax": _cumulative(np.maximum),
    "cummin": _cumulative(np.minimum),
}

ROUNDED: dict[str, Evaluate] = {
    "add": _binary(np.add),
    "add_any": _binary(np.add),
    "sub": _binary(np.subtract),
    "mul": _binary(np.multiply),
    "div": _quotient,
    "rem": _binary(np.fmod),
    "square": _unary(np.square),
    "one_minus_square": _unary(lambda x: (1.0 - x) * (1.0 + x)),
    "integer_pow": _power,
    "sqrt": _unary(np.sqrt),
    "rsqrt": _unary(lambda x: 1.0 / np.sqrt(x)),
    "exp": _unary(np.exp),
    "exp2": _unary(np.exp2),
    "expm1": _unary(np.expm1),
    "log": _unary(np.log),
    "log1p": _unary(np.log1p),
    "tanh": _unary(np.tanh),
    "logistic": _unary(_logistic),
    "sin": _unary(np.sin),
    "cos": _unary(np.cos),
    "pow": _binary(np.power),
    "erf": _unary(special.erf),
    "convert_element_type": _converted,
    "reduce_precision": lambda _, a: a[0],
    "reduce_prod": _reduce(np.prod),
    "cumprod": _cumulative(np.multiply),
}
"""Equations whose floating-point result an arithmetic rounds; sums and products of matrices are in `summed`."""

SUMS = ("reduce_sum", "cumsum", "dot_general")


def summed(eqn: jex.JaxprEqn, args: tuple[np.ndarray, ...]) -> tuple[np.ndarray, Terms]:
    """The result of a sum, and its terms."""
    name = eqn.primitive.name
    if name == "dot_general":
        return _dot(eqn.params["dimension_numbers"], *args)
    if name == "reduce_sum":
        axes = tuple(eqn.params["axes"])
        moved = np.moveaxis(args[0], axes, range(len(axes)))
        flat = moved.reshape(-1, *moved.shape[len(axes) :])
        return np.asarray(flat.sum(axis=0)), Terms(lambda: iter(flat), lambda: np.abs(flat).sum(axis=0), len(flat))
    return _cumsum(eqn.params, args[0])


def _cumsum(params: Mapping[str, Any], x: np.ndarray) -> tuple[np.ndarray, Terms]:
    """All partial sums; term t goes to every partial sum from t on."""
    axis = params["axis"]
    moved = np.moveaxis(x, axis, 0)
    forward = moved[::-1] if params["reverse"] else moved

    def back(y: np.ndarray) -> np.ndarray:
        return np.moveaxis(y[::-1] if params["reverse"] else y, 0, axis)

    def each() -> Iterator[np.ndarray]:
        for t in range(len(forward)):
            term = np.zeros_like(forward)
            term[t:] = forward[t]
            yield back(term)

    value = back(np.cumsum(forward, axis=0))
    return value, Terms(each, lambda: back(np.cumsum(np.abs(forward), axis=0)), len(forward))


def _dot(numbers: Any, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, Terms]:  # noqa: ANN401
    """A batched matrix product: batch dimensions, then those of the left operand, then those of the right."""
    (contract_l, contract_r), (batch_l, batch_r) = numbers
    a, batch, rows = _as_matrices(left, batch_l, contract_l, last=True)
    b, _, columns = _as_matrices(right, batch_r, contract_r, last=False)
    shape = (*batch, *rows, *columns)

    def each() -> Iterator[np.ndarray]:
        for k in range(a.shape[-1]):
            yield (a[:, :, k, None] * b[:, k, None, :]).reshape(shape)

    value = (a @ b).reshape(shape)
    return value, Terms(each, lambda: (np.abs(a) @ np.abs(b)).reshape(shape), a.shape[-1], products=True)


def _as_matrices(
    x: np.ndarray, batch: tuple[int, ...], contract: tuple[int, ...], *, last: bool
) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
    """`[batch, free, contracted]` (or contracted first), and the shapes of the batch and of the free dimensions."""
    free = [d for d in range(x.ndim) if d not in batch and d not in contract]
    order = (*batch, *free, *contract) if last else (*batch, *contract, *free)
    of_batch, of_free = (tuple(x.shape[d] for d in dims) for dims in (batch, free))
    count, inner = int(np.prod(of_batch, dtype=int)), int(np.prod([x.shape[d] for d in contract], dtype=int))
    outer = int(np.prod(of_free, dtype=int))
    return x.transpose(order).reshape(count, *((outer, inner) if last else (inner, outer))), of_batch, of_free
