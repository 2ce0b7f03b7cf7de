"""TorchAttention on a GPU against itself on the CPU: padded batches, flash kernels, gathered pages."""

from __future__ import annotations

import random

import pytest
import torch

from speccache_runtime.model.attention import AttentionBatch, Segment, TorchAttention

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


@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [1, 4])
def test_gpu_equals_cpu(segments: list[tuple[int, int]], dtype: torch.dtype, group: int) -> None:
    g = torch.Generator().manual_seed(4)
    rows = sum(length for length, _ in segments)
    pool_k, pool_v = (torch.randn(PAGES, PAGE, 2, 64, generator=g).to(dtype) for _ in range(2))
    q = torch.randn(rows, 2 * group, 64, generator=g).to(dtype)
    k, v = (torch.randn(rows, 2, 64, generator=g).to(dtype) for _ in range(2))
    on_gpu = [t.cuda() for t in (pool_k, pool_v, q, k, v)]
    on_cpu = [t.float() for t in (pool_k, pool_v, q, k, v)]
    expected = TorchAttention()(*on_cpu, build(segments, "cpu"), 0.125)
    out = TorchAttention()(*on_gpu, build(segments, "cuda"), 0.125)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.float().cpu(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(on_gpu[0].float().cpu(), on_cpu[0])
