"""The memory behind the pages: a model's KV pool on its device, and the host pages of both models.

Both are allocated once at startup and never grow, so the pod's memory is what was computed for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from speccache_api.geometry import KVDtype, KVGeometry
from speccache_api.quantity import round_up
from speccache_runtime.cache.layout import Layout
from speccache_runtime.cache.shared_memory import SharedMemory
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


class HostHalf:
    """The target's or the draft's half of all host pages: page p is row p of `rows`, uint8 `[num_pages, bytes]`.

    `owned` says that this process fills it. One that ranks share is filled by rank 0 alone; the others only read it.
    """

    def __init__(self, rows: Tensor, *, owned: bool) -> None:
        self.rows = rows
        self.owned = owned
        self._bytes: memoryview = rows.view(-1).numpy().data

    def page(self, number: int) -> memoryview:
        """Writable view of this half of host page `number`; valid as long as the arena."""
        size = self.rows.shape[1]
        return self._bytes[number * size : (number + 1) * size]


class HostArena:
    """The memory of all host pages, half by half; page-locked when a GPU copies to and from it. `draft` has rows of 0
    bytes without a draft. Each half begins with a block, so that pages of whole blocks come from files directly.

    Page-locking registers just these bytes: torch's own pinned allocator rounds up to a power of two, which the
    pod's memory limit does not allow for.
    """

    def __init__(
        self,
        target: PoolShape,
        draft: PoolShape | None,
        num_pages: int,
        *,
        pinned: bool,
        memory: SharedMemory | None = None,
    ) -> None:
        """`memory` holds the halves whose geometry is shared, `shared_bytes` altogether. Without it this process is the
        only one, and has all halves for itself."""
        self.num_pages = num_pages
        shapes = [target] if draft is None else [target, draft]
        common = 0 if memory is None else shared_bytes(shapes, num_pages)
        total = sum(_half_bytes(shape, num_pages) for shape in shapes)
        own = _Memory(_from_a_block(total - common))
        shared = None if memory is None else _Memory(memory.map())
        if shared is not None and shared.whole.nbytes != common:
            raise ValueError(f"shared halves take {common} bytes, the memory for them has {shared.whole.nbytes}")

        def half(shape: PoolShape) -> HostHalf:
            if memory is not None and shared is not None and shape.geometry.shared:
                return HostHalf(shared.take(shape, num_pages), owned=memory.owner)
            return HostHalf(own.take(shape, num_pages), owned=True)

        self.target = half(target)
        nothing = torch.zeros((num_pages, 0), dtype=torch.uint8)
        self.draft = HostHalf(nothing, owned=True) if draft is None else half(draft)
        self._pinned: list[Tensor] = []
        for each in (own, shared) if pinned else ():
            if each is not None and each.whole.nbytes:
                _page_lock(each.whole)
                self._pinned.append(each.whole)

    @classmethod
    def of(cls, target: KVPool, draft: KVPool | None, num_pages: int, memory: SharedMemory | None = None) -> HostArena:
        """Host pages for the pages of these pools."""
        pinned = target.device.type == "cuda"
        return cls(target.shape, draft.shape if draft else None, num_pages, pinned=pinned, memory=memory)

    def close(self) -> None:
        """Unlocks the memory; the arena must not be used afterwards."""
        if self._pinned:
            torch.cuda.synchronize()  # copies under way still use it
        for memory in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._pinned.clear()


def shared_bytes(shapes: Iterable[PoolShape], num_pages: int) -> int:
    """Bytes of the halves that ranks share, of `num_pages` host pages."""
    return sum(_half_bytes(shape, num_pages) for shape in shapes if shape.geometry.shared)


def _half_bytes(shape: PoolShape, num_pages: int) -> int:
    """Whole blocks, so that what follows begins with one too."""
    return round_up(num_pages * shape.layout.page_bytes, _BLOCK)


def _from_a_block(nbytes: int) -> Tensor:
    """Zeros that begin with a block."""
    memory = torch.zeros(nbytes + _BLOCK, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _BLOCK :][:nbytes]


class _Memory:
    """What halves are cut from, one behind the other."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self._left = whole

    def take(self, shape: PoolShape, num_pages: int) -> Tensor:
        rows = self._left[: num_pages * shape.layout.page_bytes].view(num_pages, shape.layout.page_bytes)
        self._left = self._left[_half_bytes(shape, num_pages) :]
        return rows


def _page_lock(memory: Tensor) -> None:
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status) != 0:
        raise ConfigError(
            f"kvCache.host: cannot page-lock {memory.nbytes} bytes (cudaHostRegister: {status}); "
            "lower kvCache.host or raise the pod's memory and memlock limits"
        )
