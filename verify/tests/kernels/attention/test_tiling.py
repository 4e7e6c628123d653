"""Which blocks are chosen: by generation, without a table, under bands."""

from __future__ import annotations

import pytest
from jax.experimental.pallas import tpu as pltpu

from flywheel.attention.generation import ABSENT, KNOWN, Hardware, hardware
from flywheel.attention.tiling import (
    TABLE,
    VMEM_LIMIT,
    AttentionConfig,
    blocks_without_table,
    default_blocks,
    resolve,
    vmem_bytes,
)

pytestmark = pytest.mark.smoke

LONG = 1 << 15


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("generation", KNOWN)
def test_blocks_of_a_generation(generation: str, *, wide: bool) -> None:
    """A generation's blocks are those of the table, cut down to short calls, and what the caller says wins."""
    config = AttentionConfig(generation=generation)
    tiling = resolve(config, LONG, LONG, wide=wide)
    assert (tiling.block_q, tiling.block_kv, tiling.fragment) == TABLE[generation][wide]
    assert (resolve(config, 300, 129, wide=wide).block_q, resolve(config, 300, 129, wide=wide).block_kv) == (384, 256)
    pinned = resolve(AttentionConfig(block_kv=512, generation=generation), LONG, LONG, wide=wide)
    assert (pinned.block_q, pinned.block_kv) == (tiling.block_q, 512)
    width = 256 if wide else 128
    assert vmem_bytes(tiling, width, width) <= min(VMEM_LIMIT, KNOWN[generation].vmem_bytes)


@pytest.mark.parametrize(
    ("version", "cores", "name"),
    [("TPU_V5E", 1, "v5e"), ("TPU_V6E", 1, "v6e"), ("TPU_7X", 1, "v7x"), ("TPU_V5P", 2, None), ("TPU_8T", 1, None)],
)
def test_the_local_tpu_is_asked(version: str, cores: int, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a generation the device that JAX has decides; one without a table is described by what JAX says of it."""
    info = pltpu.get_tpu_info_for_chip(getattr(pltpu.ChipVersion, version), cores)
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: info)
    found = hardware(None)
    assert found.name == name
    assert (found.mxu_width, found.vmem_bytes) == (info.mxu_column_size, info.vmem_capacity_bytes)
    # A grid that cores share is not walked in one order, which fetching ahead needs.
    assert resolve(AttentionConfig(), LONG, LONG).lookahead == (1 if cores > 1 else 2)


def test_without_a_tpu() -> None:
    """A machine without one traces for a core that stands for none in particular."""
    assert hardware(None) == ABSENT


def test_blocks_without_a_table() -> None:
    """They are the table's, fragments as wide as the matrix unit asks, and fewer queries where VMEM is small."""
    for wide in (False, True):
        assert blocks_without_table(KNOWN["v6e"], wide=wide) == TABLE["v6e"][wide]
        assert blocks_without_table(KNOWN["v5e"], wide=wide) == TABLE["v6e"][wide]._replace(fragment=256)
    small = Hardware(None, 256, 16 * 2**20)
    sizes = blocks_without_table(small, wide=True)
    assert sizes.block_q < TABLE["v6e"][True].block_q
    tiling = resolve(AttentionConfig(*sizes), LONG, LONG)
    assert vmem_bytes(tiling, 256, 256) <= small.vmem_bytes


def test_blocks_under_a_band() -> None:
    """Under a band of at most half a block of queries, blocks of keys are as long as those of queries."""
    core = KNOWN["v6e"]
    usual = TABLE["v6e"][True]
    for keys, block_kv in ((1, usual.block_q), (usual.block_q // 2, usual.block_q), (usual.block_q, usual.block_kv)):
        assert default_blocks(core, online=False, wide=True, band_keys=keys).block_kv == block_kv
    assert default_blocks(core, online=False, wide=True, band_keys=None) == usual
