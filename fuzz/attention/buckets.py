"""Shapes of the hunts: few, so that each kernel is compiled once per process and then reused for every case."""

from __future__ import annotations

import dataclasses
import math

from verify.attention.adversarial import LOG2_UNITS

LANES = 128
"""The grid of queries and of key blocks."""

ANCHOR_KEYS = 16
"""Keys whose scores give the anchor (a test compares it with the kernel's)."""

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A shape with everything else that selects a compiled kernel.

    Attributes:
        name: what the command line calls it.
        shape: batch, heads, kv_heads, q_len, kv_len, head_dim.
        causal: bottom-right aligned.
        scale: hexadecimal float; None is 1 / sqrt(head_dim).
        config: block_q, block_kv, fragment; 0 for what the kernel chooses.
        why: which paths of the kernel it reaches.
        window: (left, right).
        softcap: hexadecimal float.
        sinks: whether heads have sinks, whose logits are drawn.
        segments: whether tokens have segment ids, which are drawn.
        v_dim: width of the values; None is head_dim.
    """

    name: str
    shape: tuple[int, int, int, int, int, int]
    causal: bool
    scale: str | None
    config: tuple[int, int, int]
    why: str
    window: tuple[int | None, int | None] | None = None
    softcap: str | None = None
    sinks: bool = False
    segments: bool = False
    v_dim: int | None = None

    @property
    def q_len(self) -> int:
        """Queries."""
        return self.shape[3]

    @property
    def kv_len(self) -> int:
        """Keys."""
        return self.shape[4]

    @property
    def head_dim(self) -> int:
        """Width of a query or key."""
        return self.shape[5]

    @property
    def key_grid(self) -> tuple[int, int]:
        """Keys per block and fragment: where boundaries may lie, for draws.

        What the kernel chooses under a window begins on a grid of 512 keys, and has fragments of 256.
        """
        _, block, fragment = self.config
        return block or 512, fragment or 256

    @property
    def log2_factor(self) -> float:
        """What q . k is multiplied with to give the score in log2 units; exactly 1 for LOG2_UNITS."""
        if self.scale == LOG2_UNITS:
            return 1.0
        return LOG2_E * (1.0 / math.sqrt(self.head_dim) if self.scale is None else float.fromhex(self.scale))

    def last_key(self, row: int) -> int:
        """The last key that the row sees, the first one if it sees none."""
        if not self.causal:
            return self.kv_len - 1
        return min(max(row + self.kv_len - self.q_len, 0), self.kv_len - 1)


_NEGATIVE = (-float.fromhex(LOG2_UNITS)).hex()

_ALL = (
    Bucket(
        name="256x256-d128", shape=(1, 2, 1, 256, 256, 128), causal=True, scale=LOG2_UNITS, config=(256, 256, 128),
        why="one block of two fragments: the check before the last P V, the replay of the resident block alone",
    ),
    Bucket(
        name="512x512-d64", shape=(1, 2, 1, 512, 512, 64), causal=True, scale=LOG2_UNITS, config=(128, 128, 128),
        why="four by four blocks: jumps in the first, a middle, the diagonal and the last; replays over fetched blocks",
    ),
    Bucket(
        name="300x129-d64", shape=(1, 2, 1, 300, 129, 64), causal=True, scale=LOG2_UNITS, config=(128, 128, 128),
        why="more queries than keys: 171 rows without a key, a last block of one key",
    ),
    Bucket(
        name="129x300-d64", shape=(1, 4, 2, 129, 300, 64), causal=True, scale=_NEGATIVE, config=(128, 128, 128),
        why="GQA, a last query block of one row, ragged keys, a negative scale",
    ),
    Bucket(
        name="256x384-d64-full", shape=(1, 2, 1, 256, 384, 64), causal=False, scale=None, config=(128, 128, 128),
        why="not causal, the default scale",
    ),
    Bucket(
        name="128x512-d128-full", shape=(1, 1, 1, 128, 512, 128), causal=False, scale=LOG2_UNITS,
        config=(128, 512, 256), why="one wide block of fragments of 256 keys: two lane groups per fragment",
    ),
    Bucket(
        name="128x200-d256", shape=(1, 1, 1, 128, 200, 256), causal=True, scale=LOG2_UNITS, config=(128, 256, 128),
        why="head_dim 256, a masked and ragged last fragment",
    ),
    Bucket(
        name="512x1280-d64-woven", shape=(1, 1, 1, 512, 1280, 64), causal=True, scale=LOG2_UNITS,
        config=(512, 1280, 128), why="a block large enough that the softmax of some fragments stands beside the "
        "products of earlier ones, and that queries are finished between them",
    ),
)  # fmt: skip

_FEATURED = (
    Bucket(
        name="window-384-d64", shape=(1, 2, 1, 384, 384, 64), causal=True, scale=LOG2_UNITS, config=(128, 128, 128),
        why="a window over parts of two and three blocks: anchors chosen late, the first block not the first key's",
        window=(150, None),
    ),
    Bucket(
        name="band-300x200-d64", shape=(1, 2, 2, 300, 200, 64), causal=False, scale=LOG2_UNITS, config=(128, 128, 128),
        why="a window to both sides, rows without a key at the top", window=(60, 40),
    ),
    Bucket(
        name="softcap-256-d128", shape=(1, 2, 1, 256, 256, 128), causal=True, scale=LOG2_UNITS, config=(128, 128, 128),
        why="logits bounded at 50 nats", softcap=(50.0).hex(),
    ),
    Bucket(
        name="sinks-129x300-d64", shape=(1, 4, 2, 129, 300, 64), causal=True, scale=LOG2_UNITS, config=(128, 128, 128),
        why="sinks per head far above and below the scores", sinks=True,
    ),
    Bucket(
        name="segments-300-d64", shape=(1, 2, 1, 300, 300, 64), causal=True, scale=LOG2_UNITS, config=(128, 128, 128),
        why="segment ids of any runs, rows without a key among them", segments=True,
    ),
    Bucket(
        name="all-256-d64-v128", shape=(1, 2, 1, 256, 256, 64), causal=True, scale=LOG2_UNITS, config=(128, 128, 128),
        why="everything at once, values wider than keys", window=(100, 0), softcap=(80.0).hex(), sinks=True,
        segments=True, v_dim=128,
    ),
)  # fmt: skip

_MASKED = (
    Bucket(
        name="window-0-256-d64", shape=(1, 1, 1, 256, 256, 64), causal=True, scale=LOG2_UNITS, config=(128, 128, 128),
        why="each row sees its own key alone", window=(0, None),
    ),
    Bucket(
        name="window-127-384-d64", shape=(1, 2, 1, 384, 384, 64), causal=True, scale=LOG2_UNITS,
        config=(128, 128, 128), why="128 keys: the window ends one key before the next block", window=(127, 0),
    ),
    Bucket(
        name="window-128-384-d64", shape=(1, 2, 1, 384, 384, 64), causal=True, scale=LOG2_UNITS,
        config=(128, 128, 128), why="129 keys: the window just reaches the next block", window=(128, 0),
    ),
    Bucket(
        name="window-overlapping-1024x1536-d64", shape=(1, 1, 1, 1024, 1536, 64), causal=True, scale=LOG2_UNITS,
        config=(512, 0, 0), why="key blocks that overlap: one step per query block, all keys of a query in one go",
        window=(300, 0),
    ),
    Bucket(
        name="window-right-200x300-d64", shape=(1, 1, 1, 200, 300, 64), causal=False, scale=LOG2_UNITS,
        config=(128, 128, 128), why="bounded to the right alone, not causal", window=(None, 3),
    ),
    Bucket(
        name="window-far-128x33024-d64", shape=(1, 1, 1, 128, 33024, 64), causal=True, scale=LOG2_UNITS,
        config=(128, 256, 128), why="positions beyond 16 bits, behind a window", window=(1023, 0),
    ),
    Bucket(
        name="heads-8-2-64x64-d64", shape=(1, 8, 2, 64, 64, 64), causal=True, scale=LOG2_UNITS,
        config=(128, 128, 128), why="four query heads per KV head: a ratio that is not the KV head count",
    ),
)  # fmt: skip

_REPLAYED = (
    Bucket(
        name="512x512-d64", shape=(1, 1, 1, 512, 512, 64), causal=True, scale=LOG2_UNITS, config=(128, 128, 128),
        why="four query blocks that see one to four key blocks",
    ),
    Bucket(
        name="384x640-d64-gqa", shape=(1, 2, 1, 384, 640, 64), causal=True, scale=LOG2_UNITS, config=(128, 128, 128),
        why="grouped heads, three query blocks that see three to five key blocks",
    ),
    Bucket(
        name="1024x1536-d64-overlapping", shape=(1, 1, 1, 1024, 1536, 64), causal=True, scale=LOG2_UNITS,
        config=(512, 0, 0), why="key blocks that overlap: a query block has one step, which fails and is replayed",
        window=(500, 0),
    ),
    Bucket(
        name="256x512-d64-wide", shape=(1, 1, 1, 256, 512, 64), causal=False, scale=LOG2_UNITS, config=(128, 256, 128),
        why="two fragments per key block, not causal: replays of the resident block and of fetched ones",
    ),
)  # fmt: skip

_LONG = (
    Bucket(
        name="128x4096-d64-full", shape=(1, 1, 1, 128, 4096, 64), causal=False, scale=LOG2_UNITS,
        config=(128, 512, 128), why="32 fragments, every row sees all of them",
    ),
    Bucket(
        name="128x4000-d64", shape=(1, 1, 1, 128, 4000, 64), causal=True, scale=None, config=(128, 128, 128),
        why="a ragged last fragment, 32 blocks of one fragment",
    ),
)  # fmt: skip

_RELATED = (
    Bucket(
        name="relations-256-d64", shape=(1, 2, 1, 256, 256, 64), causal=False, scale=LOG2_UNITS,
        config=(128, 128, 128), why="not causal: every relation holds",
    ),
    Bucket(
        name="relations-200-d64-causal", shape=(1, 2, 1, 200, 200, 64), causal=True, scale=None,
        config=(128, 128, 128), why="causal, ragged: packing, grouped heads, constants, scaled values",
    ),
)  # fmt: skip

_SCHEDULED = (
    Bucket(
        name="schedule-256-d64", shape=(1, 1, 1, 256, 256, 64), causal=True, scale=LOG2_UNITS, config=(128, 128, 128),
        why="two by two blocks: fetches ahead, a replay that fetches again",
    ),
)  # fmt: skip


def _named(buckets: tuple[Bucket, ...]) -> dict[str, Bucket]:
    return {bucket.name: bucket for bucket in buckets}


BUCKETS, FEATURE_BUCKETS, MASK_BUCKETS = _named(_ALL), _named(_FEATURED), _named(_MASKED)
REPLAY_BUCKETS, LONG_BUCKETS = _named(_REPLAYED), _named(_LONG)
RELATION_BUCKETS, SCHEDULE_BUCKETS = _named(_RELATED), _named(_SCHEDULED)
