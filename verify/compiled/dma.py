"""A model of the DMA engine, stated so that it can be disbelieved.

All copies between HBM and on-chip memory share one pipe of the generation's nominal bandwidth, reads and writes alike,
in the order they were started; a copy takes `LATENCY_SECONDS` before its first byte moves.  Copies that stay on the
chip take the latency alone.  Contention with other cores, HBM page and bank effects and the cost of small strided
pieces are not modelled: `smallest_piece` says how fine the strided copies were, and below a few kilobytes expect less
than nominal bandwidth.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verify.compiled.generations import Generation
    from verify.compiled.scalar import Word

GRANULE_BYTES = 32
"""A DMA's size is counted in granules (checked against block shapes: bf16[512,1024] is 32768 of them)."""

STEP_BYTES = 512
"""A strided copy moves steps of this size (checked: a copy of whole rows has steps_per_stride * 512 bytes = its
stride)."""

LATENCY_SECONDS = 600e-9
"""From the start of a copy to its first byte: the order of published HBM latencies on TPU, not a measurement."""


@dataclasses.dataclass
class DmaEngine:
    """The state of the copies of one run.

    Attributes:
        generation: whose bandwidth.
        cores: how many cores share it.
        bytes_moved: by kind of copy, as `hbm_to_vmem`.
        copies: how many of each kind.
        unknown_sizes: copies whose size is a run-time value that is not known.
        unmatched_waits: waits for copies that were never started (or on a flag that is not known).
        smallest_piece: bytes of the smallest contiguous piece of a strided copy; None without strided copies.
        stall_cycles: cycles that waits added.
        stalls: the same by address of the wait.
    """

    generation: Generation
    cores: int = 1
    bytes_moved: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    copies: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unknown_sizes: int = 0
    unmatched_waits: int = 0
    smallest_piece: int | None = None
    stall_cycles: float = 0.0
    stalls: collections.defaultdict[int, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    _pipe_free: float = 0.0
    _pending: dict[int, collections.deque[tuple[float, int]]] = dataclasses.field(default_factory=dict)

    def start(self, now: float, kind: str, granules: Word, flag: Word, steps: Word, stride: Word) -> None:
        """A copy is started at cycle `now`; it will signal `flag`, and takes `steps` of every `stride` granules."""
        size = 0 if granules is None else granules * GRANULE_BYTES
        self.unknown_sizes += granules is None
        self.copies[kind] += 1
        self.bytes_moved[kind] += size
        if steps and stride and steps * STEP_BYTES != stride * GRANULE_BYTES:
            piece = steps * STEP_BYTES
            self.smallest_piece = piece if self.smallest_piece is None else min(piece, self.smallest_piece)
        begin = now + LATENCY_SECONDS * self.generation.clock_hz
        if "hbm" in kind:
            rate = self.generation.hbm_bytes_per_cycle / self.cores
            self._pipe_free = max(begin, self._pipe_free) + size / rate
            begin = self._pipe_free
        if flag is not None:
            self._pending.setdefault(flag, collections.deque()).append((begin, granules or 0))

    def wait(self, now: float, flag: Word, granules: Word, pc: int) -> None:
        """The core waits on `flag` for that many granules, from cycle `now` on, at address `pc`."""
        queue = self._pending.get(flag) if flag is not None else None
        if not queue:
            self.unmatched_waits += 1
            return
        ready, left = now, queue[0][1] if granules is None else granules
        while queue and left > 0:
            finish, size = queue.popleft()
            ready = max(ready, finish)
            if size > left:
                queue.appendleft((finish, size - left))
            left -= size
        self.unmatched_waits += left > 0
        self.stall_cycles += ready - now
        self.stalls[pc] += ready - now
