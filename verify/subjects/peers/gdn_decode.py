"""The decode kernels of Gated DeltaNet for campaigns: of every sequence of a layer call the first token alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.subjects.gdn import GdnSubject, layer_limits
from verify.subjects.peers import gdn_layers

if TYPE_CHECKING:
    from verify.gdn.problem import GdnProblem


def first_tokens(problem: GdnProblem) -> GdnProblem:
    """The layer call with one token per sequence and no padding; nothing else changes."""
    starts = problem.sequences.boundaries[:-1]
    sequences = dataclasses.replace(problem.sequences, boundaries=np.arange(len(starts) + 1))
    return dataclasses.replace(
        problem, qkv=problem.qkv[starts], a=problem.a[starts], b=problem.b[starts], sequences=sequences
    )


def _lacking(problem: GdnProblem) -> str | None:
    if not problem.sequences.count or (problem.sequences.lengths == 0).any():
        return "a decode step has one token per sequence"
    return layer_limits(problem)


def _decoding(subject: GdnSubject, name: str) -> GdnSubject:
    return dataclasses.replace(
        subject, name=f"verify.subjects.peers.gdn_decode:{name}", lacking=_lacking, computes=first_tokens
    )


FLYWHEEL_TPU = _decoding(gdn_layers.FLYWHEEL_TPU_DECODE, "FLYWHEEL_TPU")
TOKAMAX = _decoding(gdn_layers.TOKAMAX_DECODE, "TOKAMAX")
