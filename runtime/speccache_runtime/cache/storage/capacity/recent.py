"""Which pages were read, or got a child, in the last minute or two, small enough to tell all pods: a Bloom filter.

Page keys are digests, so their own bits are the hashes. It never misses one that was read; with 10,000 pages a minute
it names one in 200 others by mistake, which are then spared once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FILTER_BYTES = 16384
GENERATION_S = 60.0

_HASHES = 4


class Recent:
    """Keys that were added in the last GENERATION_S seconds at least, and in twice that at most. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that never go back."""
        self._clock = clock
        self._lock = threading.Lock()
        self._begun = clock()
        self._now, self._before = bytearray(FILTER_BYTES), bytearray(FILTER_BYTES)

    def add(self, key: bytes) -> None:
        """`key` is a page key of 32 bytes."""
        with self._lock:
            self._turn()
            for byte, bit in _places(key):
                self._now[byte] |= bit

    def filter(self) -> bytes:
        """FILTER_BYTES for `contains`."""
        with self._lock:
            self._turn()
            both = int.from_bytes(self._now) | int.from_bytes(self._before)
            return both.to_bytes(FILTER_BYTES)

    def _turn(self) -> None:
        generations = int((self._clock() - self._begun) / GENERATION_S)
        if generations:
            self._before = self._now if generations == 1 else bytearray(FILTER_BYTES)
            self._now = bytearray(FILTER_BYTES)
            self._begun += generations * GENERATION_S


def contains(filter_: bytes, key: bytes) -> bool:
    """Whether `key` may be among those of the filter; False is certain."""
    return all(filter_[byte] & bit for byte, bit in _places(key))


def _places(key: bytes) -> list[tuple[int, int]]:
    hashes = (int.from_bytes(key[4 * number : 4 * number + 4]) for number in range(_HASHES))
    return [((value >> 3) % FILTER_BYTES, 1 << (value & 7)) for value in hashes]
