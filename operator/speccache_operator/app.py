"""The process: connects the parts, and lives no longer than its Lease.

    listen on the HTTP port → take the Lease (a standby waits here) → wait for the CRD → reconcile, watch and renew
    → on a signal: stop working, give the Lease back, exit 0 · on a lost Lease or a broken part: stop at once, exit 1

Kubernetes restarts what exits; everything is rebuilt from what the API server says.
"""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

import kopf

from speccache_operator.children.context import RuntimeImage
from speccache_operator.cluster import KubernetesCluster, wait_until_served
from speccache_operator.errors import LeadershipLost
from speccache_operator.kinds import LEASE, RESOURCE, Key, Ref
from speccache_operator.logs import fields
from speccache_operator.loop import handlers
from speccache_operator.loop.controller import RECONCILE_TIMEOUT, Controller
from speccache_operator.loop.reconcile import Reconciler
from speccache_operator.loop.watching import Wakeups
from speccache_operator.metrics import Metrics
from speccache_operator.process import health
from speccache_operator.process.leader import Elector
from speccache_operator.process.settings import Settings

logger = logging.getLogger(__name__)

STUCK_SECONDS = 3 * RECONCILE_TIMEOUT
_STOP_SECONDS = 10.0
# kopf finds handlers by their import; naming the module here says that it is meant.
assert handlers.__doc__ is not None


async def run(settings: Settings) -> int:
    """Run until a signal or a loss; answers the exit code. Raises SettingsError, OSError when the port is taken."""
    metrics = Metrics()
    stop = asyncio.Event()
    _stop_on_signals(stop)
    async with await KubernetesCluster.connect() as cluster:
        controller, reconciler = _controller(settings, cluster, metrics)
        runner, port = await health.serve(
            settings.http_host, settings.http_port, controller.health, metrics.registry, stuck_after=STUCK_SECONDS
        )
        logger.info("listening", extra=fields(port=port, identity=settings.identity))
        try:
            elector = Elector(cluster, Ref(LEASE, settings.operator_namespace, settings.lease_name), settings.identity)
            if not await _unless_stopped(stop, elector.acquire()):
                return 0
            metrics.leading = 1
            return await _lead(settings, cluster, elector, controller, reconciler, stop)
        finally:
            metrics.leading = 0
            await runner.cleanup()


def _controller(settings: Settings, cluster: KubernetesCluster, metrics: Metrics) -> tuple[Controller, Reconciler]:
    image = RuntimeImage(
        settings.runtime_image, settings.runtime_image_pull_policy, settings.runtime_image_pull_secrets
    )
    reconciler = Reconciler(cluster, image, metrics, check_nodes=settings.check_nodes, instance=settings.identity)

    async def keys() -> list[Key]:
        return await reconciler.keys(settings.namespace)

    controller = Controller(
        reconciler.reconcile, keys, metrics, workers=settings.workers, resync_seconds=settings.resync_seconds
    )
    return controller, reconciler


async def _lead(
    settings: Settings,
    cluster: KubernetesCluster,
    elector: Elector,
    controller: Controller,
    reconciler: Reconciler,
    stop: asyncio.Event,
) -> int:
    """Work while the Lease is held."""
    holding = asyncio.create_task(elector.hold(), name="lease")

    async def work() -> None:
        await wait_until_served(cluster, RESOURCE, settings.namespace)
        async with asyncio.TaskGroup() as group:
            group.create_task(controller.run(), name="controller")
            group.create_task(_watch(settings, Wakeups(controller, reconciler), stop), name="watching")

    working = asyncio.create_task(work(), name="work")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({holding, working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Work ends first: nothing is written by a process that no longer renews.
        await _end(working)
        await _end(stopping)
        await _end(holding)
    lost = isinstance(_failure(holding), LeadershipLost)
    if not lost:
        await elector.release()
    if stop.is_set() and not lost:
        logger.info("stopped", extra=fields(identity=settings.identity))
        return 0
    failure = _failure(holding) or _failure(working)
    logger.error("cannot go on", extra=fields(error=str(failure)), exc_info=failure)
    return 1


async def _watch(settings: Settings, wakeups: Wakeups, stop: asyncio.Event) -> None:
    """kopf, until `stop` or an error that it cannot bear."""
    others = asyncio.all_tasks()
    scope: dict[str, Any] = (
        {"clusterwide": True} if settings.namespace is None else {"namespaces": [settings.namespace]}
    )
    tasks = await kopf.spawn_tasks(memo=kopf.Memo(wakeups=wakeups), standalone=True, stop_flag=stop, **scope)
    _stop_on_signals(stop)  # kopf has replaced our handlers, and there should be one way to stop
    await kopf.run_tasks(tasks, ignored=others)
    if not stop.is_set():
        raise RuntimeError("watching has ended by itself")


async def _unless_stopped(stop: asyncio.Event, coroutine: Coroutine[Any, Any, None]) -> bool:
    """Await the coroutine; False when `stop` came first (the coroutine is cancelled then)."""
    wanted = asyncio.ensure_future(coroutine)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({wanted, stopping}, return_when=asyncio.FIRST_COMPLETED)
    done = wanted.done() and not wanted.cancelled()
    await _end(stopping)
    await _end(wanted)
    if done:
        wanted.result()
    return done


async def _end(task: "asyncio.Task[Any] | asyncio.Future[Any]") -> None:
    """Cancel and wait, not for ever; how it ended is read from the task."""
    task.cancel()
    await asyncio.wait({task}, timeout=_STOP_SECONDS)


def _failure(task: "asyncio.Task[Any]") -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
