"""TorchAttention against a slot-by-slot reference over random segments, page orders and head counts, and its form for
captures against itself.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_api.geometry import KVGeometry
from speccache_runtime.cache.pool import KVPool, PoolShape
from speccache_runtime.model.attention import AttentionBatch, Segment
from speccache_runtime.model.torch_attention import TorchAttention

PAGE = 8
PAGES = 40


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, list[tuple[int, int]], int]:
    """(kv heads, query heads per KV head, head dim, [(length, kv_len)], seed); all pages fit the pool."""
    segments = draw(
        st.lists(
            st.tuples(st.integers(1, 40), st.integers(0, 50)).map(lambda t: (t[0], t[0] + t[1])), min_size=1, max_size=3
        )
    )
    return (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([4, 16])),
        segments,
        draw(st.integers(0, 2**16)),
    )


def build(segments: list[tuple[int, int]], seed: int) -> tuple[AttentionBatch, list[list[int]]]:
    """A batch over random pages, and the slots of each segment's sequence in order."""
    numbers = list(range(PAGES))
    random.Random(seed).shuffle(numbers)
    made, slots_of, own, start = [], [], [], 0
    for length, kv_len in segments:
        count = -(-kv_len // PAGE)
        pages, numbers = numbers[:count], numbers[count:]
        slots = [pages[i // PAGE] * PAGE + i % PAGE for i in range(kv_len)]
        made.append(Segment(start, length, torch.tensor(pages), kv_len))
        slots_of.append(slots)
        own += slots[kv_len - length :]
        start += length
    return AttentionBatch(torch.tensor(own), tuple(made)), slots_of


def make_pool(kv_heads: int, dim: int) -> KVPool:
    return KVPool(PoolShape(KVGeometry.heads(1, kv_heads, dim), PAGE, "float32"), PAGES, torch.device("cpu"))


def attend(pool: KVPool, q: torch.Tensor, new: tuple[torch.Tensor, ...], batch: AttentionBatch, scale: float) -> Any:
    backend = TorchAttention(q.shape[1] // new[0].shape[1])
    return backend(pool.layer(0), q, new, backend.prepare(batch, pool), scale)


def naive(
    q: torch.Tensor, flat_k: torch.Tensor, flat_v: torch.Tensor, segment: Segment, slots: list[int], scale: float
) -> torch.Tensor:
    """Row by row, head by head, over exactly the slots a row may see."""
    group = q.shape[1] // flat_k.shape[1]
    out = torch.empty(segment.length, *q.shape[1:])
    for row in range(segment.length):
        seen = slots[: segment.kv_len - segment.length + row + 1]
        for head in range(q.shape[1]):
            keys, values = flat_k[seen, head // group], flat_v[seen, head // group]
            weights = (keys @ q[segment.start + row, head] * scale).softmax(0)
            out[row, head] = weights @ values
    return out


@settings(max_examples=60, deadline=None)
@given(cases())
def test_equals_naive_attention(case: tuple[int, int, int, list[tuple[int, int]], int]) -> None:
    kv_heads, group, dim, segments, seed = case
    batch, slots_of = build(segments, seed)
    g = torch.Generator().manual_seed(seed)
    pool = make_pool(kv_heads, dim)
    pool_k, pool_v = (buffer.normal_(generator=g).mul_(2) for buffer in pool.layer(0))
    rows = len(batch.slots)
    q = torch.randn(rows, kv_heads * group, dim, generator=g)
    k, v = (torch.randn(rows, kv_heads, dim, generator=g) for _ in range(2))
    before = pool_k.clone()
    backend = TorchAttention(group)
    prepared = backend.prepare(batch, pool)
    for _layer in range(2):  # All layers of a pass share what was prepared.
        out = backend(pool.layer(0), q, (k, v), prepared, 0.37)
        for segment, slots in zip(batch.segments, slots_of, strict=True):
            flat_k, flat_v = pool_k.flatten(0, 1), pool_v.flatten(0, 1)
            expected = naive(q, flat_k, flat_v, segment, slots, 0.37)
            torch.testing.assert_close(
                out[segment.start : segment.start + segment.length], expected, atol=2e-5, rtol=1e-4
            )
    # Written: exactly the batch's slots. Read only: everything else.
    assert torch.equal(pool_k.flatten(0, 1)[batch.slots], k)
    untouched = torch.ones(PAGES * PAGE, dtype=torch.bool)
    untouched[batch.slots] = False
    assert torch.equal(pool_k.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])


@pytest.mark.parametrize("length", [1, 5, 30])
def test_neighbouring_pages_equal_scattered_ones(length: int) -> None:
    """Pages side by side are read in place instead of copied; the numbers must be the same, to the bit."""
    g = torch.Generator().manual_seed(1)
    k, v = (torch.randn(64, 2, 16, generator=g) for _ in range(2))
    q = torch.randn(length, 4, 16, generator=g)
    outs = []
    for pages in ([4, 5, 6, 7, 8, 9, 10, 11], [9, 3, 5, 30, 2, 17, 8, 11]):
        slots = torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)])
        pool = make_pool(2, 16)
        for buffer, rows in zip(pool.layer(0), (k, v), strict=True):
            buffer.flatten(0, 1)[slots] = rows
        batch = AttentionBatch(slots[64 - length :], (Segment(0, length, torch.tensor(pages), 64),))
        outs.append(attend(pool, q, (k[64 - length :], v[64 - length :]), batch, 0.25))
    assert torch.equal(outs[0], outs[1])


def test_more_pages_than_attended_slots_are_ignored() -> None:
    """A request may own pages beyond its last slot, for the tokens to come."""
    pool = make_pool(1, 4)
    for buffer in pool.layer(0):
        buffer.normal_()
    q, k, v = torch.randn(1, 1, 4), torch.randn(1, 1, 4), torch.randn(1, 1, 4)
    slots = torch.tensor([7 * PAGE + 2])
    outs = [
        attend(pool, q, (k, v), AttentionBatch(slots, (Segment(0, 1, torch.tensor(pages), 11),)), 0.5)
        for pages in ([3, 7], [3, 7, 5, 6])
    ]
    assert torch.equal(outs[0], outs[1])


@st.composite
def replays(draw: st.DrawFn) -> tuple[int, int, list[tuple[list[tuple[int, int]], int]]]:
    """(requests, rows) of a capture, and batches for it: decode and verify rows, fewer of both, any lengths."""
    requests, rows = draw(st.integers(1, 4)), draw(st.integers(1, 16))
    segment = st.tuples(st.integers(1, rows), st.integers(0, 60)).map(lambda t: (t[0], t[0] + t[1]))
    batch = st.tuples(st.lists(segment, min_size=1, max_size=requests), st.integers(0, 2**16))
    return requests, rows, draw(st.lists(batch, min_size=1, max_size=4))


@settings(max_examples=60, deadline=None)
@given(replays(), st.sampled_from([1, 2]), st.sampled_from([1, 4]))
def test_a_replayed_capture_equals_a_prepared_batch(
    case: tuple[int, int, list[tuple[list[tuple[int, int]], int]]], kv_heads: int, group: int
) -> None:
    """One capture serves batch after batch; its tensors never move, and what an earlier batch left never shows."""
    requests, rows, batches = case
    pool, backend = make_pool(kv_heads, 8), TorchAttention(group)
    captured = backend.prepare_for_capture(pool, requests=requests, rows=rows, max_pages=10)
    tensors = {name: getattr(captured, name) for name in ("slots", "take", "pages", "mask")}
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for segments, seed in batches:
        batch, _ = build(segments, seed)
        g = torch.Generator().manual_seed(seed)
        for buffer in pool.layer(0):
            buffer.normal_(generator=g)
        start = [buffer.clone() for buffer in pool.layer(0)]
        q = torch.randn(len(batch.slots), kv_heads * group, 8, generator=g)
        new = tuple(torch.randn(len(batch.slots), kv_heads, 8, generator=g) for _ in range(2))
        expected = backend(pool.layer(0), q, new, backend.prepare(batch, pool), 0.37)
        after = [buffer.clone() for buffer in pool.layer(0)]
        for buffer, before in zip(pool.layer(0), start, strict=True):
            buffer.copy_(before)
        backend.prepare_for_replay(batch, captured)
        take = captured.take
        out = backend(pool.layer(0), q[take], tuple(part[take] for part in new), captured, 0.37)
        assert set(take.tolist()) == set(range(len(batch.slots)))
        torch.testing.assert_close(out, expected[take], atol=2e-5, rtol=1e-4)
        assert all(torch.equal(buffer, one) for buffer, one in zip(pool.layer(0), after, strict=True))
        assert {name: getattr(captured, name).data_ptr() for name in places} == places


@pytest.mark.parametrize("segments", [[(1, 9)] * 3, [(3, 9)], [(1, 17)]], ids=["requests", "rows", "pages"])
def test_a_batch_that_does_not_fit_its_capture_is_refused(segments: list[tuple[int, int]]) -> None:
    pool, backend = make_pool(1, 4), TorchAttention(1)
    captured = backend.prepare_for_capture(pool, requests=2, rows=2, max_pages=2)
    with pytest.raises(ValueError, match="do not fit what was captured: 2 of 2 rows and 2 pages"):
        backend.prepare_for_replay(build(segments, 0)[0], captured)
