"""Runs storage operations on threads and hands their results back to the engine thread.

Reads and writes have separate queues, so that a request that waits for its prefix never waits behind write-through.
Every callback runs inside `poll`, on the thread that owns the index, so nothing else needs a lock.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from speccache_runtime.cache.pool import HostArena
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairRead, PairStore, PairWrite, Run, StoreState
from speccache_runtime.cache.workers import Workers

_T = TypeVar("_T")


class Ticket(Protocol):
    """A read that was asked for."""

    def cancel(self) -> None:
        """Nobody wants it any more: if it has not begun, it ends at once, with NOT_ASKED."""


class Storage(Protocol):
    """The storage tier seen from the engine thread. Each `then` is called once, by `poll`, unless it closes before.

    Pages are named by their key and `parent`, the key of the page before.
    """

    def lookup(self, keys: Sequence[bytes], parent: bytes, then: Callable[[Run], None]) -> None:
        """Asks for the longest run of `keys` whose target halves are stored; `parent` is the key before the first."""

    def read(self, key: bytes, parent: bytes, host: int, draft: bool, then: Callable[[PairRead], None]) -> Ticket:
        """Reads a page into host page `host`, which the caller must leave alone until `then` has run.

        `draft` says whether its draft half is read too.
        """

    def write(
        self,
        key: bytes,
        parent: bytes,
        host: int,
        draft: bool,
        successors: tuple[int, ...],
        then: Callable[[PairWrite], None],
    ) -> None:
        """Writes host page `host`, which must not change until `then` has run; its draft half too if `draft`."""

    def touch(self, key: bytes, parent: bytes, draft: bool, then: Callable[[Outcome], None]) -> None:
        """Marks a stored page as used now, its draft half too if `draft`; see `PairStore.touch`."""

    def hurry(self) -> None:
        """Tries writes again soon after each failure from here on (a drain)."""

    def poll(self) -> bool:
        """Calls `then` of finished operations; True if there were any. Raises what a worker raised."""

    def close(self) -> None:
        """Stops taking work; operations that have not begun are dropped. Does not wait for one that hangs."""


class _Read:
    """A read in this process."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


_NOTHING_FOUND = Run(0, 0)
_NOT_READ = PairRead(Outcome.NOT_ASKED, Outcome.NOT_ASKED)
_NOT_WRITTEN = PairWrite(Outcome.NOT_ASKED, Outcome.NOT_ASKED)


class StorageIO:
    """This process's storage on threads. `wake` is called from a worker when a result is ready."""

    def __init__(self, store: PairStore, arena: HostArena, wake: Callable[[], None]) -> None:
        """Owns `store` from here on."""
        self._store = store
        self._arena = arena
        self._wake = wake
        self._readers = Workers("storage-read")
        self._writers = Workers("storage-write")
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending = False

    def lookup(self, keys: Sequence[bytes], parent: bytes, then: Callable[[Run], None]) -> None:
        self._run(self._readers, lambda: self._store.lookup(keys, parent), _NOTHING_FOUND, then, lambda run: False)

    def read(self, key: bytes, parent: bytes, host: int, draft: bool, then: Callable[[PairRead], None]) -> Ticket:
        target, half = self._halves(host, draft)
        ticket = _Read()

        def work() -> PairRead:
            return _NOT_READ if ticket.cancelled else self._store.read_pair(key, parent, target, half)

        self._run(self._readers, work, _NOT_READ, then, lambda read: read.target is Outcome.HIT)
        return ticket

    def write(
        self,
        key: bytes,
        parent: bytes,
        host: int,
        draft: bool,
        successors: tuple[int, ...],
        then: Callable[[PairWrite], None],
    ) -> None:
        target, half = self._halves(host, draft)
        self._run(
            self._writers,
            lambda: self._store.write_pair(key, parent, target, half, successors),
            _NOT_WRITTEN,
            then,
            lambda write: write.target is Outcome.WRITTEN,
        )

    def touch(self, key: bytes, parent: bytes, draft: bool, then: Callable[[Outcome], None]) -> None:
        half = draft and self._arena.draft.owned
        self._run(
            self._writers,
            lambda: self._store.touch(key, parent, half),
            Outcome.NOT_ASKED,
            then,
            lambda outcome: False,
        )

    def hurry(self) -> None:
        self._store.hurry()

    def _halves(self, host: int, draft: bool) -> tuple[memoryview | None, memoryview | None]:
        """What of a host page this process writes to storage and reads from there."""
        arena = self._arena
        return (
            arena.target.page(host) if arena.target.owned else None,
            arena.draft.page(host) if draft and arena.draft.owned else None,
        )

    def _run(
        self,
        pool: Workers,
        work: Callable[[], _T],
        not_done: _T,
        then: Callable[[_T], None],
        usual: Callable[[_T], bool],
    ) -> None:
        """`not_done` is the result when `work` is not begun before the end; `usual` tells results of whole pages moved
        from others."""

        def job() -> bool:
            try:
                result = not_done if self._ending else work()
            except BaseException as error:  # noqa: BLE001 - a bug in the store must stop the engine, not a thread
                failure = error

                def raise_it() -> None:
                    raise failure

                self._results.put(raise_it)
                self._wake()
                return False
            self._results.put(lambda: then(result))
            self._wake()
            return usual(result)

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

    def end(self) -> None:
        """Begins no operation any more: those that wait get the answer that they were not done. `close` it when it has
        `ended`; `poll` until then."""
        self._ending = True
        for job in [*self._readers.close(), *self._writers.close()]:
            job()
        self._store.end()

    @property
    def ended(self) -> bool:
        """Whether, after `end`, every operation has, and was answered by `poll`."""
        return self._readers.idle and self._writers.idle and self._store.ended and self._results.empty()

    @property
    def state(self) -> StoreState:
        """How the store is now."""
        return self._store.state

    def close(self) -> None:
        self._readers.close()
        self._writers.close()
        self._store.close()
