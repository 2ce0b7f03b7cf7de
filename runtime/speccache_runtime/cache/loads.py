"""Loads under way, by number: host pages that are on their way to the device, and who must wait for them.

A load has a number so that a step can name the loads that it waits for without holding anything of the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from speccache_runtime.cache.transfer import Job, Move, Transfer


class Loads:
    """The loads of one transfer. Engine thread only."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._jobs: dict[int, Job] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, number: int) -> bool:
        """Whether this load is known to be under way: `finished` has not reported it."""
        return number in self._jobs

    def start(self, moves: Sequence[Move]) -> int:
        """Submits a load; the caller keeps both pages of every move alive and unchanged until it has finished."""
        self._last += 1
        self._jobs[self._last] = self.transfer.load(moves)
        return self._last

    def job(self, number: int) -> Job:
        """The job of a load under way."""
        return self._jobs[number]

    def finished(self) -> dict[int, Job]:
        """The loads that have ended since the last call."""
        done = {number: job for number, job in self._jobs.items() if job.done()}
        for number in done:
            del self._jobs[number]
        return done

    def wait_target_layer(self, numbers: Iterable[int], layer: int) -> None:
        """Makes what is computed from now on wait until these loads have brought `layer` of the target halves."""
        for number in numbers:
            if number in self._jobs:
                self._jobs[number].wait_target_layer(layer)

    def wait_draft(self, numbers: Iterable[int]) -> None:
        """Makes what is computed from now on wait until these loads have brought the draft halves."""
        for number in numbers:
            if number in self._jobs:
                self._jobs[number].wait_draft()
