"""The table of known pages: key -> where the page is, which halves are there, and who pins it.

Pure bookkeeping over integers: no torch, no I/O, one thread. It is a hash-chained table, not a tree of token ranges: a
prefix match is a walk until the first miss, a split cannot happen, and a hit is confirmed by the page's own token ids.

Who owns a page number, at any time exactly one of:
  device page:  the free list | one request (taken, not yet published) | one entry
  host page:    the free list | one job in flight (taken, not yet attached) | one entry

Eviction order: a chain is stamped from its beginning on, at once (`touch`) or piece by piece (`stamp`, `touch_some`),
so that every page is older than its parent, and a new page is stamped just older than its parent. So children go first
without anybody counting them, whatever order copies and writes finish in, and a page that is hot on the device stays on
the host.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

from speccache_runtime.cache.eviction import EvictionOrder
from speccache_runtime.cache.keys import PageName

MOST_SPARED = 64
"""How many pages that must stay are passed over in the search for one that may go: a bound on what the search costs."""


class Entry:
    """One known page. It lives as long as it has a device or a host page.

    `packed` are its token ids (see `keys.pack_tokens`), `parent` is the key of the page before, `successors`
    are the tokens that its draft half depends on.
    A draft flag says that the draft half in that tier is this page's; when it is False those bytes are never attended.
    `stored_target` and `stored_draft` say that the storage tier is known to hold that half, `stored_used` when it last
    noted a use of them, by this process's monotonic clock. `used` orders eviction in both tiers.
    """

    __slots__ = (
        "device",
        "device_pins",
        "draft_on_device",
        "draft_on_host",
        "host",
        "host_pins",
        "key",
        "packed",
        "parent",
        "stored_draft",
        "stored_target",
        "stored_used",
        "successors",
        "used",
    )

    def __init__(self, page: PageName, successors: tuple[int, ...], used: int) -> None:
        self.key = page.key
        self.parent = page.parent
        self.packed = page.packed
        self.successors = successors
        self.used = used
        self.device: int | None = None
        self.host: int | None = None
        self.device_pins = 0
        self.host_pins = 0
        self.draft_on_device = False
        self.draft_on_host = False
        self.stored_used = 0.0
        self.stored_target = False
        self.stored_draft = False

    @property
    def draft_present(self) -> bool:
        """Whether the copy that a request would be served from has its draft half."""
        return self.draft_on_device if self.device is not None else self.draft_on_host


class Pages:
    """The page numbers of one tier, lowest free number first so that fresh runs are contiguous."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))
        self.evictable: EvictionOrder[Entry] = EvictionOrder()
        self.evictions = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that could be taken now: free ones and those that nobody pins."""
        return len(self._free) + len(self.evictable)

    def pop(self) -> int:
        return heapq.heappop(self._free)

    def push(self, page: int) -> None:
        heapq.heappush(self._free, page)

    def free_pages(self) -> list[int]:
        return list(self._free)


class Index:
    """All known pages of the device and the host tier."""

    def __init__(self, *, device_pages: int, host_pages: int) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._clock = 0
        self.device = Pages(device_pages)
        self.host = Pages(host_pages)

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterable[Entry]:
        """All entries, in no order; do not change the index while iterating."""
        return self._entries.values()

    # ---- lookup

    def find(self, key: bytes, packed: bytes) -> Entry | None:
        """The entry of `key`, or None. A key whose token ids differ is a collision and is not a hit."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.packed == packed else None

    def walk(self, keys: Sequence[bytes], packed: Sequence[bytes]) -> list[Entry]:
        """Entries of the longest known prefix. Does not change the index."""
        out: list[Entry] = []
        for key, tokens in zip(keys, packed, strict=True):
            entry = self.find(key, tokens)
            if entry is None:
                break
            out.append(entry)
        return out

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks the known pages of a chain as just used; `keys` are in prefix order and begin with the first page."""
        stamp = self.stamp(len(keys))
        self.touch_some([self._entries.get(key) for key in keys], 0, stamp)

    def stamp(self, pages: int) -> int:
        """A new mark for the first page of a chain of `pages` pages, above all marks given before."""
        self._clock += pages
        return self._clock

    def touch_some(self, entries: Iterable[Entry | None], first: int, stamp: int) -> None:
        """Marks a piece of a chain, from page `first` on, whose first page's mark is `stamp`.

        Pieces come in prefix order. A page that was used later than that keeps its mark.
        """
        for depth, entry in enumerate(entries, first):
            if entry is not None:
                entry.used = max(entry.used, stamp - depth)

    def _new_entry(self, page: PageName, successors: tuple[int, ...]) -> Entry:
        above = self._entries.get(page.parent)
        # A page whose parent is unknown cannot be reached: first to go, unless its chain is touched.
        used = above.used - 1 if above else self._clock if page.depth == 0 else 0
        entry = self._entries[page.key] = Entry(page, successors, used)
        return entry

    # ---- device pages

    def take_device(self, count: int) -> list[int] | None:
        """`count` device pages for the caller to own, evicting the oldest unpinned entries.

        None, and no change, if there are too few.
        """
        if count > self.device.num_available:
            return None
        while self.device.num_free < count:
            victim = self.device.evictable.pop()
            self.device.evictions += 1
            self._drop_device(victim)
        return [self.device.pop() for _ in range(count)]

    def give_device(self, pages: Iterable[int]) -> None:
        """Takes back device pages that were taken and not published."""
        for page in pages:
            self.device.push(page)

    def publish(self, name: PageName, page: int, *, draft: bool, successors: tuple[int, ...]) -> tuple[Entry, bool]:
        """Makes a computed page known. Returns its entry and whether the entry now owns `page`.

        When it does, the entry is pinned once on behalf of the caller. Otherwise an equal page was known already and
        `page` stays the caller's. A known page without draft half gives way to one that has it, unless it is in use.
        """
        entry = self._entries.get(name.key)
        if entry is None:
            entry = self._new_entry(name, successors)
        elif entry.packed != name.packed:
            return entry, False
        elif entry.device is not None:
            if not (draft and not entry.draft_on_device and entry.device_pins == 0):
                return entry, False
            self.device.evictable.remove(entry)
            self.device.push(entry.device)
        entry.device = page
        entry.draft_on_device = draft
        if draft:
            entry.successors = successors
        entry.device_pins = 1
        return entry, True

    def add_draft(self, entry: Entry) -> None:
        """Notes that the draft half of a device page has been made after the target's."""
        assert entry.device is not None
        entry.draft_on_device = True

    def attach_device(self, entry: Entry, page: int, *, draft: bool) -> None:
        """Gives a host-only entry a device page (taken before) that its bytes are on their way to; pins it once."""
        assert entry.device is None
        assert entry.host is not None
        entry.device = page
        entry.draft_on_device = draft
        entry.device_pins = 1

    def pin_device(self, entries: Iterable[Entry]) -> None:
        """Keeps device pages from being evicted; one `unpin_device` each gives them back."""
        for entry in entries:
            assert entry.device is not None
            if entry.device_pins == 0:
                self.device.evictable.remove(entry)
            entry.device_pins += 1

    def unpin_device(self, entries: Iterable[Entry]) -> None:
        """Undoes `pin_device`."""
        for entry in entries:
            entry.device_pins -= 1
            assert entry.device_pins >= 0
            if entry.device_pins == 0:
                self.device.evictable.add(entry)

    def drop_device(self, entry: Entry) -> None:
        """Forgets the device copy of an unpinned entry, so that its host copy serves instead."""
        assert entry.device_pins == 0
        self.device.evictable.remove(entry)
        self._drop_device(entry)

    def _drop_device(self, entry: Entry) -> None:
        assert entry.device is not None
        self.device.push(entry.device)
        entry.device = None
        entry.draft_on_device = False
        self._forget_if_nowhere(entry)

    # ---- host pages

    def take_host(self, count: int, *, keep: Collection[Entry] = ()) -> list[int]:
        """Up to `count` host pages for a job to own, evicting the oldest unpinned entries, but none of `keep`."""
        spared: list[Entry] = []
        while self.host.num_free < count and len(self.host.evictable) and len(spared) < MOST_SPARED:
            victim = self.host.evictable.pop()
            if victim in keep:
                spared.append(victim)
            else:
                self._drop_host(victim)
        for entry in spared:
            self.host.evictable.add(entry)
        return [self.host.pop() for _ in range(min(count, self.host.num_free))]

    def _drop_host(self, entry: Entry) -> None:
        assert entry.host is not None
        self.host.evictions += 1
        self.host.push(entry.host)
        entry.host = None
        entry.draft_on_host = False
        self._forget_if_nowhere(entry)

    def give_host(self, pages: Iterable[int]) -> None:
        """Takes back host pages that were taken and not attached."""
        for page in pages:
            self.host.push(page)

    def attach_host(self, entry: Entry, page: int, *, draft: bool) -> None:
        """Makes a landed host page the entry's; it becomes evictable."""
        assert entry.host is None
        assert self._entries.get(entry.key) is entry
        entry.host = page
        entry.draft_on_host = draft
        self.host.evictable.add(entry)

    def add_host(self, name: PageName, page: int, *, draft: bool, successors: tuple[int, ...]) -> Entry | None:
        """Makes a page that was read from storage known.

        None if the key is known already: then `page` stays the caller's.
        """
        if name.key in self._entries:
            return None
        entry = self._new_entry(name, successors)
        self.attach_host(entry, page, draft=draft)
        return entry

    def pin_host(self, entries: Iterable[Entry]) -> None:
        """Keeps host pages from being evicted or rewritten."""
        for entry in entries:
            assert entry.host is not None
            if entry.host_pins == 0:
                self.host.evictable.remove(entry)
            entry.host_pins += 1

    def unpin_host(self, entries: Iterable[Entry]) -> None:
        """Undoes `pin_host`."""
        for entry in entries:
            entry.host_pins -= 1
            assert entry.host_pins >= 0
            if entry.host_pins == 0:
                self.host.evictable.add(entry)

    def _forget_if_nowhere(self, entry: Entry) -> None:
        if entry.device is None and entry.host is None:
            del self._entries[entry.key]

    # ---- integrity

    def check_integrity(self, *, device_taken: Sequence[int], host_taken: Sequence[int]) -> None:
        """Counts every page of both tiers exactly once; raises AssertionError with the difference.

        `device_taken` are the pages that requests own, `host_taken` those that jobs own.
        """
        on_device = [e.device for e in self._entries.values() if e.device is not None]
        on_host = [e.host for e in self._entries.values() if e.host is not None]
        _check_once("device", self.device, [*on_device, *device_taken])
        _check_once("host", self.host, [*on_host, *host_taken])
        for e in self._entries.values():
            assert e.device is not None or e.host is not None, f"entry {e.key.hex()} is nowhere"
            assert (e.key in self.device.evictable) == (e.device is not None and e.device_pins == 0), e.key.hex()
            assert (e.key in self.host.evictable) == (e.host is not None and e.host_pins == 0), e.key.hex()
            assert e.device is not None or not e.draft_on_device, e.key.hex()
            assert e.host is not None or not e.draft_on_host, e.key.hex()


def _check_once(tier: str, pages: Pages, held: list[int]) -> None:
    counted = sorted([*pages.free_pages(), *held])
    if counted != list(range(pages.total)):
        seen: set[int] = set()
        twice = sorted({p for p in counted if p in seen or seen.add(p)})  # type: ignore[func-returns-value]
        lost = sorted(set(range(pages.total)) - set(counted))
        raise AssertionError(f"{tier} pages: counted twice {twice}, lost {lost}")
