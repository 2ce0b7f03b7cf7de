"""Runs an engine on its own thread and lets any other thread talk to it.

Requests and aborts go into an inbox that the engine thread empties between steps; outputs come back through the
callback given with each request. A failure that the engine cannot survive ends every request with an error, once, and
stays visible.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from speccache_runtime.cache.paired import PairedCache
from speccache_runtime.config import EngineConfig
from speccache_runtime.core import Finish, Limits, Output, Request, Usage
from speccache_runtime.engine.administration import StorageAdministration
from speccache_runtime.engine.build import Built, build_engine
from speccache_runtime.errors import Draining, Overloaded
from speccache_runtime.metrics import Metrics

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_IDLE_WAIT_S = 0.5
"""Longest sleep of the idle engine thread; it is woken earlier by requests and finished transfers."""

_STALL_WAIT_S = 0.001
"""Pause while pages are copied and nothing can be computed: copies wake nobody when they end."""

STALL_S = 300.0
"""After so long a turn of the engine thread hangs: the longest honest one is a prefill step of seconds, on a throttled
CPU of a minute or two. Kernels are compiled before the thread starts."""

_FLUSH_AGAIN_S = 0.25
"""Pause of a drain before pages are written again that storage has refused."""

_ABORT_WAIT_S = 5.0
"""How long a drain waits for aborted requests to end: one step, however long a step is."""


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    finish: Finish


@dataclass(frozen=True, slots=True)
class _Call:
    """Work of another thread's to be done between two steps."""

    work: Callable[[PairedCache], Any]
    done: Future[Any]

    def run(self, cache: PairedCache) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            result = self.work(cache)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is read
            self.done.set_exception(error)
        else:
            self.done.set_result(result)

    def refuse(self, error: str) -> None:
        """Nobody will do it."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(Draining(error, retry_after=1))


class EngineService:
    """The engine as the server sees it. All methods but `start` may be called from any thread."""

    def __init__(self, config: EngineConfig, registry: CollectorRegistry) -> None:
        self.config = config
        self._metrics = Metrics(registry)
        self._wakeup = threading.Condition()
        self._inbox: list[Request | _Abort | _Call] = []
        self._clients: dict[str, tuple[Request, Callable[[Output], None]]] = {}
        self._pending = False
        self._draining = False
        self._flush = False
        self._stopping = False
        self._quiet = threading.Event()
        self._flushed = threading.Event()
        self._flushing = False
        self._unstored = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._built: Built | None = None
        self._storage: StorageAdministration | None = None
        self._beat: float | None = None
        self.failed: str | None = None

    # ---- life

    def start(self) -> None:
        """Loads the models and starts the engine thread. Blocks; raises SpecCacheError when it cannot serve."""
        built = self._built = build_engine(self.config, self._metrics, self._emit, self._wake)
        self._storage = StorageAdministration(self, built.stores, self.config.storage, self.config.tensor, self._over)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._thread is not None and self.failed is None and not (self._draining or self._stopping)

    @property
    def stalled(self) -> str | None:
        """One line when the engine thread hangs in a turn, None when it does not, or no thread runs."""
        beat = self._beat
        waited = 0.0 if beat is None else time.monotonic() - beat
        return f"the engine has not finished a step for {waited:.0f} s" if waited > STALL_S else None

    @property
    def limits(self) -> Limits:
        """Valid after `start`."""
        assert self._built is not None
        return self._built.limits

    def drain(self, request_timeout: float, flush_timeout: float) -> None:
        """Takes no more requests, finishes the running ones, and writes to storage what it lacks.

        Requests still running after `request_timeout` seconds are aborted; pages not written after `flush_timeout`
        seconds are given up, and logged. Blocks; returns at once when the engine does not run.
        """
        with self._wakeup:
            self._draining = True
            self._notify()
        if self._thread is None:
            return
        if not self._quiet.wait(request_timeout):
            left = self._abort_all()
            logger.warning("drain: requests aborted after timeout", extra={"requests": left})
            self._quiet.wait(_ABORT_WAIT_S)
        with self._wakeup:
            self._flush = True
            self._notify()
        if not self._flushed.wait(flush_timeout):
            self._metrics.dropped_pages.labels(reason="drain").inc(self._unstored)
            logger.warning(
                "drain: pages not written to storage in time; they will be computed again",
                extra={"pages": self._unstored, "timeout_seconds": flush_timeout},
            )

    def wait_over(self) -> str | None:
        """Blocks until the engine thread has ended and every request with it; why it failed, None if it was stopped."""
        self._over.wait()
        return self.failed

    def stop(self) -> None:
        """Ends the engine thread and frees the tiers. Requests that still run get an error."""
        with self._wakeup:
            self._stopping = True
            self._notify()
        if self._thread is not None:
            self._thread.join()

    # ---- requests

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        """Queues a request; `on_output` is called on the engine thread, the last time with `finish` set.

        A callback that raises ends its own request. Raises BadRequest (too long, unknown token), Overloaded or
        Draining, and ValueError for the id of a request that has not ended.
        """
        self.limits.check(request)
        with self._wakeup:
            if self.failed is not None or self._draining or self._stopping:
                raise Draining(self.failed or "this replica is shutting down; ask another one", retry_after=1)
            if request.request_id in self._clients:
                raise ValueError(f"request id {request.request_id} is in use")
            if len(self._clients) >= self.config.max_requests:
                raise Overloaded(f"{len(self._clients)} requests are running or waiting")
            self._clients[request.request_id] = (request, on_output)
            self._inbox.append(request)
            self._notify()

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> None:
        """Ends a request early; its callback gets an output with `finish`. Unknown ids are ignored.

        `Finish.STOP` is for a caller that has all it wants, so that the request does not count as aborted.
        """
        with self._wakeup:
            self._inbox.append(_Abort(request_id, finish))
            self._notify()

    # ---- storage

    @property
    def storage(self) -> StorageAdministration:
        """How the storage tier is looked at and changed: valid after `start`, and until a drain begins, which writes to
        what is attached."""
        assert self._storage is not None
        return self._storage

    def between_steps(self, work: Callable[[PairedCache], _T]) -> Future[_T]:
        """Has `work` done on the engine thread between two steps. Raises Draining once a drain has begun."""
        call = _Call(work, Future())
        with self._wakeup:
            if self.failed is not None or self._draining or self._stopping:
                raise Draining(self.failed or "this replica is shutting down", retry_after=1)
            self._inbox.append(call)
            self._notify()
        return call.done

    def _abort_all(self) -> int:
        with self._wakeup:
            self._inbox += [_Abort(request_id, Finish.ABORT) for request_id in self._clients]
            self._notify()
            return len(self._clients)

    def _notify(self) -> None:
        """Makes the engine thread look again, also when it is just about to sleep. With the lock held."""
        self._pending = True
        self._wakeup.notify()

    # ---- engine thread

    def _wake(self) -> None:
        with self._wakeup:
            self._notify()

    def _emit(self, output: Output) -> None:
        with self._wakeup:
            if output.finish is None:
                _, callback = self._clients[output.request_id]
            else:
                _, callback = self._clients.pop(output.request_id)
        try:
            callback(output)
        except Exception:
            # One client's trouble must not end the others' requests.
            logger.exception("a request's callback failed", extra={"request_id": output.request_id})
            self.abort(output.request_id)

    def _run(self) -> None:
        assert self._built is not None
        engine = self._built.engine
        try:
            while not self._stopping:
                self._beat = time.monotonic()
                self._take_inbox()
                worked = engine.step()
                engine.update_gauges()
                if not worked:
                    self._idle()
        except Exception as error:
            logger.exception("engine failed")
            self.failed = f"engine failed: {type(error).__name__}: {error}"
        self._beat = None
        self._answer_all(self.failed or "the engine was stopped")
        self._quiet.set()
        self._flushed.set()
        self._built.close()
        self._over.set()

    def _answer_all(self, error: str) -> None:
        """Ends every request: those that the engine has with what they cost, then those that it never got to see."""
        assert self._built is not None
        with self._wakeup:
            self._stopping = True
            inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, _Call):
                item.refuse(error)
        self._built.engine.fail_all(error)
        for request, _ in list(self._clients.values()):
            self._emit(Output(request.request_id, (), Finish.ERROR, Usage(len(request.prompt), 0), error))

    def _take_inbox(self) -> None:
        assert self._built is not None
        with self._wakeup:
            inbox, self._inbox = self._inbox, []
            self._pending = False
        for item in inbox:
            if isinstance(item, Request):
                self._built.engine.add(item)
            elif isinstance(item, _Call):
                item.run(self._built.engine.cache)
            else:
                self._built.engine.abort(item.request_id, item.finish)

    def _idle(self) -> None:
        """Nothing can be computed now: advance a drain, then sleep until somebody wakes the engine."""
        assert self._built is not None
        engine = self._built.engine
        with self._wakeup:
            if self._draining and not self._inbox and engine.num_requests == 0:
                self._quiet.set()
            flush_now = self._flush and self._quiet.is_set() and not self._flushed.is_set()
        if flush_now:
            self._unstored = engine.cache.unstored
            if not engine.cache.storing:
                self._flush_again()
                return
        with self._wakeup:
            if not (self._inbox or self._pending or self._stopping):
                self._wakeup.wait(_STALL_WAIT_S if engine.cache.copying else _IDLE_WAIT_S)

    def _flush_again(self) -> None:
        """Has everything written that storage lacks, until it lacks nothing: what failed is tried again soon."""
        assert self._built is not None
        if not self._unstored:
            self._flushed.set()
            return
        with self._wakeup:
            if self._flushing:
                self._wakeup.wait_for(lambda: self._stopping, _FLUSH_AGAIN_S)
        self._flushing = True
        self._built.engine.cache.store_all()
