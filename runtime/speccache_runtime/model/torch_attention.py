"""Attention over pages with nothing but torch: pages are gathered, then `scaled_dot_product_attention` runs.

On a GPU, segments of equal length run as one padded batch, because there the number of kernels counts; on the CPU
padding is work, and each segment runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from speccache_runtime.model.attention import AttentionBatch, Captured, KVPool, Prepared, Segment

MAX_PADDED_ROWS = 16
"""Longest segments that are padded into one batch: decode, draft and verify steps. Longer ones fill a GPU alone."""

MAX_GROUPED_ROWS = 64
"""Up to here the heads of a KV head become rows on the CPU too: fewer, larger products (10 to 40 % faster at 1000 slots
and 2 to 16 rows). Beyond, nothing is gained and the mask would grow with the heads."""

Read = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
"""Gathered slots of a layer's buffers, each `[..., slots, *shape]`, to keys and values `[..., slots, kv_heads, D]`."""


def keys_and_values(gathered: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Multi-head attention keeps just these."""
    keys, values = gathered
    return keys, values


@dataclass(frozen=True, slots=True, eq=False)
class _Alone:
    """One segment. `pages` are those of the attended slots, a slice when they lie side by side. `mask` is None where
    none is needed; `grouped` says that it has a row for each query head of a KV head.
    """

    start: int
    length: int
    kv_len: int
    pages: Tensor | slice
    mask: Tensor | None
    grouped: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Segments(Prepared):
    """Segments that run one after the other."""

    plans: tuple[_Alone, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Padded(Captured):
    """Segments that run as one batch of `requests` by `rows`; everything is on the device and stays where it is.

    `numbers` is int64 `[2, requests, rows]`, as sent from the host: `take`, then the last slot that each row may see.
    `pages` is int64 `[requests, max_pages]`. `mask` is additive, `[requests, 1, rows * group, slots]`; `hidden` says
    where it hides, bool `[requests, rows, 1, slots]`; `every` is int64 `[slots]`: 0, 1, 2 ...
    """

    numbers: Tensor
    pages: Tensor
    mask: Tensor
    hidden: Tensor
    every: Tensor


class TorchAttention:
    """Attention where `group` query heads share a KV head. `read` makes keys and values of what the pool keeps."""

    def __init__(self, group: int, read: Read = keys_and_values) -> None:
        self._group = group
        self._read = read

    def prepare(self, batch: AttentionBatch, pool: KVPool) -> Prepared:
        segments = batch.segments
        rows = segments[0].length
        equal = len(segments) > 1 and all(segment.length == rows for segment in segments)
        if pool.device.type == "cuda" and equal and rows <= MAX_PADDED_ROWS:
            most = max(_num_pages(segment, pool.page_size) for segment in segments)
            padded = self.prepare_for_capture(pool, requests=len(segments), rows=rows, max_pages=most)
            self.prepare_for_replay(batch, padded)
            return padded
        return _Segments(batch.slots, tuple(self._alone(segment, pool) for segment in segments))

    def prepare_for_capture(self, pool: KVPool, *, requests: int, rows: int, max_pages: int) -> _Padded:
        device, num_slots = pool.device, max_pages * pool.page_size
        numbers = torch.zeros((2, requests, rows), dtype=torch.int64, device=device)
        mask_shape = (requests, 1, rows * self._group, num_slots)
        return _Padded(
            slots=torch.zeros(requests * rows, dtype=torch.int64, device=device),
            requests=requests,
            rows=rows,
            take=numbers[0].flatten(),
            numbers=numbers,
            pages=torch.zeros((requests, max_pages), dtype=torch.int64, device=device),
            mask=torch.empty(mask_shape, dtype=pool.layer(0)[0].dtype, device=device),
            hidden=torch.empty((requests, rows, 1, num_slots), dtype=torch.bool, device=device),
            every=torch.arange(num_slots, device=device),
        )

    def prepare_for_replay(self, batch: AttentionBatch, captured: Captured) -> None:
        assert isinstance(captured, _Padded), "prepared by another backend"
        requests, rows, max_pages = captured.requests, captured.rows, captured.pages.shape[1]
        page_size = len(captured.every) // max_pages
        segments = batch.segments
        longest = max(segment.length for segment in segments)
        most = max(_num_pages(segment, page_size) for segment in segments)
        if len(segments) > requests or longest > rows or most > max_pages:
            raise ValueError(
                f"{len(segments)} segments of up to {longest} rows and {most} pages do not fit what was captured: "
                f"{requests} of {rows} rows and {max_pages} pages"
            )
        filled, take, last = _repeated(segments, requests, rows)
        captured.numbers.copy_(torch.tensor([take, last]).view(2, requests, rows), non_blocking=True)
        torch.index_select(batch.slots, 0, captured.take, out=captured.slots)
        captured.pages.zero_()  # any valid page: what is beyond a segment is hidden
        for number, segment in enumerate(filled):
            used = _num_pages(segment, page_size)
            captured.pages[number, :used].copy_(segment.pages[:used])
        torch.gt(captured.every, captured.numbers[1, :, :, None, None], out=captured.hidden)
        by_row = captured.mask.view(requests, rows, self._group, -1)
        by_row.zero_().masked_fill_(captured.hidden, float("-inf"))

    def __call__(
        self, buffers: tuple[Tensor, ...], q: Tensor, new: tuple[Tensor, ...], prepared: Prepared, scale: float
    ) -> Tensor:
        for buffer, rows in zip(buffers, new, strict=True):
            buffer.flatten(0, 1).index_copy_(0, prepared.slots, rows)
        if isinstance(prepared, _Padded):
            return self._padded(buffers, q, prepared, scale)
        assert isinstance(prepared, _Segments), "prepared by another backend"
        if len(prepared.plans) == 1:
            return self._one(buffers, q, prepared.plans[0], scale)
        out = torch.empty_like(q)
        for plan in prepared.plans:
            own = slice(plan.start, plan.start + plan.length)
            out[own] = self._one(buffers, q[own], plan, scale)
        return out

    def _alone(self, segment: Segment, pool: KVPool) -> _Alone:
        length, kv_len, dtype = segment.length, segment.kv_len, pool.layer(0)[0].dtype
        cuda = pool.device.type == "cuda"
        grouped = length > 1 and not cuda and length * self._group <= MAX_GROUPED_ROWS
        mask: Tensor | None = None
        if grouped:
            mask = _causal(length, kv_len, dtype).repeat_interleave(self._group, 0)
        elif length not in (1, kv_len):
            # On a GPU not a mask but a name for one: it lets the flash kernel run without bytes for the mask.
            mask = causal_lower_right(length, kv_len) if cuda else _causal(length, kv_len, dtype)
        return _Alone(segment.start, length, kv_len, _used_pages(segment, pool.page_size), mask, grouped)

    def _one(self, buffers: tuple[Tensor, ...], q: Tensor, plan: _Alone, scale: float) -> Tensor:
        """Attention of one segment; `q` is `[length, heads, D]`."""
        keys, values = self._read([_gather(buffer, plan.pages)[: plan.kv_len] for buffer in buffers])
        keys, values = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
        length, heads, width = q.shape
        kv_heads, group = keys.shape[1], self._group
        if length == 1:
            # The query heads of one KV head act as its rows: no repeated keys and no mask.
            rows = q.view(1, kv_heads, group, width)
            return F.scaled_dot_product_attention(rows, keys, values, scale=scale).reshape(1, heads, width)
        if plan.grouped:
            rows = q.view(length, kv_heads, group, width).permute(1, 0, 2, 3).reshape(1, kv_heads, -1, width)
            out = F.scaled_dot_product_attention(rows, keys, values, plan.mask, scale=scale)
            return out.reshape(kv_heads, length, group, width).transpose(0, 1).reshape(length, heads, width)
        queries = q.transpose(0, 1).unsqueeze(0)
        if kv_heads == 1:  # without a copy, and kernels that know nothing of shared heads can take it
            keys, values = keys.expand(-1, heads, -1, -1), values.expand(-1, heads, -1, -1)
        out = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            plan.mask,
            is_causal=plan.mask is None,
            scale=scale,
            enable_gqa=kv_heads not in (1, heads),
        )
        return out.squeeze(0).transpose(0, 1)

    def _padded(self, buffers: tuple[Tensor, ...], q: Tensor, plan: _Padded, scale: float) -> Tensor:
        """Attention of segments of one length as a batch, padded to the longest one's pages."""
        count, length, group, pages = plan.requests, plan.rows, self._group, plan.pages.flatten()
        gathered = [buffer.index_select(0, pages).view(count, -1, *buffer.shape[2:]) for buffer in buffers]
        keys, values = (part.transpose(1, 2) for part in self._read(gathered))
        heads, width = q.shape[1:]
        kv_heads = keys.shape[1]
        rows = q.view(count, length, kv_heads, group, width).permute(0, 2, 1, 3, 4)
        rows = rows.reshape(count, kv_heads, length * group, width)
        out = F.scaled_dot_product_attention(rows, keys, values, plan.mask, scale=scale)
        out = out.reshape(count, kv_heads, length, group, width).permute(0, 2, 1, 3, 4)
        return out.reshape(count * length, heads, width)


def _repeated(segments: Sequence[Segment], requests: int, rows: int) -> tuple[list[Segment], list[int], list[int]]:
    """The segment of each request, and for each row of them the row of the batch and the last slot that it may see.

    Where there are fewer segments or rows than asked for, the last one is repeated.
    """
    end = len(segments) - 1
    filled = [segments[min(number, end)] for number in range(requests)]
    take, last = [], []
    for number, segment in enumerate(filled):
        for row in range(rows):
            own = min(row, segment.length - 1) if number <= end else segment.length - 1
            take.append(segment.start + own)
            last.append(segment.kv_len - segment.length + own)
    return filled, take, last


def _num_pages(segment: Segment, page_size: int) -> int:
    return -(-segment.kv_len // page_size)


def _used_pages(segment: Segment, page_size: int) -> Tensor | slice:
    """Pages of the attended slots; a slice when they lie side by side, so that nothing needs to be copied.

    Only looked for on the CPU: reading page numbers back from a GPU would wait for it.
    """
    pages = segment.pages[: _num_pages(segment, page_size)]
    numbers = [] if pages.is_cuda else pages.tolist()
    run = bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return slice(numbers[0], numbers[0] + len(numbers)) if run else pages


def _gather(buffer: Tensor, pages: Tensor | slice) -> Tensor:
    """All slots of the pages, `[slots, *shape]`."""
    picked = buffer[pages] if isinstance(pages, slice) else buffer.index_select(0, pages)
    return picked.flatten(0, 1)


def _causal(length: int, kv_len: int, dtype: torch.dtype) -> Tensor:
    """`[length, kv_len]`: 0 where row r may attend, -inf beyond slot kv_len - length + r."""
    return torch.full((length, kv_len), float("-inf"), dtype=dtype).triu_(kv_len - length + 1)
