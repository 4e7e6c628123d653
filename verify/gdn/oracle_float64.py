"""Every element of f in float64, each with a proved bound: token by token, or in chunks (docs/gdn-oracle-bounds.md).

Holds for any summation order with or without fused multiply-add, with or without flush-to-zero.  Assumptions about
numpy, tested in `verify/tests/gdn/test_gdn_numpy.py`: exp, log and log1p err by at most 2 ulp of float64, exp(0) is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.float64_chunks import CHUNK, chunked_rule
from verify.gdn.float64_rule import HeadInputs, HeadResult, rule
from verify.gdn.float64_stages import Approx, decay_of, rule_inputs
from verify.gdn.layout import SequenceResult, collect, initial_state, key_head
from verify.gdn.problem import shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verify.gdn.float64_stages import RuleInputs
    from verify.gdn.problem import Problem
    from verify.gdn.reference import GdnReference

TIER, TIER_CHUNKED = "float64", "float64 chunked"


def gdn(problem: Problem) -> GdnReference:
    """Compute f of every element, and every slot's state, token by token, with proved errors."""
    return collect(problem, TIER, lambda sequence: _sequence(problem, sequence, lambda head, _: rule(head)))


def gdn_chunked(problem: Problem, *, chunk: int = CHUNK) -> GdnReference:
    """The same in chunks, several times faster on long sequences.

    Raises:
        ValueError: chunk is not positive.
    """
    if chunk < 1:
        message = f"chunk must be at least 1, got {chunk}"
        raise ValueError(message)
    return collect(
        problem, TIER_CHUNKED, lambda sequence: _sequence(problem, sequence, lambda x, g: chunked_rule(x, g, chunk))
    )


def head_inputs(problem: Problem, sequence: int, inputs: RuleInputs, decay: Approx, head: int) -> HeadInputs:
    """What one value head of a sequence reads."""
    key = key_head(problem, head)
    return HeadInputs(
        q=_of(inputs.q, key),
        k=_of(inputs.k, key),
        v=_of(inputs.v, head),
        beta=_of(inputs.beta, head),
        decay=_of(decay, head),
        state=initial_state(problem, sequence)[head],
        scale=problem.scale,
        unit_keys=inputs.unit_keys,
        taken=problem.sequences.taken(sequence),
    )


def _of(x: Approx, head: int) -> Approx:
    return Approx(np.ascontiguousarray(x.value[:, head]), np.ascontiguousarray(x.error[:, head]))


def _sequence(problem: Problem, sequence: int, compute: Callable[[HeadInputs, Approx], HeadResult]) -> SequenceResult:
    inputs = rule_inputs(problem, sequence)
    decay = decay_of(inputs.g)
    _, n_v, _, _ = shapes(problem)
    heads = [head_inputs(problem, sequence, inputs, decay, head) for head in range(n_v)]
    return stack([compute(inputs_of_head, _of(inputs.g, head)) for head, inputs_of_head in enumerate(heads)])


def stack(heads: Sequence[HeadResult]) -> SequenceResult:
    """The heads of one sequence."""
    return SequenceResult(
        np.stack([h.out for h in heads], axis=1),
        np.stack([h.out_error for h in heads], axis=1),
        np.stack([h.state for h in heads]),
        np.stack([h.state_error for h in heads]),
    )
