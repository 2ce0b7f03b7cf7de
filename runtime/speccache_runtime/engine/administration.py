"""The storage tier changed while the engine serves: what takes long happens here, the change itself between two steps.

attach   open and probe (this thread) ──▶ put in the place of the old one (engine thread)
flush    ask storage about every host page, write what it lacks, look again until it lacks nothing
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Protocol, TypeVar

from speccache_runtime.cache.paired import PairedCache
from speccache_runtime.cache.storing import Flush
from speccache_runtime.config import StorageConfig
from speccache_runtime.engine.parts import Stores
from speccache_runtime.engine.storage_report import Flushed, StorageReport
from speccache_runtime.errors import BadRequest, Conflict, Overloaded

TURN_S = 60.0
"""How long to wait for a moment between two steps: the longest honest step, and some."""

_LOOK_S = 0.05
_REFUSED_S = 0.25
"""Between two looks at a flush, and while storage takes nothing."""

_T = TypeVar("_T")


class Turns(Protocol):
    """Who has work done on the engine thread (`service.EngineService`)."""

    def between_steps(self, work: Callable[[PairedCache], _T]) -> Future[_T]:
        """Has `work` done between two steps. Raises Draining once a drain has begun."""


class StorageAdministration:
    """One change at a time; thread-safe. `over` is set when the engine has ended."""

    def __init__(
        self, turns: Turns, stores: Stores, attached: StorageConfig | None, ranks: int, over: threading.Event
    ) -> None:
        self._turns = turns
        self._stores = stores
        self._attached = attached
        self._ranks = ranks
        self._over = over
        self._one = threading.Lock()

    def report(self) -> StorageReport:
        """What is attached now."""

        def look(cache: PairedCache) -> StorageReport:
            return StorageReport(self._attached, cache.storage_state, cache.unstored, cache.num_ending)

        return self._turn(look)

    def attach(self, storage: StorageConfig) -> None:
        """Opens and probes `storage`, then puts it in the place of what is attached.

        Raises StorageError when it cannot be used, BadRequest for a capacity below one page, Conflict with several
        ranks, and Unavailable: what was attached stays so.
        """
        least = self._stores.pair_bytes
        if storage.capacity_bytes is not None and storage.capacity_bytes < least:
            raise BadRequest("capacityBytes", f"{storage.capacity_bytes} is less than one page takes ({least} bytes)")
        self._check_ranks()
        with self._one:
            store = self._stores.open(storage)

            def put(cache: PairedCache) -> None:
                cache.attach(store)
                self._attached = storage

            try:
                self._turn(put)
            except BaseException:
                store.close()
                raise

    def detach(self) -> None:
        """Takes away what is attached, if anything. Raises Conflict with several ranks, and Unavailable."""
        self._check_ranks()

        def take(cache: PairedCache) -> None:
            cache.attach(None)
            self._attached = None

        with self._one:
            self._turn(take)

    def flush(self, timeout: float) -> Flushed:
        """Has storage asked about every page on the host, and every page written that it lacks; returns when it lacks
        none, or after `timeout` seconds. Raises Conflict without storage, and Unavailable."""
        until = time.monotonic() + timeout
        with self._one:
            before = self._progress(lambda cache: cache.flush())
            self._turn(lambda cache: cache.ask_again())
            while True:
                now = self._progress(lambda cache: cache.flush())
                if now.done or time.monotonic() > until:
                    return Flushed(now.written - before.written, now.unstored)
                busy = now.asking or now.writing
                self._over.wait(_LOOK_S if busy else _REFUSED_S)

    def _progress(self, look: Callable[[PairedCache], Flush | None]) -> Flush:
        state = self._turn(look)
        if state is None:
            raise Conflict("no storage is attached", "no_storage")
        return state

    def _check_ranks(self) -> None:
        if self._ranks > 1:
            raise Conflict(
                f"storage cannot be changed while {self._ranks} ranks serve (parallelism.tensor); change "
                "kvCache.storage in the resource, which makes new pods",
                "several_ranks",
            )

    def _turn(self, work: Callable[[PairedCache], _T]) -> _T:
        """Has `work` done between two steps; Overloaded when its turn does not come, and then it never will."""
        future = self._turns.between_steps(work)
        try:
            return future.result(TURN_S)
        except NotInTime:
            if future.cancel():
                raise Overloaded(f"the engine is in one step for more than {TURN_S:.0f} s") from None
            return future.result()
