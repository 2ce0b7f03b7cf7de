"""Importing libraries that are as large as torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Nobody looks for garbage while the imports inside go on.

    torch and transformers make 400,000 objects that live as long as the process; looking through them again and again
    while they come took 0.6 of 5.0 seconds.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
