"""Stops asking a storage that keeps failing.

Without it every page of every request would wait for its own error, and a mount that takes a minute to say EIO would
take the engine's transfer threads with it.

    CLOSED ── `threshold` failures in a row ──▶ OPEN ── back-off over ──▶ HALF_OPEN (one caller may try)
       ▲                                          ▲                            │
       └────────────── success ───────────────────┼────────────────────────────┤
                                                  └── failure, or no answer within `attempt_s`: back-off doubles,
                                                      up to `cap_s`
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass


class BreakerState(enum.StrEnum):
    """Closed lets everything through, open nothing, half-open one attempt."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When to stop and for how long."""

    threshold: int = 5
    """Failures in a row that open the breaker; one success in between starts the count anew."""
    backoff_s: float = 1.0
    """Seconds of silence after the first opening; each failed attempt doubles it."""
    cap_s: float = 60.0
    """Longest silence, in seconds."""
    attempt_s: float = 60.0
    """An attempt that has said nothing for so many seconds has failed, so that one call which never comes back does not
    keep storage from being asked for ever."""

    def __post_init__(self) -> None:
        if self.threshold < 1 or not 0 < self.backoff_s <= self.cap_s or self.attempt_s <= 0:
            raise ValueError(f"need threshold >= 1, 0 < backoff_s <= cap_s and attempt_s > 0, not {self}")


class Breaker:
    """Thread-safe. Call `allow` before an attempt; after an allowed one call `success` or `failure` once, unless the
    attempt never ends."""

    def __init__(
        self,
        settings: BreakerSettings,
        clock: Callable[[], float],
        on_change: Callable[[BreakerState], None] = lambda state: None,
    ) -> None:
        """`clock` gives seconds that never go back. `on_change` runs in the caller's thread, without the lock held."""
        self._settings = settings
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._backoff = settings.backoff_s
        self._cap = settings.cap_s
        self._retry_at = 0.0
        self._attempt_until = 0.0

    @property
    def state(self) -> BreakerState:
        """The state as of the last call; OPEN stays OPEN until somebody asks `allow` after the back-off."""
        return self._state

    def blocked(self) -> bool:
        """Whether `allow` would refuse now."""
        with self._lock:
            return self._refuses(self._clock())

    def allow(self) -> bool:
        """Whether to try. After the back-off the first caller gets True and is the attempt that decides."""
        now = self._clock()
        with self._lock:
            if self._state is BreakerState.HALF_OPEN and now >= self._attempt_until:
                self._open(now)  # its attempt hangs
                changed = BreakerState.OPEN
            elif self._state is BreakerState.CLOSED or self._refuses(now):
                return self._state is BreakerState.CLOSED
            else:
                self._state = changed = BreakerState.HALF_OPEN
                self._attempt_until = now + self._settings.attempt_s
        self._on_change(changed)
        return changed is BreakerState.HALF_OPEN

    def hurry(self) -> None:
        """From now on the silence is never longer than the first one."""
        with self._lock:
            self._cap = self._backoff = self._settings.backoff_s
            self._retry_at = min(self._retry_at, self._clock() + self._backoff)

    def success(self) -> None:
        """An attempt worked. Ignored while OPEN: it began before the breaker opened and proves nothing."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                return
            changed = self._state is not BreakerState.CLOSED
            self._state = BreakerState.CLOSED
            self._failures = 0
            self._backoff = self._settings.backoff_s
        if changed:
            self._on_change(BreakerState.CLOSED)

    def failure(self) -> None:
        """An attempt failed. Ignored while OPEN, so that a crowd of late failures does not double the back-off each."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                return
            self._failures += 1
            if self._state is BreakerState.CLOSED and self._failures < self._settings.threshold:
                return
            self._open(self._clock())
        self._on_change(BreakerState.OPEN)

    def _refuses(self, now: float) -> bool:
        if self._state is BreakerState.OPEN:
            return now < self._retry_at
        return self._state is BreakerState.HALF_OPEN

    def _open(self, now: float) -> None:
        if self._state is BreakerState.HALF_OPEN:
            self._backoff = min(self._backoff * 2, self._cap)
        self._state = BreakerState.OPEN
        self._retry_at = now + self._backoff
