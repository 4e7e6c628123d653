"""The one place where JAX is configured, before it is imported.

`import verify` applies it.  Why each flag is set (`verify.backend` probes what came of them):

- `xla_allow_excess_precision=false`: otherwise BF16 intermediates stay FP32, and a kernel looks better than it is.
- `xla_cpu_max_isa=AVX`: otherwise x*y+z contracts to a fused multiply-add, which a TPU v6e does not do.
- `xla_cpu_multi_thread_eigen=false`, `OPENBLAS_NUM_THREADS=1`: one thread per process, one process per core.
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
    missing = [flag for flag in XLA_FLAGS if flag.split("=")[0] not in named]
    if missing and "jax" in sys.modules:
        message = f"import verify before jax: XLA reads its flags once, and {' '.join(missing)} was not set in time"
        raise RuntimeError(message)
    os.environ["XLA_FLAGS"] = " ".join([*present, *missing])
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not tpu_present():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
