"""How much this process may still write."""

from __future__ import annotations

import threading


class Budget:
    """Counts what is written, and refuses what would go beyond the limit. Thread-safe."""

    def __init__(self, *, limited: bool) -> None:
        """With a limit nothing may be written until `allow` is called."""
        self._lock = threading.Lock()
        self._limited = limited
        self._until = 0
        self._written = 0
        self._largest = 0
        self._short = False

    def take(self, nbytes: int) -> bool:
        """Whether `nbytes` may be written now; if so they count as written, until given back."""
        with self._lock:
            self._largest = max(self._largest, nbytes)
            if self._limited and self._written + nbytes > self._until:
                self._short = True
                return False
            self._written += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """They were not written after all."""
        with self._lock:
            self._written -= nbytes

    def allow(self, until: int) -> None:
        """From now on `until` bytes may be written, counted from the start of the process."""
        with self._lock:
            self._until = until
            self._short = False

    @property
    def until(self) -> int:
        """Up to how many bytes may be written."""
        return self._until

    @property
    def written(self) -> int:
        """Bytes written since the start."""
        return self._written

    @property
    def largest(self) -> int:
        """The largest object that anybody wanted to write, in bytes."""
        return self._largest

    @property
    def short(self) -> bool:
        """Whether something has been refused since the last `allow`."""
        return self._short
