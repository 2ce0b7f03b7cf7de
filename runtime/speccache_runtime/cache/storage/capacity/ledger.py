"""What a store holds, by a listing, and what to remove of it: the least recently used pages, children before parents.

A page's key is followed in its objects' names by its parent's, so a listing is a forest. Only leaves are removed, the
one that was used longest ago first; when its last child is gone, a page is a leaf. So what is left of a prompt is its
beginning, which is all that a lookup can find.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from speccache_runtime.cache.storage.base import PARENT_DIGITS, ObjectName, StoredObject
from speccache_runtime.cache.storage.codec import Half


@dataclass(slots=True)
class StoredPage:
    """All objects of one page: halves, shards, the halves of other drafts. `used_at` is the latest of theirs."""

    names: list[ObjectName]
    nbytes: int
    used_at: float

    @property
    def key(self) -> str:
        return self.names[0].key


class Ledger:
    """The pages of one listing, less those that were removed since. About half a kilobyte a page."""

    def __init__(self, objects: Iterable[StoredObject]) -> None:
        self.nbytes = 0
        self.objects = 0
        self._pages: dict[str, StoredPage] = {}
        self._children: Counter[str] = Counter()
        for each in objects:
            self._add(each)

    def _add(self, each: StoredObject) -> None:
        self.nbytes += each.nbytes
        self.objects += 1
        page = self._pages.get(each.name.key)
        if page is None:
            self._pages[each.name.key] = StoredPage([each.name], each.nbytes, each.used_at)
            self._children[each.name.parent] += 1
            return
        page.names.append(each.name)
        page.nbytes += each.nbytes
        page.used_at = max(page.used_at, each.used_at)

    def __len__(self) -> int:
        return len(self._pages)

    def victims(self, before: float, spared: Callable[[str], bool]) -> Iterator[StoredPage]:
        """Pages to remove, in this order, each out of the ledger when it is given; targets are first in `names`.

        None that was used at `before` or later, none whose key is `spared`, and so none that these come after.
        """
        leaves = [(page.used_at, key) for key, page in self._pages.items() if not self._children[key[:PARENT_DIGITS]]]
        heapq.heapify(leaves)
        parents = {key[:PARENT_DIGITS]: key for key in self._pages}
        while leaves:
            used_at, key = heapq.heappop(leaves)
            if used_at >= before:
                return
            if spared(key):
                continue
            page = self._pages.pop(key)
            # Without its target nobody looks for the draft's half; the other way round it would be half a hit.
            page.names.sort(key=lambda name: name.half is not Half.TARGET)
            self.nbytes -= page.nbytes
            self.objects -= len(page.names)
            above = page.names[0].parent
            self._children[above] -= 1
            parent = parents.get(above)
            if parent is not None and parent in self._pages and not self._children[above]:
                # A parent that lost its last child is not younger than it: prompts are used from their beginning on.
                heapq.heappush(leaves, (self._pages[parent].used_at, parent))
            yield page
