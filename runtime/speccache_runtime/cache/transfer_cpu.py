"""Page moves where the device is the CPU: pools and host pages are the same memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speccache_runtime.cache.pool import HostArena, KVPool
from speccache_runtime.cache.transfer import Job, Move, halves


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
    """Copies in the calling thread, before it returns."""

    def __init__(self, arena: HostArena, target: KVPool, draft: KVPool | None) -> None:
        self._target, self._draft = halves(arena, target, draft)

    def backup(self, moves: Sequence[Move]) -> Job:
        def copy(device: Tensor, host: Tensor, pages: Tensor, rows: Tensor) -> None:
            host[rows] = device[pages]

        return self._run(moves, copy, to_host=True)

    def load(self, moves: Sequence[Move]) -> Job:
        def copy(device: Tensor, host: Tensor, pages: Tensor, rows: Tensor) -> None:
            device[pages] = host[rows]

        return self._run(moves, copy, to_host=False)

    def _run(
        self, moves: Sequence[Move], copy: Callable[[Tensor, Tensor, Tensor, Tensor], None], *, to_host: bool
    ) -> Job:
        began = time.perf_counter()
        nbytes = 0
        for half, chosen in ((self._target, moves), (self._draft, [m for m in moves if m.draft])):
            if not chosen or half is None or (to_host and not half.host.owned):
                continue
            pages = torch.tensor([m.device for m in chosen])
            rows = torch.tensor([m.host for m in chosen])
            for device, start, end in half.columns:
                copy(device, half.host.rows[:, start:end], pages, rows)
                nbytes += (end - start) * len(chosen)
        return DoneJob(nbytes, time.perf_counter() - began)
