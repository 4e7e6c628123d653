"""Which blocks are chosen: by generation, without a table, under bands."""

from __future__ import annotations

import dataclasses

import pytest
from jax.experimental.pallas import tpu as pltpu

from flywheel.attention.generation import ABSENT, KNOWN, Hardware, hardware
from flywheel.attention.schedule import Band
from flywheel.attention.tiling import (
    MOST_LOOKAHEAD,
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


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("generation", KNOWN)
def test_key_blocks_overlap_under_a_narrow_band(generation: str, *, wide: bool) -> None:
    """Of one length of band to the next it is decided whether key blocks overlap; they are no longer than needed.

    Only where the kernel fetches blocks, and may choose their length; they fit into VMEM at every head_dim.
    """
    core, n = AttentionConfig(generation=generation), 2**16
    most = TABLE[generation][wide].block_q // 2
    for keys, stride in ((1, 512), (1024, 512), (most, 512), (most + 1, 0)):
        tiling = resolve(core, n, n, wide=wide, band=Band(1 - keys, 0))
        assert tiling.block_kv - tiling.overlap == (stride or tiling.block_kv)
        if tiling.overlap:
            needed = tiling.block_q + keys - 1
            assert needed <= tiling.block_kv < needed + 2 * stride
            assert tiling.lookahead == MOST_LOOKAHEAD
            width = 256 if wide else 128
            assert vmem_bytes(tiling, width, width) <= min(VMEM_LIMIT, KNOWN[generation].vmem_bytes)
    window = Band(-1023, 0)
    assert resolve(core, n, n, wide=wide, band=window).overlap
    plain: list[tuple[AttentionConfig, int, int, dict[str, bool]]] = [
        (core, n, n, {"online": True}),
        (core, n, n, {"segments": True}),
        (dataclasses.replace(core, lookahead=1), n, n, {}),
        (dataclasses.replace(core, block_kv=4096), n, n, {}),
        (dataclasses.replace(core, block_q=640), 640 * 8, n, {}),
        (core, n - 1, n, {}),
        (core, n, n - 128, {}),
        (core, 4096, 4096, {}),
        (core, n, 2**23, {}),
    ]
    for config, q_len, kv_len, options in plain:
        assert not resolve(config, q_len, kv_len, wide=wide, band=window, **options).overlap, (config, q_len, kv_len)
    assert not resolve(core, n, n, wide=wide, band=Band(None, 0)).overlap
    assert not resolve(core, n, n, wide=wide, band=Band(-1023, None)).overlap


def test_blocks_under_a_band() -> None:
    """Under a band of at most half a block of queries, blocks of keys are as long as those of queries."""
    core = KNOWN["v6e"]
    usual = TABLE["v6e"][True]
    for keys, block_kv in ((1, usual.block_q), (usual.block_q // 2, usual.block_q), (usual.block_q, usual.block_kv)):
        assert default_blocks(core, online=False, wide=True, band_keys=keys).block_kv == block_kv
    assert default_blocks(core, online=False, wide=True, band_keys=None) == usual
