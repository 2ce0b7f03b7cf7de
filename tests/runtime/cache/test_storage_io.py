"""Storage threads: results come back on the thread that polls, and a call that hangs holds up nobody who leaves."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from speccache_runtime.cache.storage.base import BackendError
from speccache_runtime.cache.storage_io import StorageIO, Workers

PATIENCE_S = 20.0


def test_jobs_run_in_order_of_arrival() -> None:
    seen: list[int] = []
    done = threading.Event()
    workers = Workers(1, "test")
    for number in range(50):
        workers.submit(lambda number=number: seen.append(number))  # type: ignore[misc]
    workers.submit(done.set)
    assert done.wait(PATIENCE_S)
    assert seen == list(range(50))
    workers.close()


def test_closing_drops_what_has_not_begun_and_waits_for_nobody() -> None:
    hangs, go_on, never = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert go_on.wait(PATIENCE_S)

    workers = Workers(1, "hanging")
    workers.submit(hang)
    workers.submit(never.set)
    assert hangs.wait(PATIENCE_S)
    workers.close()
    (thread,) = [t for t in threading.enumerate() if t.name == "hanging-0"]
    assert thread.daemon, "the interpreter would wait for it at exit"
    go_on.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not never.is_set()


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
        def lookup(self, keys: object) -> list[object]:
            if keys == ["bug"]:
                raise ZeroDivisionError("a bug")
            return [threading.current_thread().name]

        def close(self) -> None:
            self.closed = True

    woken, store = threading.Event(), Store()
    io = StorageIO(store, None, woken.set)  # type: ignore[arg-type]
    seen: list[object] = []
    assert not io.poll()
    io.lookup([], lambda names: seen.extend([*names, threading.current_thread()]))
    assert woken.wait(PATIENCE_S)
    assert seen == [], "a callback has run outside of poll"
    assert io.poll()
    assert seen[1] is threading.current_thread()
    assert str(seen[0]).startswith("storage-read")
    woken.clear()
    io.lookup(["bug"], lambda _: None)  # type: ignore[list-item]
    assert woken.wait(PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        io.poll()
    io.close()
    assert store.closed


def test_an_error_of_the_backend_is_no_bug(volume: Any, rig: Callable[..., Any], tools: SimpleNamespace) -> None:
    volume.broken, volume.error = {"exists", "read", "write"}, BackendError("EIO", "broken on purpose")
    assert tools.cached(rig(backend=volume).run([1] * 9)) == {}
