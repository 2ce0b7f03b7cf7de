"""Facts that the storage tier tells about itself, so that metrics can subscribe without the tier knowing of them."""

from __future__ import annotations

import enum
from typing import Protocol

from speccache_runtime.cache.storage.breaker import BreakerState
from speccache_runtime.cache.storage.codec import CorruptReason, Half
from speccache_runtime.cache.storage.outcome import Outcome


class Operation(enum.StrEnum):
    """What was asked of the backend."""

    LOOKUP = "lookup"
    READ = "read"
    WRITE = "write"
    TOUCH = "touch"
    DELETE = "delete"


class StorageObserver(Protocol):
    """Called from whichever thread did the work; must be quick, thread-safe and must not raise."""

    def on_operation(self, operation: Operation, half: Half, outcome: Outcome, seconds: float, nbytes: int) -> None:
        """One operation has ended, after `seconds`. `nbytes`: payload bytes moved, 0 unless HIT or WRITTEN."""

    def on_error(self, operation: Operation, half: Half, code: str) -> None:
        """The backend failed with `code` (see `base.BackendError`); comes beside an ERROR operation."""

    def on_corrupt(self, half: Half, reason: CorruptReason) -> None:
        """A stored object was not what its name says; comes beside a CORRUPT operation."""

    def on_breaker(self, direction: Operation, state: BreakerState) -> None:
        """The breaker of READ (reads and lookups) or WRITE has changed its state."""

    def on_usage(self, nbytes: int, objects: int, capacity: int | None) -> None:
        """So many bytes are stored under the fingerprint by all pods, so many objects were when they were last listed.
        `capacity` in bytes, or None."""

    def on_swept(self, pages: int, nbytes: int) -> None:
        """This pod has removed pages to make room."""

    def on_end(self) -> None:
        """The store is not used any more; operations under way may still end, and tell so."""


class NullObserver:
    """Listens to nothing."""

    def on_operation(self, operation: Operation, half: Half, outcome: Outcome, seconds: float, nbytes: int) -> None:
        """Ignore."""

    def on_error(self, operation: Operation, half: Half, code: str) -> None:
        """Ignore."""

    def on_corrupt(self, half: Half, reason: CorruptReason) -> None:
        """Ignore."""

    def on_breaker(self, direction: Operation, state: BreakerState) -> None:
        """Ignore."""

    def on_usage(self, nbytes: int, objects: int, capacity: int | None) -> None:
        """Ignore."""

    def on_swept(self, pages: int, nbytes: int) -> None:
        """Ignore."""

    def on_end(self) -> None:
        """Ignore."""
