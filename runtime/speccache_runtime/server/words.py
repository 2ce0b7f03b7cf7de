"""What the server process says to the person who started it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]
"""Takes text for a person; lines end with a newline, and a line may come in parts."""


def say(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def timed(say: Say, what: str) -> Iterator[None]:
    """Say what begins, then how long it took, or that it has failed."""
    say(f"{what} … ")
    begun = time.monotonic()
    try:
        yield
    except BaseException:
        say("failed\n")
        raise
    say(f"{time.monotonic() - begun:.1f} s\n")
