"""Finding stop strings in text that arrives bit by bit.

A stop string may begin in one piece of text and end in another, so text that could still be the beginning of a stop
string is held back until the next piece decides.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Passes text on until the first stop string; that one and what follows it are never shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Text that may be shown now. Nothing more comes once `found` is true."""
        if self.found:
            return ""
        text = self._held + text
        positions = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if positions:
            self.found, self._held = True, ""
            return text[: min(positions)]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
