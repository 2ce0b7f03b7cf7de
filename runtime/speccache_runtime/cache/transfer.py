"""Moving pages between the device pools and the host records, both halves in one job: what every transfer shares.

A job is submitted once, never changes, and completes once. No transfer knows what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from speccache_runtime.cache.pool import KVPool


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
        """Device -> host; sees everything that was queued on the compute stream before the call."""

    def load(self, moves: Sequence[Move]) -> Job:
        """Host -> device, target layers first and in order, then the draft halves."""


def columns(pool: KVPool, offset: int) -> list[tuple[Tensor, int, int]]:
    """(device bytes, first byte, last byte in the host record) of each buffer of `pool`."""
    return [
        (view, offset + at, offset + at + buffer.page_bytes)
        for view, buffer, at in zip(pool.page_bytes(), pool.layout.buffers, pool.layout.offsets, strict=True)
    ]
