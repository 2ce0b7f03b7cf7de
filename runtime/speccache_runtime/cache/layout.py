"""What one page of a pool is made of, in bytes.

A pool declares its layout once: an ordered list of (buffer, layer, bytes per page). Transfers, host pages and storage
move bytes by this list and never ask what kind of attention the pool belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from speccache_api.geometry import KVDtype, KVGeometry


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One device buffer: its `name` in the geometry, the `layer` that reads it, and the bytes one page takes in it."""

    name: str
    layer: int
    page_bytes: int


@dataclass(frozen=True)
class Layout:
    """The buffers of one pool in the order in which a host page holds them."""

    buffers: tuple[BufferSpec, ...]

    @classmethod
    def of(cls, geometry: KVGeometry, page_size: int, dtype: KVDtype) -> Layout:
        """Layer by layer the buffers of `geometry` in their order; pages of `page_size` tokens, KV in `dtype`."""
        return cls(
            tuple(
                BufferSpec(buffer.name, layer, page_size * buffer.bytes_per_token(dtype))
                for layer in range(geometry.layers)
                for buffer in geometry.buffers
            )
        )

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page over all buffers: this pool's half of a host page."""
        return sum(b.page_bytes for b in self.buffers)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each buffer's bytes begin inside this pool's half."""
        out, at = [], 0
        for b in self.buffers:
            out.append(at)
            at += b.page_bytes
        return tuple(out)

    @cached_property
    def num_layers(self) -> int:
        """Number of layers, counted from 0 without gaps."""
        return 1 + max(b.layer for b in self.buffers)
