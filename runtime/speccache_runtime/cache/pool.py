"""The memory behind the pages: a model's KV pool on its device, and the host records.

Both are allocated once at startup and never grow, so the pod's memory is what was computed for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from speccache_api.geometry import KVDtype, KVGeometry
from speccache_runtime.cache.layout import HostRecord, Layout
from speccache_runtime.errors import ConfigError
from speccache_runtime.tensors import TORCH_DTYPES

_BLOCK = 4096


@dataclass(frozen=True)
class PoolShape:
    """What each page of a pool is: `page_size` tokens of `geometry`, with KV in `dtype`."""

    geometry: KVGeometry
    page_size: int
    dtype: KVDtype

    @cached_property
    def layout(self) -> Layout:
        """The same in bytes."""
        return Layout.of(self.geometry, self.page_size, self.dtype)


class KVPool:
    """KV pages of one model on its device.

    Each layer has the buffers that the geometry names, each `[num_pages, page_size, *shape]`, contiguous, owned by the
    pool. Slot s of page p is row `p * page_size + s` of the flattened first two dimensions.
    """

    def __init__(self, shape: PoolShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.page_size = shape.page_size
        self.num_pages = num_pages
        self.layout = shape.layout
        self.device = device
        self._layers = [
            tuple(
                torch.zeros(
                    (num_pages, shape.page_size, *buffer.shape),
                    dtype=TORCH_DTYPES[buffer.dtype or shape.dtype],
                    device=device,
                )
                for buffer in shape.geometry.buffers
            )
            for _ in range(shape.geometry.layers)
        ]

    def layer(self, number: int) -> tuple[Tensor, ...]:
        """The buffers of layer `number`, in the order of the geometry."""
        return self._layers[number]

    def page_bytes(self) -> list[Tensor]:
        """One view per layout buffer, in layout order: uint8 `[num_pages, bytes per page]`."""
        return [buffer.view(self.num_pages, -1).view(torch.uint8) for buffers in self._layers for buffer in buffers]


class HostArena:
    """Host records, one row each: uint8 `[num_pages, record bytes]`; page-locked when a GPU copies to and from it.

    Page-locking registers exactly these bytes: torch's own pinned allocator rounds up to a power of two, which the
    pod's memory limit does not allow for.
    """

    def __init__(self, record: HostRecord, num_pages: int, *, pinned: bool) -> None:
        self.record = record
        self.num_pages = num_pages
        # At the start of a block, so that halves whose sizes are whole blocks come from files directly.
        whole = torch.zeros(num_pages * record.page_bytes + _BLOCK, dtype=torch.uint8)
        self.rows = whole[-whole.data_ptr() % _BLOCK :][: num_pages * record.page_bytes].view(
            num_pages, record.page_bytes
        )
        self._pinned = pinned and self.rows.nbytes > 0
        if self._pinned:
            _check(torch.cuda.cudart().cudaHostRegister(self.rows.data_ptr(), self.rows.nbytes, 0), self.rows.nbytes)
        self._bytes: memoryview = self.rows.view(-1).numpy().data

    @classmethod
    def of(cls, target: KVPool, draft: KVPool | None, num_pages: int) -> HostArena:
        """Records for the pages of these pools."""
        record = HostRecord(target.layout, draft.layout if draft else None)
        return cls(record, num_pages, pinned=target.device.type == "cuda")

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
