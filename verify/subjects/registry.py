"""Subjects by name: the built-in ones, and any at `package.module:object`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from verify.subjects.lookup import find
from verify.subjects.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Callable

FLYWHEEL = "flywheel.attention"
BUILT_IN = {
    FLYWHEEL: "verify.subjects.ours:FLYWHEEL",
    f"{FLYWHEEL}[online]": "verify.subjects.ours:ONLINE",
    "jax.nn.dot_product_attention": "verify.subjects.jax_nn:XLA",
    "jax.nn.dot_product_attention[gradients]": "verify.subjects.jax_nn:XLA_GRADIENTS",
    "jax.splash_attention": "verify.subjects.jax_pallas:SPLASH",
    "jax.flash_attention": "verify.subjects.jax_pallas:FLASH",
}
"""They need nothing but JAX."""

PEERS = {
    "tokamax.splash_attention": "verify.subjects.peers.tokamax:SPLASH",
    "tokamax.splash_attention[exp]": "verify.subjects.peers.tokamax:SPLASH_EXP",
    "tokamax.splash_attention[max_logit_const=30]": "verify.subjects.peers.tokamax:SPLASH_CONSTANT",
    "flywheel_tpu.flash_attn_func": "verify.subjects.peers.flywheel_tpu:DENSE",
    "flywheel_tpu.flash_attn_varlen_func": "verify.subjects.peers.flywheel_tpu:VARLEN",
}
"""They need the group `peers`."""


class SubjectError(ValueError):
    """A subject that cannot be loaded."""


def names() -> tuple[str, ...]:
    """Names of all subjects the suite knows, ours first."""
    return (*BUILT_IN, *PEERS)


def is_ours(name: str) -> bool:
    """Whether a name is that of our kernel, in any of its configurations."""
    return name.partition("[")[0] == FLYWHEEL


def load(name: str, *, operation: str | None = None) -> Subject:
    """The subject of that name, or what stands at `package.module:object`: a `Subject`, or a plain function.

    A plain function is called as `function(q, k, v, causal=..., scale=...)` and held to the defaults of `Subject`; one
    whose first parameter is named `problem` gets the `AttentionProblem` and returns a `SubjectResult`.

    Args:
        name: of the subject, or where it stands.
        operation: what it has to compute, "attention" or "attention_gradients"; None takes either.

    Raises:
        SubjectError: no such name, nothing callable stands there, or it computes something else.
    """
    found = _found(name)
    if operation is not None and found.operation != operation:
        message = f"subject {name!r} must compute {operation}, got {found.operation}"
        raise SubjectError(message)
    return found


def _found(name: str) -> Subject:
    path, found = find(name, Subject, {**BUILT_IN, **PEERS}, SubjectError)
    if isinstance(found, Subject):
        return found
    call: Callable[..., Any] = found  # type: ignore[assignment]
    return Subject(name=path, call=call, takes_problem=next(iter(_parameters(found)), None) == "problem")


def _parameters(function: object) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # some callables have no signature
        return ()
