"""What a request holds of the cache: its wait for storage, what admission found, and its device pages. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from speccache_runtime.cache.index import Entry
from speccache_runtime.cache.keys import ROOT, KeyChain
from speccache_runtime.core import Tier


@dataclass(frozen=True, slots=True)
class Hit:
    """What admission found. `tokens` are cached; `draft_absent` of them have no draft half now."""

    tokens: int
    by_tier: dict[Tier, int] = field(default_factory=dict)
    draft_absent: int = 0


@dataclass(eq=False, slots=True)
class Prefetch:
    """One request's wait for storage. `landed` are the keys that storage gave it, `pinned` what it keeps on the
    host, `late` whether its deadline has been counted."""

    keys: Sequence[bytes]
    deadline: float
    looking: bool = True
    waiting_for: set[bytes] = field(default_factory=set)
    landed: set[bytes] = field(default_factory=set)
    pinned: dict[bytes, Entry] = field(default_factory=dict)
    closed: bool = False
    late: bool = False

    @property
    def pending(self) -> bool:
        """Whether something that this request waits for has not arrived."""
        return not self.closed and (self.looking or bool(self.waiting_for))


class Lease:
    """Which device pages a request uses, who owns each, and which of their draft halves are masked.

        pages      0 .......... shared .......... | ...... private ......
        entries    pinned entries of the index    | None: owned by this request until published

    A private page that was published but equals one that another request published first stays private. `loads` are
    the jobs that bring shared pages to the device, by number, whether or not they have ended. `draft_absent` marks the
    pages whose draft half is absent and stays so for this request: the draft never sees them.
    """

    def __init__(self, page_size: int, root: bytes = ROOT) -> None:
        """`root` is where the keys of its pages begin (`keys.salted_root`)."""
        self.page_size = page_size
        self.chain = KeyChain(page_size, root)
        self.pages: list[int] = []
        self.entries: list[Entry | None] = []
        self.draft_absent: list[bool] = []
        self.loads: tuple[int, ...] = ()
        self.published = 0
        self.paired = 0
        """How many leading pages have been looked at for a draft half that came after the target's."""
        self.known: set[Entry] = set()
        """The entries among `entries`."""
        self.swept = 0
        """How many leading pages the sweep under way has been over (see `PairedCache.publish`)."""
        self.stamp = 0
        """What the sweep under way marks its first page with."""

    @property
    def num_slots(self) -> int:
        """Token slots that the pages hold."""
        return len(self.pages) * self.page_size

    @property
    def num_absent(self) -> int:
        """Pages whose draft half is masked; all of them lie before the private pages."""
        return sum(self.draft_absent)

    def add(self, pages: list[int], entries: list[Entry | None], draft_absent: list[bool]) -> None:
        """Appends pages; the three lists have one item per page."""
        self.pages += pages
        self.entries += entries
        self.draft_absent += draft_absent
        self.known.update(entry for entry in entries if entry is not None)

    def own(self, page: int, entry: Entry) -> None:
        """Makes `entry` the one of a page that was private until now."""
        self.entries[page] = entry
        self.known.add(entry)

    def clear(self) -> None:
        """Forgets all pages; the caller has given them back."""
        self.pages, self.entries, self.draft_absent = [], [], []
        self.loads = ()
        self.published = self.paired = self.swept = self.stamp = 0
        self.known = set()

    def first_undrafted(self, slot: int) -> int:
        """The first slot from `slot` on that is not in a page whose draft half is known to be there."""
        page = slot // self.page_size
        while page < len(self.entries) and self._has_draft(page):
            page += 1
            slot = page * self.page_size
        return slot

    def undrafted_run(self, slot: int, end: int, taken: Collection[int]) -> int:
        """How many slots from `slot` on, up to `end`, lie before the next page that has its draft half, or whose device
        page is one of `taken`."""
        page = slot // self.page_size
        while page * self.page_size < end and not self._has_draft(page) and self.pages[page] not in taken:
            page += 1
        return max(0, min(end, page * self.page_size) - slot)

    def _has_draft(self, page: int) -> bool:
        entry = self.entries[page]
        return entry is not None and entry.draft_on_device

    def private_pages(self) -> list[int]:
        """Pages that this request owns."""
        return [page for page, entry in zip(self.pages, self.entries, strict=True) if entry is None]
