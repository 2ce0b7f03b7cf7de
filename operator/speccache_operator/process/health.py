"""The operator's own HTTP port: /healthz for the kubelet, /metrics for Prometheus.

kopf's liveness endpoint proves that its event loop answers. What matters is that resources are being reconciled, so
/healthz fails when a resource has waited for a worker, or been worked on, for far longer than a reconcile may take.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import CollectorRegistry


@dataclass(frozen=True, slots=True)
class Health:
    """How reconciling goes. `longest_wait_seconds` is of the oldest due or running key."""

    leading: bool
    queued: int
    longest_wait_seconds: float
    reconciles: int

    def alive(self, limit: float) -> bool:
        """False when a restart is the better bet. A standby has nothing to do and is alive."""
        return self.longest_wait_seconds < limit


async def serve(
    host: str, port: int, health: Callable[[], Health], registry: CollectorRegistry, *, stuck_after: float
) -> tuple[web.AppRunner, int]:
    """Start serving; answers the runner (the caller calls `cleanup()`) and the port. Raises OSError if it is taken."""

    async def get_health(_: web.Request) -> web.Response:
        state = health()
        alive = state.alive(stuck_after)
        return web.json_response({"alive": alive, **asdict(state)}, status=200 if alive else 503)

    async def get_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", get_health), web.get("/metrics", get_metrics)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner, runner.addresses[0][1]
