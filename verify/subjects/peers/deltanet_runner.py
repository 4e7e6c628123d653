"""Run deltanet-tpu on case files, in its own environment: `python -P deltanet_runner.py CASES RESULTS PRECISION`.

This file is run by another interpreter, whose JAX is older than the suite's: it imports nothing of the suite.  A case
file (`*.npz`) holds q, k, v, beta, g, state and scale of one sequence; a result file of the same name holds out and
state, or error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PALLAS_INTERPRET", "1")

import jax.numpy as jnp
import numpy as np
from deltanet_tpu import chunk_gdn  # type: ignore[import-not-found]

CHUNK = 128
"""The only one that the kernel takes."""


def run(case: Path, precision: str) -> dict[str, np.ndarray]:
    """One call of chunk_gdn: the batch is one sequence."""
    with np.load(case) as arrays:
        q, k, v = (jnp.asarray(arrays[name])[None].astype(jnp.bfloat16) for name in ("q", "k", "v"))
        beta, g, state = (jnp.asarray(arrays[name])[None] for name in ("beta", "g", "state"))
        scale = float(arrays["scale"])
    try:
        out, final = chunk_gdn(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            output_final_state=True,
            chunk_size=CHUNK,
            precision=precision,
            scale=scale,
            is_inference=True,
        )
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is its result
        return {"error": np.array(f"{type(error).__name__}: {error}"[:300])}
    return {"out": np.asarray(out[0].astype(jnp.float32)), "state": np.asarray(final[0])}


def main() -> None:
    """Run every case that has no result yet, so that a killed run can be taken up."""
    cases, results, precision = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    results.mkdir(parents=True, exist_ok=True)
    for case in sorted(cases.glob("*.npz")):
        target = results / case.name
        if not target.exists():
            partial = target.with_suffix(".partial.npz")
            np.savez(partial, **run(case, precision))  # pyright: ignore[reportArgumentType]  names are the arrays'
            partial.replace(target)
            print(case.stem, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
