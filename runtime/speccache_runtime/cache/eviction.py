"""Which unpinned page of a tier goes first: the one whose last use is oldest."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """What the order needs of an entry. `used` only grows while the entry is a member."""

    key: bytes
    used: int


_E = TypeVar("_E", bound=Evictable)


class EvictionOrder(Generic[_E]):
    """Unpinned entries, oldest `used` first. An entry may be used again while it is a member; nobody needs to tell.

    A heap whose items may be out of date: an entry that was taken out or used since is dropped or put back when it
    comes up, so that using a page costs nothing here.
    """

    def __init__(self) -> None:
        self._members: dict[bytes, _E] = {}
        self._heap: list[tuple[int, int, _E]] = []
        self._serial = itertools.count()  # breaks ties, since entries cannot be compared

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: bytes) -> bool:
        return key in self._members

    def add(self, entry: _E) -> None:
        """Makes an entry evictable."""
        self._members[entry.key] = entry
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(e.used, next(self._serial), e) for e in self._members.values()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (entry.used, next(self._serial), entry))

    def remove(self, entry: _E) -> None:
        """Takes a member out; KeyError if it is none."""
        del self._members[entry.key]

    def pop(self) -> _E:
        """Takes out the member to evict; IndexError if there is none."""
        while True:
            used, _, entry = heapq.heappop(self._heap)
            if self._members.get(entry.key) is not entry:
                continue
            if used != entry.used:
                heapq.heappush(self._heap, (entry.used, next(self._serial), entry))
                continue
            del self._members[entry.key]
            return entry
