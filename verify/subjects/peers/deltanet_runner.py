"""Run deltanet-tpu on case files, in its own environment: `python -P deltanet_runner.py CASES RESULTS PRECISION`.

With `-` for CASES it stays, and reads the names of cases from its input, one per line; each comes back on its output
once `RESULTS/NAME` holds the result.

This file is run by another interpreter, whose JAX is older than the suite's: it imports nothing of the suite.  A case
file (`*.npz`) holds q, k, v, beta, g, state and scale of one sequence; a result file of the same name holds out and
state, or error.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PALLAS_INTERPRET", "1")

import jax
import jax.numpy as jnp
import numpy as np
from deltanet_tpu import chunk_gdn  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 128
"""The only one that the kernel takes."""


@functools.cache
def kernel(scale: float, precision: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The kernel, compiled once per shape."""
    return jax.jit(
        functools.partial(
            chunk_gdn,
            output_final_state=True,
            chunk_size=CHUNK,
            precision=precision,
            scale=scale,
            is_inference=True,
        )
    )


def run(case: Path, precision: str) -> dict[str, np.ndarray]:
    """One call of chunk_gdn: the batch is one sequence."""
    with np.load(case) as arrays:
        q, k, v = (jnp.asarray(arrays[name])[None].astype(jnp.bfloat16) for name in ("q", "k", "v"))
        beta, g, state = (jnp.asarray(arrays[name])[None] for name in ("beta", "g", "state"))
        scale = float(arrays["scale"])
    try:
        out, final = kernel(scale, precision)(q, k, v, g, beta, initial_state=state)
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is its result
        return {"error": np.array(f"{type(error).__name__}: {error}"[:300])}
    return {"out": np.asarray(out[0].astype(jnp.float32)), "state": np.asarray(final[0])}


def answer(case: Path, target: Path, precision: str) -> None:
    """Write a case's result, whole or not at all."""
    partial = target.with_suffix(".partial.npz")
    np.savez(partial, **run(case, precision))  # pyright: ignore[reportArgumentType]  names are the arrays'
    partial.replace(target)


def serve(results: Path, precision: str) -> None:
    """Run cases as they are named, until the input ends."""
    # What libraries print must not pass for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        case = Path(line.rstrip("\n"))
        answer(case, results / case.name, precision)
        print(case, file=answers, flush=True)


def main() -> None:
    """Run every case that has no result yet, so that a killed run can be taken up; or serve."""
    results, precision = Path(sys.argv[2]), sys.argv[3]
    results.mkdir(parents=True, exist_ok=True)
    if sys.argv[1] == "-":
        serve(results, precision)
        return
    for case in sorted(Path(sys.argv[1]).glob("*.npz")):
        target = results / case.name
        if not target.exists():
            answer(case, target, precision)
            print(case.stem, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
