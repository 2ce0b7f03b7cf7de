"""The one way from pages to a backend: every call is timed, reported, and stopped while storage keeps failing.

Reads and lookups share a breaker, writes have their own: a full volume refuses writes for hours while its pages are as
good as ever. Deletes (of corrupt objects only) have none: they are rare and prove nothing about either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from speccache_runtime.cache.storage.base import BackendError
from speccache_runtime.cache.storage.breaker import Breaker, BreakerSettings, BreakerState
from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.cache.storage.observer import Operation, StorageObserver
from speccache_runtime.cache.storage.outcome import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DIRECTION = {
    Operation.LOOKUP: Operation.READ,
    Operation.READ: Operation.READ,
    Operation.WRITE: Operation.WRITE,
    Operation.TOUCH: Operation.WRITE,
}
"""The breaker that an operation goes through; deleting goes through none."""


class Gate:
    """Calls into a backend. Thread-safe. `clock` gives seconds that never go back."""

    def __init__(self, observer: StorageObserver, clock: Callable[[], float], settings: BreakerSettings) -> None:
        self.observer = observer
        self._clock = clock
        reads = Breaker(settings, clock, lambda state: self._changed(Operation.READ, state))
        writes = Breaker(settings, clock, lambda state: self._changed(Operation.WRITE, state))
        self._causes: dict[Operation, BaseException] = {}
        self._breakers = {Operation.READ: reads, Operation.WRITE: writes}

    def state(self, direction: Operation) -> BreakerState:
        """Of the breaker of READ or WRITE."""
        return self._breakers[direction].state

    def hurry(self) -> None:
        """Try writes again soon after each failure from here on: there is not much time left (a drain)."""
        self._breakers[Operation.WRITE].hurry()

    def call(
        self, operation: Operation, half: Half, action: Callable[[], tuple[Outcome, int, T]]
    ) -> tuple[Outcome, T | None]:
        """Run `action`, which returns its outcome, the payload bytes it moved and a value; return outcome and value.

        A BackendError becomes ERROR, an open breaker DROPPED, both with None. Any answer at all, a miss or a corrupt
        object too, counts as success for the breaker: storage has answered.
        """
        direction = _DIRECTION.get(operation)
        breaker = self._breakers[direction] if direction is not None else None
        if breaker is not None and not breaker.allow():
            self.observer.on_operation(operation, half, Outcome.DROPPED, 0.0, 0)
            return Outcome.DROPPED, None
        start = self._clock()
        value: T | None = None
        try:
            outcome, nbytes, value = action()
        except BaseException as error:
            # Also for what is no BackendError, or a half-open breaker would wait for its attempt for ever.
            if direction is not None and breaker is not None:
                self._causes[direction] = error
                breaker.failure()
            if not isinstance(error, BackendError):
                raise
            logger.debug("storage %s of a %s half failed: %s", operation, half, error)
            self.observer.on_error(operation, half, error.code)
            outcome, nbytes = Outcome.ERROR, 0
        else:
            if breaker is not None:
                breaker.success()
        self.observer.on_operation(operation, half, outcome, self._clock() - start, nbytes)
        return outcome, value

    def _changed(self, direction: Operation, state: BreakerState) -> None:
        if state is BreakerState.OPEN:
            # Single errors are only counted, so this is where somebody learns what is wrong with the volume.
            cause = _told(self._causes[direction])
            logger.warning("storage breaker for %s operations is now %s: %s", direction, state, cause)
        else:
            logger.info("storage breaker for %s operations is now %s", direction, state)
        self.observer.on_breaker(direction, state)


def _told(error: BaseException) -> str:
    """The error's text, with its code where the text does not name it."""
    if isinstance(error, BackendError) and error.code not in str(error):
        return f"{error} ({error.code})"
    return str(error) or type(error).__name__
