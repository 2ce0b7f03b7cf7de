"""Who may come in: places for requests, counted as the engine counts them, and a turn at the tokenizer.

Without it an overloaded server would tokenise every request before the engine refuses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from speccache_runtime.errors import Overloaded
from speccache_runtime.server.lengths import MAX_BODY_BYTES

MAX_WAITING_CHARACTERS = MAX_BODY_BYTES
"""Text that waits to be tokenised, of all requests together: some fifteen seconds of work."""


class Room:
    """Places for requests from before they are tokenised until the engine has ended them. Of the event loop only."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = 0

    def take(self) -> None:
        """Raises Overloaded. Every place taken is given back once."""
        if self._taken >= self._places:
            raise Overloaded(f"{self._taken} requests are running or waiting")
        self._taken += 1

    def give_back(self) -> None:
        """A request has ended, or was never submitted."""
        self._taken -= 1


class Turns:
    """One text is tokenised at a time: more at once take the memory of all and are not done earlier."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    @asynccontextmanager
    async def turn(self, characters: int) -> AsyncIterator[None]:
        """Waits for the turn of a text of this length. Raises Overloaded when too much waits already."""
        if self._waiting and self._waiting + characters > MAX_WAITING_CHARACTERS:
            raise Overloaded(f"{self._waiting} characters wait to be tokenised")
        self._waiting += characters
        try:
            async with self._turn:
                yield
        finally:
            self._waiting -= characters
