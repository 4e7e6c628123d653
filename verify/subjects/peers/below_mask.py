"""Finite logits below the number that a kernel writes for masked keys: `python -m verify.subjects.peers.below_mask`.

Most kernels mark a masked key by a large negative number, often -0.7 of FP32's largest, in the units of their scores.
A row whose visible logits are all smaller takes its maximum from masked keys.  128 equal keys along e0, equal queries,
causal, V[j] = j: row i is due the mean of 0 .. i, whatever the logit.  The contract ends at smaller logits, so that
nobody is judged here: expected and got are printed side by side.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.problem import BF16, AttentionProblem
from verify.subjects.registry import load, names

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS, HEAD_DIM = 128, 128
KEY = -(2.0**63)
QUERIES = (1.1875 * 2.0**64, 1.5 * 2.0**64)
"""Logits of -2.02e38, whose log2 units lie below -0.7 of the largest, and -2.55e38, which lies below itself."""

SHOWN = (0, 1, 127)


def problem(query: float) -> AttentionProblem:
    """Every logit is `query * KEY` nats."""
    q, k, v = (np.zeros((1, 1, TOKENS, HEAD_DIM), np.float32) for _ in range(3))
    q[..., 0], k[..., 0] = query, KEY
    v[:] = np.arange(TOKENS)[:, None]
    return AttentionProblem(q.astype(BF16), k.astype(BF16), v.astype(BF16), causal=True, scale=1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what every named kernel gives for some rows."""
    parser = argparse.ArgumentParser(prog="python -m verify.subjects.peers.below_mask", description=__doc__)
    parser.add_argument("subjects", nargs="*", default=[n for n in names() if "gradients" not in n], metavar="SUBJECT")
    for query in QUERIES:
        print(f"logits {query * KEY:.4g}: rows {SHOWN} are due {[row / 2 for row in SHOWN]}")
        for name in parser.parse_args(arguments).subjects:
            subject = load(name)
            missing = subject.missing()
            got = missing or subject(problem(query)).out[0, 0, list(SHOWN), 0].astype(float).tolist()
            print(f"  {name} {subject.version}: {got}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
