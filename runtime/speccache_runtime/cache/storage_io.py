"""Runs storage operations on threads and hands their results back to the engine thread.

Reads and writes have separate queues, so that a request that waits for its prefix never waits behind write-through.
Every callback runs inside `poll`, on the thread that owns the index, so nothing else needs a lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from speccache_runtime.cache.pool import HostArena
from speccache_runtime.cache.storage.store import PairRead, PairStore, PairWrite, Presence

READERS = 4
WRITERS = 1

_T = TypeVar("_T")


class Workers:
    """`count` threads that run jobs in order of arrival.

    They are daemons: the standard library's pools are waited for when the process ends, so that one call that a dead
    network volume never answers would keep a drained process alive until it is killed.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a job, which must not raise."""
        self._jobs.put(job)

    def close(self) -> None:
        """Drops the jobs that have not begun and ends the threads; does not wait for one that hangs."""
        while not self._jobs.empty():
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class Storage(Protocol):
    """The storage tier seen from the engine thread. Each `then` is called once, by `poll`, unless it closes before."""

    def lookup(self, keys: Sequence[bytes], then: Callable[[Sequence[Presence]], None]) -> None:
        """Asks for the longest run of `keys` whose target halves are stored."""

    def read(self, key: bytes, host: int, draft: bool, then: Callable[[PairRead], None]) -> None:
        """Reads a page into host page `host`, which the caller must leave alone until `then` has run.

        `draft` says whether its draft half is read too.
        """

    def write(
        self, key: bytes, host: int, draft: bool, successors: tuple[int, ...], then: Callable[[PairWrite], None]
    ) -> None:
        """Writes host page `host`, which must not change until `then` has run; its draft half too if `draft`."""

    def poll(self) -> bool:
        """Calls `then` of finished operations; True if there were any. Raises what a worker raised."""

    def close(self) -> None:
        """Stops taking work; operations that have not begun are dropped. Does not wait for one that hangs."""


class StorageIO:
    """This process's storage on threads. `wake` is called from a worker when a result is ready."""

    def __init__(self, store: PairStore, arena: HostArena, wake: Callable[[], None]) -> None:
        """Owns `store` from here on."""
        self._store = store
        self._arena = arena
        self._wake = wake
        self._readers = Workers(READERS, "storage-read")
        self._writers = Workers(WRITERS, "storage-write")
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def lookup(self, keys: Sequence[bytes], then: Callable[[Sequence[Presence]], None]) -> None:
        self._run(self._readers, lambda: self._store.lookup(keys), then)

    def read(self, key: bytes, host: int, draft: bool, then: Callable[[PairRead], None]) -> None:
        target, half = self._halves(host, draft)
        self._run(self._readers, lambda: self._store.read_pair(key, target, half), then)

    def write(
        self, key: bytes, host: int, draft: bool, successors: tuple[int, ...], then: Callable[[PairWrite], None]
    ) -> None:
        target, half = self._halves(host, draft)
        self._run(self._writers, lambda: self._store.write_pair(key, target, half, successors), then)

    def _halves(self, host: int, draft: bool) -> tuple[memoryview, memoryview | None]:
        return self._arena.target_half(host), self._arena.draft_half(host) if draft else None

    def _run(self, pool: Workers, work: Callable[[], _T], then: Callable[[_T], None]) -> None:
        def job() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - a bug in the store must stop the engine, not a thread
                failure = error

                def raise_it() -> None:
                    raise failure

                self._results.put(raise_it)
            else:
                self._results.put(lambda: then(result))
            self._wake()

        pool.submit(job)

    def poll(self) -> bool:
        any_done = False
        while True:
            try:
                callback = self._results.get_nowait()
            except queue.Empty:
                return any_done
            callback()
            any_done = True

    def close(self) -> None:
        self._readers.close()
        self._writers.close()
        self._store.close()
