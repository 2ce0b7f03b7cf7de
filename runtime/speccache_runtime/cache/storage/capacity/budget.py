"""How much this process may still write."""

from __future__ import annotations

import threading
import time


class Budget:
    """Counts what is written, and refuses what would go beyond the limit. Thread-safe."""

    def __init__(self, *, limited: bool) -> None:
        """With a limit nothing may be written until `allow` is called."""
        self._changed = threading.Condition()
        self._limited = limited
        self._told = False
        self._told_by = 0.0
        self._until = 0
        self._written = 0
        self._largest = 0
        self._short = False

    def take(self, nbytes: int) -> bool:
        """Whether `nbytes` may be written now; if so they count as written, until given back. Waits while a first limit
        is expected."""
        with self._changed:
            while self._limited and not self._told and (left := self._told_by - time.monotonic()) > 0:
                self._changed.wait(left)
            self._largest = max(self._largest, nbytes)
            if self._limited and self._written + nbytes > self._until:
                self._short = True
                return False
            self._written += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """They were not written after all."""
        with self._changed:
            self._written -= nbytes

    def expect(self, seconds: float) -> None:
        """A first limit will be told, in so many seconds at most: until then writers wait and are not refused. 0: it
        will not, and they go on."""
        with self._changed:
            self._told_by = time.monotonic() + seconds
            self._changed.notify_all()

    def allow(self, until: int) -> None:
        """From now on `until` bytes may be written, counted from the start of the process. 0 is no limit yet: what
        there is still belongs to others, who have not heard of this process."""
        with self._changed:
            self._until = until
            self._short = False
            self._told = self._told or until > 0
            self._changed.notify_all()

    def stop(self) -> None:
        """Nothing may be written until `allow` is called again."""
        with self._changed:
            self._until = 0
            self._short = False

    @property
    def told(self) -> bool:
        """Whether there was a first limit."""
        return self._told

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
