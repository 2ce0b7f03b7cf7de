"""Storage threads: results come back on the thread that polls, and a call that hangs holds up nobody who leaves."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from speccache_api.geometry import KVGeometry
from speccache_runtime.cache.pool import HostArena, PoolShape
from speccache_runtime.cache.storage.base import BackendError
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairRead, Run
from speccache_runtime.cache.storage_io import StorageIO
from speccache_runtime.cache.workers import LEAST

PATIENCE_S = 20.0


def test_a_reader_never_waits_behind_writes(volume: Any, tools: SimpleNamespace, rig: Callable[..., Any]) -> None:
    first = rig(backend=volume)
    first.run([1] * 9)
    first.close()
    volume.gates["write"] = threading.Event()
    cache = rig(backend=volume)
    cache.run([2] * 33)  # eight pages to write, and the volume takes none
    assert tools.cached(cache.run([1] * 9)) == {"storage": 2}
    volume.gates["write"].set()


def test_results_and_bugs_come_back_on_the_thread_that_polls() -> None:
    class Store:
        def lookup(self, keys: object, parent: bytes) -> Run:
            if keys == ["bug"]:
                raise ZeroDivisionError("a bug")
            names.append(threading.current_thread().name)
            return Run(3, 2)

        def close(self) -> None:
            self.closed = True

    names: list[str] = []
    woken, store = threading.Event(), Store()
    io = StorageIO(store, None, woken.set)  # type: ignore[arg-type]
    seen: list[object] = []
    assert not io.poll()
    io.lookup([], b"", lambda run: seen.extend([run, threading.current_thread()]))
    assert woken.wait(PATIENCE_S)
    assert seen == [], "a callback has run outside of poll"
    assert io.poll()
    assert seen == [Run(3, 2), threading.current_thread()]
    assert names[0].startswith("storage-read")
    woken.clear()
    io.lookup(["bug"], b"", lambda _: None)  # type: ignore[list-item]
    assert woken.wait(PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        io.poll()
    io.close()
    assert store.closed


def test_an_error_of_the_backend_is_no_bug(volume: Any, rig: Callable[..., Any], tools: SimpleNamespace) -> None:
    volume.broken, volume.error = {"exists", "read", "write"}, BackendError("EIO", "broken on purpose")
    assert tools.cached(rig(backend=volume).run([1] * 9)) == {}


def test_a_cancelled_read_that_has_not_begun_ends_without_reading() -> None:
    """Eight requests that went away cost the next one nothing."""
    begun, go_on = threading.Semaphore(0), threading.Event()
    read: list[int] = []

    class Store:
        def read_pair(self, key: bytes, parent: bytes, target: object, draft: object) -> PairRead:
            read.append(key[0])
            begun.release()
            assert go_on.wait(PATIENCE_S)
            return PairRead(Outcome.HIT, Outcome.NOT_ASKED)

        def close(self) -> None:
            return

    arena = HostArena(PoolShape(KVGeometry.heads(1, 1, 1), 1, "float32"), None, 100, pinned=False)
    woken = threading.Event()
    io = StorageIO(Store(), arena, woken.set)  # type: ignore[arg-type]
    ended: dict[int, Outcome] = {}
    tickets = [
        io.read(bytes([page]), b"", page, False, lambda result, page=page: ended.update({page: result.target}))  # type: ignore[misc]
        for page in range(100)
    ]
    for _ in range(LEAST):
        assert begun.acquire(timeout=PATIENCE_S)
    for ticket in tickets:
        ticket.cancel()
    go_on.set()
    while len(ended) < 100:
        assert woken.wait(PATIENCE_S)
        woken.clear()
        io.poll()
    assert sorted(read) == [page for page, outcome in sorted(ended.items()) if outcome is Outcome.HIT]
    assert len(read) == LEAST
    assert set(ended.values()) == {Outcome.HIT, Outcome.NOT_ASKED}
    io.close()
