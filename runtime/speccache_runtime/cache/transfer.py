"""Moving pages between the device pools and the host pages, both halves in one job: what every transfer shares.

A job is submitted once, never changes, and completes once. No transfer knows what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from speccache_runtime.cache.pool import HostArena, HostHalf, KVPool


@dataclass(frozen=True, slots=True)
class Move:
    """One page to move; `draft` says whether its draft half moves with it."""

    device: int
    host: int
    draft: bool


class Job(Protocol):
    """A transfer under way. `seconds` is only valid once `done` is True."""

    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    def done(self) -> bool: ...

    def wait_target_layer(self, layer: int) -> None:
        """Makes the compute stream wait until `layer` of the target half has landed (load jobs)."""

    def wait_draft(self) -> None:
        """Makes the compute stream wait until the draft halves have landed (load jobs)."""


class Transfer(Protocol):
    """The caller keeps both pages of every move alive and unchanged until the job is done."""

    def backup(self, moves: Sequence[Move]) -> Job:
        """Device -> host, of the halves that this process owns there; sees everything that was queued on the compute
        stream before the call."""

    def load(self, moves: Sequence[Move]) -> Job:
        """Host -> device, target layers first and in order, then the draft halves."""


@dataclass(frozen=True, slots=True)
class HalfCopy:
    """One half of all pages in both tiers. Of each buffer of the pool, `columns` are the device's bytes
    `[num_pages, bytes per page]` and the first and last byte in a row of `host`."""

    host: HostHalf
    columns: tuple[tuple[Tensor, int, int], ...]

    @classmethod
    def of(cls, pool: KVPool, host: HostHalf) -> HalfCopy:
        """Of the pool's pages."""
        layout = pool.layout
        return cls(
            host,
            tuple(
                (view, at, at + buffer.page_bytes)
                for view, buffer, at in zip(pool.page_bytes(), layout.buffers, layout.offsets, strict=True)
            ),
        )


def halves(arena: HostArena, target: KVPool, draft: KVPool | None) -> tuple[HalfCopy, HalfCopy | None]:
    """The target's and the draft's, if there is one."""
    return HalfCopy.of(target, arena.target), HalfCopy.of(draft, arena.draft) if draft else None
