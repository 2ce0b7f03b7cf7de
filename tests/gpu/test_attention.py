"""TorchAttention on a GPU against itself on the CPU: padded batches, flash kernels, gathered pages."""

from __future__ import annotations

import random

import pytest
import torch

from speccache_api.geometry import KVDtype, KVGeometry
from speccache_runtime.cache.pool import KVPool, PoolShape
from speccache_runtime.model.attention import AttentionBatch, Segment
from speccache_runtime.model.torch_attention import TorchAttention
from speccache_runtime.tensors import TORCH_DTYPES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PAGE = 16
PAGES = 80


def build(segments: list[tuple[int, int]], device: str) -> AttentionBatch:
    """A batch over pages in random order, the same for every device."""
    numbers = list(range(PAGES))
    random.Random(2).shuffle(numbers)
    made, own, start = [], [], 0
    for length, kv_len in segments:
        count = -(-kv_len // PAGE)
        pages, numbers = numbers[:count], numbers[count:]
        own += [pages[i // PAGE] * PAGE + i % PAGE for i in range(kv_len - length, kv_len)]
        made.append(Segment(start, length, torch.tensor(pages, device=device), kv_len))
        start += length
    return AttentionBatch(torch.tensor(own, device=device), tuple(made))


SEGMENTS = [
    [(1, 300)],
    [(1, 30), (1, 9), (1, 64)],
    [(8, 40), (8, 8)],
    [(20, 60), (3, 3), (1, 50)],
    [(64, 64)],
    [(128, 700)],
]


def make_pool(device: str, dtype: KVDtype) -> KVPool:
    """The same numbers on every device."""
    pool = KVPool(PoolShape(KVGeometry.heads(1, 2, 64), PAGE, dtype), PAGES, torch.device(device))
    g = torch.Generator().manual_seed(3)
    for buffer in pool.layer(0):
        buffer.copy_(torch.randn(buffer.shape, generator=g).to(torch.bfloat16))
    return pool


def rows_of(count: int, group: int, seed: int) -> list[torch.Tensor]:
    """q, k and v."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(count, heads, 64, generator=g) for heads in (2 * group, 2, 2)]


def tolerance(dtype: KVDtype) -> dict[str, float]:
    return {"atol": 2e-2, "rtol": 2e-2} if dtype == "bfloat16" else {"atol": 1e-4, "rtol": 1e-4}


@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("group", [1, 4])
def test_gpu_equals_cpu(segments: list[tuple[int, int]], dtype: KVDtype, group: int) -> None:
    rows = [row.to(TORCH_DTYPES[dtype]) for row in rows_of(sum(length for length, _ in segments), group, 4)]
    backend, outs, pools = TorchAttention(group), [], []
    for device, numbers in (("cuda", dtype), ("cpu", "float32")):
        pool, batch = make_pool(device, numbers), build(segments, device)
        q, *new = (row.to(device, TORCH_DTYPES[numbers]) for row in rows)
        outs.append(backend(pool.layer(0), q, tuple(new), backend.prepare(batch, pool), 0.125))
        pools.append(pool)
    torch.testing.assert_close(outs[0].float().cpu(), outs[1], **tolerance(dtype))
    for on_gpu, on_cpu in zip(pools[0].layer(0), pools[1].layer(0), strict=True):
        assert torch.equal(on_gpu.float().cpu(), on_cpu)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_graph_captured_once_replays_batches_of_other_lengths(rows: int, dtype: KVDtype) -> None:
    """A layer's attention as one CUDA graph: only tensors that stay in place change between replays."""
    group, requests = 4, 4
    pool, expected_pool = make_pool("cuda", dtype), make_pool("cuda", dtype)
    backend = TorchAttention(group)
    captured = backend.prepare_for_capture(pool, requests=requests, rows=rows, max_pages=24)
    static = [row.to("cuda", TORCH_DTYPES[dtype]) for row in rows_of(requests * rows, group, 5)]
    backend.prepare_for_replay(build([(rows, 40)] * requests, "cuda"), captured)

    def layer() -> torch.Tensor:
        return backend(pool.layer(0), static[0], (static[1], static[2]), captured, 0.125)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    batches = [[(rows, 300)] * 3, [(rows, 20), (1, 1), (rows, 333), (rows, 64)], [(1, 9)], [(rows, 24 * PAGE)]]
    for seed, segments in enumerate(batches):
        batch = build(segments, "cuda")
        fresh = [row.to("cuda", TORCH_DTYPES[dtype]) for row in rows_of(len(batch.slots), group, seed)]
        for mine, theirs in zip(pool.layer(0), expected_pool.layer(0), strict=True):
            theirs.copy_(mine)
        expected = backend(
            expected_pool.layer(0), fresh[0], (fresh[1], fresh[2]), backend.prepare(batch, expected_pool), 0.125
        )
        backend.prepare_for_replay(batch, captured)
        for place, row in zip(static, fresh, strict=True):
            place.copy_(row[captured.take])
        graph.replay()
        torch.testing.assert_close(out, expected[captured.take], **tolerance(dtype))
        for mine, theirs in zip(pool.layer(0), expected_pool.layer(0), strict=True):
            assert torch.equal(mine, theirs)
