"""TorchAttention against a slot-by-slot reference over random segments, page orders and head counts."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_runtime.model.attention import AttentionBatch, Segment, TorchAttention

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
    pool_k, pool_v = (torch.randn(PAGES, PAGE, kv_heads, dim, generator=g) * 2 for _ in range(2))
    rows = len(batch.slots)
    q = torch.randn(rows, kv_heads * group, dim, generator=g)
    k, v = (torch.randn(rows, kv_heads, dim, generator=g) for _ in range(2))
    before = pool_k.clone()
    for _layer in range(2):  # The second call uses what the first one worked out for the batch.
        out = TorchAttention()(pool_k, pool_v, q, k, v, batch, 0.37)
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
        pool_k, pool_v = torch.zeros(PAGES, PAGE, 2, 16), torch.zeros(PAGES, PAGE, 2, 16)
        pool_k.flatten(0, 1)[slots], pool_v.flatten(0, 1)[slots] = k, v
        batch = AttentionBatch(slots[64 - length :], (Segment(0, length, torch.tensor(pages), 64),))
        outs.append(TorchAttention()(pool_k, pool_v, q, k[64 - length :], v[64 - length :], batch, 0.25))
    assert torch.equal(outs[0], outs[1])


def test_more_pages_than_attended_slots_are_ignored() -> None:
    """A request may own pages beyond its last slot, for the tokens to come."""
    pool_k, pool_v = torch.randn(PAGES, PAGE, 1, 4), torch.randn(PAGES, PAGE, 1, 4)
    q, k, v = torch.randn(1, 1, 4), torch.randn(1, 1, 4), torch.randn(1, 1, 4)
    slots = torch.tensor([7 * PAGE + 2])
    outs = [
        TorchAttention()(pool_k, pool_v, q, k, v, AttentionBatch(slots, (Segment(0, 1, torch.tensor(pages), 11),)), 0.5)
        for pages in ([3, 7], [3, 7, 5, 6])
    ]
    assert torch.equal(outs[0], outs[1])
