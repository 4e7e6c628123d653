"""The one place where JAX is configured, before it is imported.

`import verify` applies it.  Why each flag is set (`verify.backend` probes what came of them):

- `xla_allow_excess_precision=false`: otherwise BF16 intermediates stay FP32, and a kernel looks better than it is.
- `xla_cpu_max_isa=AVX`: otherwise x*y+z contracts to a fused multiply-add, which a TPU v6e does not do.
- `xla_cpu_multi_thread_eigen=false`, `OPENBLAS_NUM_THREADS=1`: one thread per process, one process per core.
- `xla_backend_optimization_level=0`: tests and reports compile hundreds of kernels and run each a few times; LLVM's
  optimiser changes no bit (a deep test says so) and takes a quarter of the time. `python -m fuzz`
  compiles few and runs them thousands of times, so it leaves this one out (`MANY_RUNS`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

XLA_FLAGS = (
    "--xla_allow_excess_precision=false",
    "--xla_cpu_max_isa=AVX",
    "--xla_cpu_multi_thread_eigen=false",
)

QUICK_TO_COMPILE = "--xla_backend_optimization_level=0"
MANY_RUNS = "FLYWHEEL_MANY_RUNS"
"""In the environment: few kernels run thousands of times, so that XLA's optimiser pays (`fuzz` sets it)."""


def tpu_present() -> bool:
    """Whether this machine exposes a TPU (the device nodes that libtpu itself looks for)."""
    dev = Path("/dev")
    vfio = dev / "vfio"
    return any(dev.glob("accel*")) or (vfio.is_dir() and any(p.name.isdigit() for p in vfio.iterdir()))


def configure() -> None:
    """Set the flags that JAX and OpenBLAS read once, when they are first imported.

    Flags that the user has already set win over ours; `verify.backend.probe` then measures what came of it.

    Raises:
        RuntimeError: jax was imported before and its flags are not ours, so that no verdict could be trusted.
    """
    present = os.environ.get("XLA_FLAGS", "").split()
    named = {flag.split("=")[0] for flag in present}
    wanted = XLA_FLAGS if MANY_RUNS in os.environ else (*XLA_FLAGS, QUICK_TO_COMPILE)
    missing = [flag for flag in wanted if flag.split("=")[0] not in named]
    if "jax" in sys.modules and any(flag in XLA_FLAGS for flag in missing):
        message = f"import verify before jax: XLA reads its flags once, and {' '.join(missing)} was not set in time"
        raise RuntimeError(message)
    os.environ["XLA_FLAGS"] = " ".join([*present, *missing])
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not tpu_present():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
