"""A queue of keys for a level-based loop.

Why not asyncio.Queue: a key that is woken ten times must run once, a key that is being worked on must not run twice at
the same time, wake-ups must be able to wait, and a key that keeps failing must wait longer each time. That is the whole
contract of a reconcile queue and nothing in the standard library has it.
"""

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays of a key that keeps failing: `first` seconds, doubled each time, never above `most`."""

    first: float = 0.5
    most: float = 120.0

    def delay(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row (1 or more)."""
        return min(self.most, self.first * 2.0 ** min(failures - 1, 32))


class WorkQueue(Generic[K]):
    """Keys that are due, now or later. Times come from the running loop's clock. Use from one event loop only."""

    def __init__(self, backoff: Backoff | None = None) -> None:
        self._backoff = backoff or Backoff()
        self._due: dict[K, float] = {}
        self._working: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()

    def add(self, key: K, delay: float = 0.0) -> None:
        """Make the key due after `delay` seconds, or sooner if it already is."""
        at = asyncio.get_running_loop().time() + delay
        if key not in self._due or at < self._due[key]:
            self._due[key] = at
            self._changed.set()

    def add_failed(self, key: K) -> float:
        """Make the key due after its next backoff delay; answers that delay in seconds."""
        self._failures[key] = self._failures.get(key, 0) + 1
        delay = self._backoff.delay(self._failures[key])
        self.add(key, delay)
        return delay

    def forget_failures(self, key: K) -> None:
        """The key succeeded: its next failure starts at the first delay again."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """The key that has been due longest, once there is one. The caller owns it until `done`."""
        while True:
            now = asyncio.get_running_loop().time()
            free = [(at, key) for key, at in self._due.items() if key not in self._working]
            at, key = min(free, key=lambda item: item[0], default=(None, None))
            if at is not None and key is not None and at <= now:
                del self._due[key]
                self._working[key] = now
                return key
            self._changed.clear()
            try:
                async with asyncio.timeout_at(at):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: K) -> None:
        """Give the key back; if it was added meanwhile it becomes available again."""
        del self._working[key]
        self._changed.set()

    def depth(self) -> int:
        """Keys that are due now and wait for a worker."""
        now = asyncio.get_running_loop().time()
        return sum(at <= now for key, at in self._due.items() if key not in self._working)

    def longest_wait(self) -> float:
        """Seconds for which the oldest due key has waited for a worker, or has been worked on; 0 when there is none."""
        now = asyncio.get_running_loop().time()
        waiting = [now - at for key, at in self._due.items() if key not in self._working]
        return max([0.0, *waiting, *(now - since for since in self._working.values())])
