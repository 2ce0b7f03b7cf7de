"""The memory behind the pages: a model's KV pool on its device, and the host records.

Both are allocated once at startup and never grow, so the pod's memory is what was computed for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speccache_runtime.cache.layout import HostRecord, Layout, attention_layout
from speccache_runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Geometry of one model's KV. `dtype` is the pool's element type."""

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def layout(self) -> Layout:
        return attention_layout(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            element_bytes=self.dtype.itemsize,
        )


class KVPool:
    """KV pages of one model on its device.

    `k[layer]` and `v[layer]` are `[num_pages, page_size, kv_heads, head_dim]`, contiguous, owned by the pool. Slot s of
    page p is row `p * page_size + s` of the flattened first two dimensions.
    """

    def __init__(self, shape: PoolShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.layout = shape.layout
        size = (num_pages, shape.page_size, shape.kv_heads, shape.head_dim)
        self.k = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        self.v = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]

    def page_bytes(self) -> list[Tensor]:
        """One view per layout buffer, in layout order: uint8 `[num_pages, bytes per page]`."""
        return [
            (self.k if b.name == "k" else self.v)[b.layer].view(self.num_pages, -1).view(torch.uint8)
            for b in self.layout.buffers
        ]


class HostArena:
    """Host records, one row each: uint8 `[num_pages, record bytes]`; page-locked when a GPU copies to and from it.

    Page-locking registers exactly these bytes: torch's own pinned allocator rounds up to a power of two, which the
    pod's memory limit does not allow for.
    """

    def __init__(self, record: HostRecord, num_pages: int, *, pinned: bool) -> None:
        self.record = record
        self.num_pages = num_pages
        self.rows = torch.zeros((num_pages, record.page_bytes), dtype=torch.uint8)
        self._pinned = pinned and self.rows.nbytes > 0
        if self._pinned:
            _check(torch.cuda.cudart().cudaHostRegister(self.rows.data_ptr(), self.rows.nbytes, 0), self.rows.nbytes)
        self._bytes: memoryview = self.rows.view(-1).numpy().data

    def target_half(self, page: int) -> memoryview:
        """Writable view of the target half of host page `page`; valid as long as the arena."""
        start = page * self.record.page_bytes
        return self._bytes[start : start + self.record.draft_offset]

    def draft_half(self, page: int) -> memoryview:
        """Writable view of the draft half of host page `page`; empty when no draft is registered."""
        start = page * self.record.page_bytes
        return self._bytes[start + self.record.draft_offset : start + self.record.page_bytes]

    def close(self) -> None:
        """Unlocks the memory; the arena must not be used afterwards."""
        if self._pinned:
            torch.cuda.synchronize()  # copies under way still use it
            torch.cuda.cudart().cudaHostUnregister(self.rows.data_ptr())
            self._pinned = False


def _check(status: object, size: int) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise ConfigError(
            f"kvCache.host: cannot page-lock {size} bytes (cudaHostRegister: {status}); "
            "lower kvCache.host or raise the pod's memory and memlock limits"
        )
