"""Whether storage answers at all, so that a volume that hangs does not cost every request its wait."""

from __future__ import annotations

import time
from collections.abc import Callable

STALL_S = 5.0
"""Storage that was asked something and has answered nothing for so long hangs. A slow one answers something."""

KNOCK_S = 5.0
"""How often it is asked something meanwhile, for nobody: only an answer shows that it is well again."""


class Patience:
    """Says when to stop waiting for storage. Engine thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that never go back."""
        self._clock = clock
        self._asked = 0
        self._since = 0.0
        self._hangs = False
        self._knocked = 0.0

    def asked(self) -> None:
        """A question is on its way."""
        if self._asked == 0:
            self._since = self._clock()
        self._asked += 1

    def answered(self, *, failed: bool) -> None:
        """One question has ended. A failure that took long ends no wait: the next one may take as long."""
        self._asked -= 1
        if not failed:
            self._since = self._clock()
            self._hangs = False

    @property
    def exhausted(self) -> bool:
        """Whether nobody should wait for storage now."""
        if self._asked and not self._hangs and self._clock() - self._since > STALL_S:
            self._hangs = True
            self._knocked = self._clock()
        return self._hangs

    def may_knock(self) -> bool:
        """Whether to ask something now to see if storage answers again; takes the turn."""
        if self._clock() - self._knocked < KNOCK_S:
            return False
        self._knocked = self._clock()
        return True
