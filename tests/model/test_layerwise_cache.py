"""The row buffer and the chunks that go in and out of it own their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pcr_core.index.chunk import ChunkLayout, LayerShape
from pcr_core.model.key_blocks import KEY_BLOCK
from pcr_core.model.layerwise_cache import LayerwiseCache
from pcr_core.model.row_buffer import RowBuffer
from pcr_core.model.streams import inline_streams
from pcr_core.model.transfers import in_runs
from pcr_core.tiers import HostPool, SlabPlan

SHAPES = (LayerShape(2, 4, 6), LayerShape(1, 8, 8))
CHUNK = 4
STREAMS = inline_streams(torch.device("cpu"))
LAYOUT = ChunkLayout(SHAPES, CHUNK, "F32", 4)


def new_buffer(tokens: int = 64) -> RowBuffer:
    buffer = RowBuffer(SHAPES, torch.float32, torch.device("cpu"))
    buffer.reserve(tokens)
    return buffer


def new_cache(tokens: int = 64) -> LayerwiseCache:
    return LayerwiseCache(new_buffer(tokens), STREAMS)


def states(layer: int, count: int, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    """New keys and values of a layer, each position and head its own number."""
    shape = SHAPES[layer]
    k = torch.arange(shape.kv_heads * count * shape.k_dim).view(
        1, -1, count, shape.k_dim
    )
    v = torch.arange(shape.kv_heads * count * shape.v_dim).view(
        1, -1, count, shape.v_dim
    )
    return k + fill, v - fill


def fill_chunks(cache: LayerwiseCache, slots: dict[int, Any], count: int) -> None:
    """Forward ``count`` tokens from position 0, handing out the chunks of ``slots``."""
    cache.begin(0, stores=in_runs(slots, sorted(slots), CHUNK))
    for layer in range(len(SHAPES)):
        cache.layers[layer].update(*states(layer, count, 0.5))
    cache.end(count)


@pytest.fixture
def pool() -> HostPool:
    return HostPool(LAYOUT, SlabPlan(8, LAYOUT.nbytes))


def slots(pool: HostPool, *order: int) -> dict[int, Any]:
    """Slots of a pool, by chunk index, in the order they are lent."""
    lent = [pool.allocate() for _ in order]
    return dict(zip(order, lent, strict=True))


def test_chunks_own_their_memory(pool: HostPool) -> None:
    buffer, chunks = new_buffer(), slots(pool, 0, 1)
    fill_chunks(LayerwiseCache(buffer, STREAMS), chunks, 10)
    before = [bytes(slot.view) for slot in chunks.values()]
    for tensor in (*buffer.keys, *buffer.values):
        tensor.fill_(float("nan"))
    assert [bytes(slot.view) for slot in chunks.values()] == before
    for slot in chunks.values():
        keys, _ = slot.layer(0)
        assert keys.isfinite().all()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_what_is_stored_comes_back(pool: HostPool, order: tuple[int, ...]) -> None:
    """Whatever the slots' order in memory; neighbours are copied as one run."""
    chunks = slots(pool, *order)
    first = new_buffer()
    fill_chunks(LayerwiseCache(first, STREAMS), chunks, 12)
    second = new_buffer()
    cache = LayerwiseCache(second, STREAMS)
    cache.begin(12, loads=in_runs(chunks, [0, 1, 2], CHUNK))
    for layer in range(len(SHAPES)):
        new = states(layer, 3, 100.0)
        keys, values = cache.layers[layer].update(*new)
        assert torch.equal(keys[:, :, :12], first.keys[layer][:, :, :12])
        assert torch.equal(values[:, :, :12], first.values[layer][:, :, :12])
        assert torch.equal(keys[:, :, 12:15], new[0])
        assert torch.equal(values[:, :, 12:15], new[1])
    cache.end(3)
    assert cache.length == 15


def test_runs_join_neighbours_only(pool: HostPool) -> None:
    chunks = slots(pool, 0, 1, 3, 2, 4)
    runs = in_runs(chunks, [0, 1, 2, 3, 4], CHUNK)
    assert [(run.position, run.count) for run in runs] == [
        (0, 2),
        (8, 1),
        (12, 1),
        (16, 1),
    ]
    assert [run.count for run in in_runs(chunks, [1, 3], CHUNK)] == [1, 1]
    assert in_runs(chunks, [], CHUNK) == []


def test_a_layer_does_only_its_own_copies(pool: HostPool) -> None:
    chunks = slots(pool, 0)
    chunks[0].view[:] = bytes(LAYOUT.nbytes)
    chunks[0].layer(0)[0].fill_(7.0)
    chunks[0].layer(1)[0].fill_(8.0)
    buffer = new_buffer()
    cache = LayerwiseCache(buffer, STREAMS)
    cache.begin(CHUNK, loads=in_runs(chunks, [0], CHUNK))
    assert cache.get_seq_length() == CHUNK, "known before the data is there"
    cache.layers[0].update(*states(0, 1, 0.0))
    assert (buffer.keys[0][0, :, :CHUNK] == 7.0).all()
    assert (buffer.keys[1] == 0.0).all()


def test_a_second_forward_copies_nothing_again(pool: HostPool) -> None:
    chunks = slots(pool, 0, 1)
    cache = new_cache()
    fill_chunks(cache, chunks, 8)
    before = bytes(chunks[0].view)
    cache.begin(8)
    for layer in range(len(SHAPES)):
        cache.layers[layer].update(*states(layer, 2, 9.0))
    assert bytes(chunks[0].view) == before


def test_mask_sizes_are_whole_key_blocks() -> None:
    cache = new_cache(600)
    layer = cache.layers[0]
    for length, query, keys in (
        (0, 1, 512),
        (0, 512, 512),
        (0, 513, 1024),
        (511, 1, 512),
    ):
        cache.begin(length)
        assert layer.get_mask_sizes(query) == (keys, 0)
        assert layer.get_mask_sizes(torch.arange(query)) == (keys, 0)  # before 5.24
    assert layer.get_max_length() == layer.get_max_cache_shape() == 1024


def test_the_buffer_grows_in_whole_blocks_and_never_shrinks() -> None:
    buffer = new_buffer(1)
    assert buffer.capacity == KEY_BLOCK
    first = buffer.keys[0]
    buffer.reserve(KEY_BLOCK)
    assert buffer.keys[0] is first
    buffer.reserve(KEY_BLOCK + 1)
    assert buffer.capacity == 2 * KEY_BLOCK
    buffer.reserve(1)
    assert buffer.capacity == 2 * KEY_BLOCK
    per_token = sum(s.kv_heads * (s.k_dim + s.v_dim) for s in SHAPES) * 4
    assert buffer.nbytes == 2 * KEY_BLOCK * per_token
    assert all((tensor == 0).all() for tensor in (*buffer.keys, *buffer.values))


def test_clearing_covers_all_that_was_written() -> None:
    buffer = new_buffer(600)
    cache = LayerwiseCache(buffer, STREAMS)
    cache.begin(520)
    bad = [tensor * float("nan") for tensor in states(0, 40, 1.0)]
    cache.layers[0].update(*bad)  # and the forward breaks: no end()
    assert cache.length == 520
    buffer.clear(cache.reach)
    for tensor in (*buffer.keys, *buffer.values):
        assert tensor.isfinite().all()
