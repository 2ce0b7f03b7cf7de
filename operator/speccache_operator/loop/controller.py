"""The level-based loop: keys come from events, from failures and from the clock; what is done never depends on which.

A fixed number of workers take due keys from the queue and hand them to `reconcile`. Everything it raises ends here: the
key waits (longer each time) and is tried again, the worker goes on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from speccache_operator.errors import ClusterError, Conflict
from speccache_operator.kinds import Key
from speccache_operator.logs import fields
from speccache_operator.loop.workqueue import WorkQueue
from speccache_operator.metrics import Metrics
from speccache_operator.process.health import Health

logger = logging.getLogger(__name__)

RECONCILE_TIMEOUT = 120.0
"""Seconds after which one reconcile is given up; every request inside has its own, shorter, timeout."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a reconcile ended. `again_after`: seconds until it should run again by itself; None leaves it to the resync.

    `failed` means that the API server refused something: state it (it has been), and try again with backoff.
    """

    again_after: float | None = None
    failed: bool = False


Reconcile = Callable[[Key], Awaitable[Result]]


class Controller:
    """Runs `reconcile` for every key that is woken. `keys` lists all resources, for the resync."""

    def __init__(
        self,
        reconcile: Reconcile,
        keys: Callable[[], Awaitable[Iterable[Key]]],
        metrics: Metrics,
        *,
        workers: int,
        resync_seconds: float,
        queue: WorkQueue[Key] | None = None,
    ) -> None:
        self._reconcile = reconcile
        self._keys = keys
        self._metrics = metrics
        self._workers = workers
        self._resync_seconds = resync_seconds
        self._queue = queue or WorkQueue()
        self._finished = 0

    def wake(self, key: Key) -> None:
        """Something may have changed for this key."""
        self._queue.add(key)

    def health(self) -> Health:
        """Numbers for /healthz."""
        return Health(
            leading=bool(self._metrics.leading),
            queued=self._queue.depth(),
            longest_wait_seconds=self._queue.longest_wait(),
            reconciles=self._finished,
        )

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._resync(), name="resync")
            for number in range(self._workers):
                group.create_task(self._work(), name=f"worker-{number}")

    async def _resync(self) -> None:
        """Wake every resource now and then: watches can stall, and a lost wake-up must not be lost for ever."""
        while True:
            pause = self._resync_seconds
            try:
                for key in await self._keys():
                    self._queue.add(key)
            except ClusterError as error:
                logger.warning("cannot list resources", extra=fields(error=str(error)))
                pause = min(pause, 15.0)
            await asyncio.sleep(pause)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            key = await self._queue.get()
            started = loop.time()
            try:
                await self._once(key)
            finally:
                self._finished += 1
                self._metrics.duration.observe(loop.time() - started)
                self._queue.done(key)

    async def _once(self, key: Key) -> None:
        try:
            async with asyncio.timeout(RECONCILE_TIMEOUT):
                result = await self._reconcile(key)
        except (ClusterError, TimeoutError) as error:
            delay = self._queue.add_failed(key)
            self._metrics.reconciles.labels("retry").inc()
            # A conflict only says that what we read was old; it is part of normal work.
            level = logging.INFO if isinstance(error, Conflict) else logging.WARNING
            logger.log(level, "reconcile failed", extra=fields(key=str(key), error=str(error), retry_seconds=delay))
        except Exception:
            delay = self._queue.add_failed(key)
            self._metrics.reconciles.labels("error").inc()
            logger.exception("reconcile failed unexpectedly", extra=fields(key=str(key), retry_seconds=delay))
        else:
            self._metrics.reconciles.labels("retry" if result.failed else "ok").inc()
            if result.failed:
                self._queue.add_failed(key)
                return
            self._queue.forget_failures(key)
            if result.again_after is not None:
                self._queue.add(key, result.again_after)
