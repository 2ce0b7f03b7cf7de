"""Turns what the storage tier says of itself into metrics, on storage threads (prometheus counters are thread-safe)."""

from __future__ import annotations

from speccache_runtime.cache.storage.breaker import BreakerState
from speccache_runtime.cache.storage.codec import CorruptReason, Half
from speccache_runtime.cache.storage.observer import Operation
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.metrics import Metrics


class StorageMetrics:
    """A `StorageObserver` that counts: one for each store, so that one that is not used any more sets no gauge."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._ended = False

    def on_operation(self, operation: Operation, half: Half, outcome: Outcome, seconds: float, nbytes: int) -> None:
        """Counts the operation, its bytes and its time."""
        self._metrics.storage_operations.labels(operation=operation, half=half.name.lower(), result=outcome).inc()
        self._metrics.storage_latency.labels(operation=operation).observe(seconds)
        if nbytes:
            self._metrics.storage_bytes.labels(operation=operation).inc(nbytes)

    def on_error(self, operation: Operation, half: Half, code: str) -> None:
        """Counts the error by its code."""
        self._metrics.storage_errors.labels(operation=operation, code=code).inc()

    def on_corrupt(self, half: Half, reason: CorruptReason) -> None:
        """Counts the damaged object by what was wrong with it."""
        self._metrics.storage_corrupt.labels(half=half.name.lower(), reason=reason.value).inc()

    def on_breaker(self, direction: Operation, state: BreakerState) -> None:
        """Shows whether the breaker lets operations through."""
        if not self._ended:
            self._metrics.storage_breaker_open.labels(operation=direction).set(state is not BreakerState.CLOSED)

    def on_usage(self, nbytes: int, objects: int, capacity: int | None) -> None:
        """Shows how full storage is."""
        if self._ended:
            return
        self._metrics.storage_used_bytes.set(nbytes)
        self._metrics.storage_objects.set(objects)
        if capacity is not None:
            self._metrics.storage_capacity_bytes.set(capacity)

    def on_swept(self, pages: int, nbytes: int) -> None:
        """Counts what was removed."""
        self._metrics.storage_swept_pages.inc(pages)
        self._metrics.storage_swept_bytes.inc(nbytes)

    def on_end(self) -> None:
        """Leaves the gauges as they are without storage."""
        self._ended = True
        for direction in (Operation.READ, Operation.WRITE):
            self._metrics.storage_breaker_open.labels(operation=direction).set(0)
        for gauge in (
            self._metrics.storage_used_bytes,
            self._metrics.storage_objects,
            self._metrics.storage_capacity_bytes,
        ):
            gauge.set(0)
