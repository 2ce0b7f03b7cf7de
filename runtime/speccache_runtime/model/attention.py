"""Attention over paged KV: the values that describe a packed forward, and the protocol of a backend.

A packed forward holds one row per token over all requests. Each request's rows are one `Segment`, which names the pages
it may see. Pages that are absent are simply not listed, so a backend never needs a mask for holes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


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


def no_wait(layer: int) -> None:
    """Nothing is being loaded: every layer may be used at once."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Where the rows of one packed forward are written and what they attend.

    `slots` is int64 `[T]`: `page * page_size + offset` of each row's own KV. `segments` cover rows `0 .. T` in order.
    `before_layer(k)` is called before layer k's pool is read or written; it makes that layer's loaded pages visible.
    """

    slots: Tensor
    segments: tuple[Segment, ...]
    before_layer: Callable[[int], None] = no_wait


class KVPool(Protocol):
    """KV pages of one model. `layer(n)` gives that layer's buffers in the order of the model's KV geometry, each
    `[num_pages, page_size, *shape]`, contiguous.
    """

    @property
    def page_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def layer(self, number: int) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What a backend has worked out for one pass before its first layer; all layers share it.

    `slots` is int64 `[T]`, where the rows' KV goes. Backends add what they need: only the one that made it can use it.
    """

    slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Captured(Prepared):
    """A `Prepared` whose tensors stay where they are, so that a CUDA graph of a pass over it can be replayed.

    It is for `requests` times `rows` rows. A batch with fewer fills the rest by repeating rows: a repeated row has the
    same token and the same slot, so it writes what is there anyway. `take` is int64 `[requests * rows]`: which row of
    the batch each captured row is; the caller takes its tokens and positions by it.
    """

    requests: int
    rows: int
    take: Tensor


class AttentionBackend(Protocol):
    """One layer's attention, and the steps before it: prepare a batch, or prepare once for a capture and then, in
    place, for every replay. Keeps no state of a batch itself.
    """

    def prepare(self, batch: AttentionBatch, pool: KVPool) -> Prepared:
        """Everything that the layers of one pass have in common."""
        ...

    def prepare_for_capture(self, pool: KVPool, *, requests: int, rows: int, max_pages: int) -> Captured:
        """Static tensors for up to `requests` segments of up to `rows` rows and `max_pages` pages each.

        Their content is valid only after `prepare_for_replay`.
        """
        ...

    def prepare_for_replay(self, batch: AttentionBatch, captured: Captured) -> None:
        """Fills `captured` for `batch` without new device memory. Raises ValueError if the batch does not fit."""
        ...

    def __call__(
        self, buffers: tuple[Tensor, ...], q: Tensor, new: tuple[Tensor, ...], prepared: Prepared, scale: float
    ) -> Tensor:
        """Writes the rows' own KV `new` into `buffers` of one layer at `prepared.slots`, then attends.

        `q` is `[T, heads, D]`; `new` has one `[T, *shape]` per buffer; all rotated and in the pool's dtype. Returns
        `[T, heads, D]`. Over a `Captured` it depends on device tensors alone, so it can be captured by a CUDA graph.
        """
        ...
