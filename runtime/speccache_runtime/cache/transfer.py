"""Moves pages between the device pools and the host records, both halves in one job.

A job is submitted once, never changes, and completes once. `CpuTransfer` copies before it returns; `CudaTransfer`
copies on streams of its own and orders itself against the compute stream by events. Neither knows what the bytes mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speccache_runtime.cache.pool import HostArena, KVPool


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


@dataclass(slots=True)
class DoneJob:
    """A job that finished inside the call that submitted it."""

    nbytes: int
    seconds: float

    def done(self) -> bool:
        return True

    def wait_target_layer(self, layer: int) -> None:
        return

    def wait_draft(self) -> None:
        return


class CpuTransfer:
    """Copies in the calling thread: on a CPU the pools and the host records are the same memory."""

    def __init__(self, arena: HostArena, target: KVPool, draft: KVPool | None) -> None:
        self._rows = arena.rows
        self._target = _columns(target, 0)
        self._draft = _columns(draft, arena.record.draft_offset) if draft else []

    def backup(self, moves: Sequence[Move]) -> Job:
        def copy(device: Tensor, host: Tensor, pages: Tensor, rows: Tensor) -> None:
            host[rows] = device[pages]

        return self._run(moves, copy)

    def load(self, moves: Sequence[Move]) -> Job:
        def copy(device: Tensor, host: Tensor, pages: Tensor, rows: Tensor) -> None:
            device[pages] = host[rows]

        return self._run(moves, copy)

    def _run(self, moves: Sequence[Move], copy: Callable[[Tensor, Tensor, Tensor, Tensor], None]) -> Job:
        began = time.perf_counter()
        nbytes = 0
        for columns, chosen in ((self._target, moves), (self._draft, [m for m in moves if m.draft])):
            if not chosen or not columns:
                continue
            pages = torch.tensor([m.device for m in chosen])
            rows = torch.tensor([m.host for m in chosen])
            for device, start, end in columns:
                copy(device, self._rows[:, start:end], pages, rows)
                nbytes += (end - start) * len(chosen)
        return DoneJob(nbytes, time.perf_counter() - began)


def _columns(pool: KVPool, offset: int) -> list[tuple[Tensor, int, int]]:
    """(device bytes, first byte, last byte in the host record) of each buffer of `pool`."""
    return [
        (view, offset + at, offset + at + buffer.page_bytes)
        for view, buffer, at in zip(pool.page_bytes(), pool.layout.buffers, pool.layout.offsets, strict=True)
    ]


def make_transfer(arena: HostArena, target: KVPool, draft: KVPool | None) -> Transfer:
    """The transfer for the device that the pools are on."""
    if target.k[0].is_cuda:
        from speccache_runtime.cache.transfer_cuda import CudaTransfer

        return CudaTransfer(arena, target, draft)
    return CpuTransfer(arena, target, draft)
