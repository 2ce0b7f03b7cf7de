"""What one page of a pool is made of, in bytes.

A pool declares its layout once: an ordered list of (buffer, layer, bytes per page). Transfers, host pages and storage
move bytes by this list and never ask what kind of attention the pool belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One device buffer: `name` ("k", "v"), the `layer` that reads it, and the bytes one page takes in it."""

    name: str
    layer: int
    page_bytes: int


@dataclass(frozen=True)
class Layout:
    """The buffers of one pool in the order in which a host record holds them."""

    buffers: tuple[BufferSpec, ...]

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page over all buffers: this pool's half of a host record."""
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


def attention_layout(*, layers: int, kv_heads: int, head_dim: int, page_size: int, element_bytes: int) -> Layout:
    """Layout of multi-head attention: per layer first K, then V, each `[page_size, kv_heads, head_dim]`."""
    size = page_size * kv_heads * head_dim * element_bytes
    return Layout(tuple(BufferSpec(name, layer, size) for layer in range(layers) for name in ("k", "v")))


@dataclass(frozen=True, slots=True)
class HostRecord:
    """One host page: the target half, then the draft half. One allocation, one eviction."""

    target: Layout
    draft: Layout | None

    @property
    def draft_offset(self) -> int:
        """Where the draft half begins."""
        return self.target.page_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of the whole record."""
        return self.target.page_bytes + (self.draft.page_bytes if self.draft else 0)
