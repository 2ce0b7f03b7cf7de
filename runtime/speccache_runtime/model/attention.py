"""Attention over paged KV: the values that describe a packed forward, the protocol of a backend, and the torch backend.

A packed forward holds one row per token over all requests. Each request's rows are one `Segment`, which names the pages
it may see. Pages that are absent are simply not listed, so a backend never needs a mask for holes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One request's consecutive rows of a packed forward.

    Rows `start .. start + length` are the last `length` slots of a sequence of `kv_len` slots, which lie in `pages`
    (int64 `[n]`, device page numbers in attention order, `n * page_size >= kv_len`). Row r of the segment attends slots
    `0 .. kv_len - length + r`, both included.
    """

    start: int
    length: int
    pages: Tensor
    kv_len: int


def _no_wait(layer: int) -> None:
    """Nothing is being loaded: every layer may be used at once."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Where the rows of one packed forward are written and what they attend.

    `slots` is int64 `[T]`: `page * page_size + offset` of each row's own K/V. `segments` cover rows `0 .. T` in order.
    `before_layer(k)` is called before layer k's pool is read or written; it makes that layer's loaded pages visible.
    `memo` belongs to the backend: what it worked out for this batch in its first layer and needs again in the others.
    """

    slots: Tensor
    segments: tuple[Segment, ...]
    before_layer: Callable[[int], None] = _no_wait
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)


class KVPool(Protocol):
    """KV pages of one model: `k[layer]`, `v[layer]` are `[num_pages, page_size, kv_heads, head_dim]`, contiguous."""

    @property
    def k(self) -> Sequence[Tensor]: ...

    @property
    def v(self) -> Sequence[Tensor]: ...


class AttentionBackend(Protocol):
    """One layer's attention. Stateless between batches."""

    def __call__(
        self, pool_k: Tensor, pool_v: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, scale: float
    ) -> Tensor:
        """Writes `k` and `v` into the pool at `batch.slots`, then attends.

        `q` is `[T, heads, D]`, `k` and `v` are `[T, kv_heads, D]`, rotated, in the pool's dtype.
        Returns `[T, heads, D]`.
        """
        ...


class TorchAttention:
    """Attention with nothing but torch: pages are gathered, then `scaled_dot_product_attention` runs per segment.

    On a GPU, segments of equal length run as one padded batch, because there the number of kernels counts; on the CPU
    padding is work, and each segment runs alone.
    """

    def __call__(
        self, pool_k: Tensor, pool_v: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, scale: float
    ) -> Tensor:
        pool_k.flatten(0, 1).index_copy_(0, batch.slots, k)
        pool_v.flatten(0, 1).index_copy_(0, batch.slots, v)
        segments = batch.segments
        if len(segments) == 1:
            return self._one(pool_k, pool_v, q, batch, segments[0], scale)
        if q.is_cuda and len({segment.length for segment in segments}) == 1 and segments[0].length <= MAX_PADDED_ROWS:
            return self._padded(pool_k, pool_v, q, batch, scale)
        out = torch.empty_like(q)
        for segment in segments:
            rows = slice(segment.start, segment.start + segment.length)
            out[rows] = self._one(pool_k, pool_v, q[rows], batch, segment, scale)
        return out

    def _one(
        self, pool_k: Tensor, pool_v: Tensor, q: Tensor, batch: AttentionBatch, segment: Segment, scale: float
    ) -> Tensor:
        """Attention of one segment; `q` is `[length, heads, D]`."""
        pages = _used_pages(batch, segment, pool_k.shape[1])
        keys = _gather(pool_k, pages, segment.kv_len)
        values = _gather(pool_v, pages, segment.kv_len)
        length, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        if length == 1:
            # The query heads of one KV head act as its rows: no repeated keys and no mask.
            rows = q.view(1, kv_heads, group, head_dim)
            return F.scaled_dot_product_attention(rows, keys, values, scale=scale).reshape(1, heads, head_dim)
        if not q.is_cuda and length * group <= MAX_GROUPED_ROWS:
            mask = _grouped_mask(batch, length, segment.kv_len, group, q.dtype)
            rows = q.view(length, kv_heads, group, head_dim).permute(1, 0, 2, 3).reshape(1, kv_heads, -1, head_dim)
            out = F.scaled_dot_product_attention(rows, keys, values, mask, scale=scale)
            return out.reshape(kv_heads, length, group, head_dim).transpose(0, 1).reshape(length, heads, head_dim)
        queries = q.transpose(0, 1).unsqueeze(0)
        shared = group > 1
        if segment.kv_len == length:
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=shared)
        else:
            causal = _causal_mask(batch, length, segment.kv_len, q)
            out = F.scaled_dot_product_attention(queries, keys, values, causal, scale=scale, enable_gqa=shared)
        return out.squeeze(0).transpose(0, 1)

    def _padded(self, pool_k: Tensor, pool_v: Tensor, q: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
        """Attention of segments of one length as a batch, padded to the longest one's pages."""
        pages, mask = _padded_plan(batch, pool_k.shape[1], q, pool_k.shape[2])
        count = len(batch.segments)
        _, heads, head_dim = q.shape
        kv_heads = pool_k.shape[2]
        length, group = batch.segments[0].length, heads // kv_heads
        shape = (count, -1, kv_heads, head_dim)
        keys = pool_k.index_select(0, pages).view(shape).transpose(1, 2)
        values = pool_v.index_select(0, pages).view(shape).transpose(1, 2)
        rows = q.view(count, length, kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
        rows = rows.reshape(count, kv_heads, length * group, head_dim)
        out = F.scaled_dot_product_attention(rows, keys, values, mask, scale=scale)
        out = out.reshape(count, kv_heads, length, group, head_dim).permute(0, 2, 1, 3, 4)
        return out.reshape(count * length, heads, head_dim)


MAX_PADDED_ROWS = 16
"""Longest segments that are padded into one batch: decode, draft and verify steps. Longer ones fill a GPU alone."""


MAX_GROUPED_ROWS = 64
"""Up to here the heads of a KV head become rows on the CPU too: fewer, larger products (10 to 40 % faster at 1000 slots
and 2 to 16 rows). Beyond, nothing is gained and the mask would grow with the heads."""


def _used_pages(batch: AttentionBatch, segment: Segment, page_size: int) -> Tensor | slice:
    """Pages of the attended slots; a slice when they lie side by side, so that nothing needs to be copied.

    Only looked for on the CPU: reading page numbers back from a GPU would wait for it.
    """
    key = (segment.start, page_size)
    if key not in batch.memo:
        pages = segment.pages[: -(-segment.kv_len // page_size)]
        numbers = [] if pages.is_cuda else pages.tolist()
        run = bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        batch.memo[key] = slice(numbers[0], numbers[0] + len(numbers)) if run else pages
    found: Tensor | slice = batch.memo[key]
    return found


def _gather(pool: Tensor, pages: Tensor | slice, kv_len: int) -> Tensor:
    """`[1, kv_heads, kv_len, D]` of the first `kv_len` slots of the pages."""
    picked = pool[pages] if isinstance(pages, slice) else pool.index_select(0, pages)
    return picked.flatten(0, 1)[:kv_len].transpose(0, 1).unsqueeze(0)


def _causal_mask(batch: AttentionBatch, length: int, kv_len: int, q: Tensor) -> Tensor:
    """Lower-right causal mask, made once per batch and shape."""
    key = ("causal", length, kv_len)
    if key not in batch.memo:
        if q.is_cuda:
            # Not a mask but a name for one: it lets the flash kernel run without bytes for the mask.
            batch.memo[key] = causal_lower_right(length, kv_len)
        else:
            batch.memo[key] = _additive_causal(length, kv_len, q.dtype)
    mask: Tensor = batch.memo[key]
    return mask


def _grouped_mask(batch: AttentionBatch, length: int, kv_len: int, group: int, dtype: torch.dtype) -> Tensor:
    """The causal mask with every row repeated for the query heads that share a KV head."""
    key = ("grouped", length, kv_len)
    if key not in batch.memo:
        batch.memo[key] = _additive_causal(length, kv_len, dtype).repeat_interleave(group, 0)
    mask: Tensor = batch.memo[key]
    return mask


def _additive_causal(length: int, kv_len: int, dtype: torch.dtype) -> Tensor:
    """`[length, kv_len]`: 0 where row r may attend, -inf beyond slot kv_len - length + r."""
    return torch.full((length, kv_len), float("-inf"), dtype=dtype).triu_(kv_len - length + 1)


def _padded_plan(batch: AttentionBatch, page_size: int, q: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Page numbers of all segments, padded with page 0, and the additive mask that hides padding and later rows."""
    key = ("padded", page_size)
    if key not in batch.memo:
        segments = batch.segments
        used = [segment.pages[: -(-segment.kv_len // page_size)] for segment in segments]
        pages = torch.nn.utils.rnn.pad_sequence(used, batch_first=True)
        length, group = segments[0].length, q.shape[1] // kv_heads
        lens = torch.tensor([segment.kv_len for segment in segments], device=q.device)
        last = lens[:, None] - length + torch.arange(length, device=q.device)
        hidden = torch.arange(pages.shape[1] * page_size, device=q.device) > last.repeat_interleave(group, 1)[..., None]
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
        batch.memo[key] = pages.flatten(), mask.unsqueeze(1)
    plan: tuple[Tensor, Tensor] = batch.memo[key]
    return plan
