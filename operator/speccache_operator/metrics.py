"""What the operator counts about itself. Metrics of the served models are the runtime's."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from speccache_operator.kinds import Key

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The operator's metrics in a registry of their own. Also the collector of the per-reason gauge."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "speccache_operator_reconciles",
            "Reconciles by result: ok, retry or error.",
            ["result"],
            registry=self.registry,
        )
        self.duration = Histogram(
            "speccache_operator_reconcile_seconds", "Duration of a reconcile.", buckets=_SECONDS, registry=self.registry
        )
        self.writes = Counter(
            "speccache_operator_writes", "Writes to the API server.", ["kind", "verb"], registry=self.registry
        )
        self.leading = 0
        self._resources: dict[Key, tuple[str, str]] = {}
        self.registry.register(self)

    def set_resource(self, key: Key, ready: str, reason: str) -> None:
        """Remember the Ready condition of one resource."""
        self._resources[key] = (ready, reason)

    def forget_resource(self, key: Key) -> None:
        """The resource is gone."""
        self._resources.pop(key, None)

    def collect(self) -> Iterator[Metric]:
        """Gauges that are computed when asked for, so that a vanished reason has no stale sample."""
        resources = GaugeMetricFamily(
            "speccache_operator_resources", "SpecCacheDeployments by their Ready condition.", labels=["ready", "reason"]
        )
        for ready, reason in sorted(set(self._resources.values())):
            resources.add_metric([ready, reason], list(self._resources.values()).count((ready, reason)))
        yield resources
        yield GaugeMetricFamily(
            "speccache_operator_leading", "1 while this process holds the Lease.", value=self.leading
        )
