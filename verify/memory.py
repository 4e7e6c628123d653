"""Letting go of compiled kernels before they take a process down.

A compiled kernel holds some two hundred memory mappings, of which Linux gives a process 65530 (vm.max_map_count).  A
compilation that gets none is no error but a segmentation fault.
"""

from __future__ import annotations

import gc
from pathlib import Path

MOST_MAPPINGS = 32_000
"""From here on kernels are dropped: half of what a process may have, since one call can compile many."""


def mappings() -> int:
    """Memory mappings of this process; 0 where the system does not say."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def forget_kernels() -> bool:
    """Drop all compiled kernels if there are many; those that are used again are compiled again.  Says whether."""
    if mappings() <= MOST_MAPPINGS:
        return False
    import jax  # noqa: PLC0415  whoever has kernels has imported it

    jax.clear_caches()
    gc.collect()
    return True
