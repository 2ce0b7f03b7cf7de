"""Write-through: every published page is copied to the host, and from there to storage, as a pair.

    published ──backup job──▶ host page attached ──storage write──▶ stored
        │                         │
        no host page free         too many writes waiting: the page stays on the host and is written when drained

A draft half that is made after its page was published follows by the same way; if the page is just being copied or
written, when that has ended.

A page that could not be copied is a later miss, never a loss: each is counted with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from speccache_runtime.cache.index import Entry, Index
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairWrite
from speccache_runtime.cache.storage_io import Storage
from speccache_runtime.cache.transfer import Job, Move, Transfer
from speccache_runtime.metrics import Metrics

TOUCH_S = 3600.0
"""How often storage is told that a page is in use."""

REFUSED_S = 5.0
REFUSED_PAGES = 64
"""Pages that storage did not take are offered again: so many, so often."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pages of one request that should be on the host, in prefix order and pinned on the device by the request.

    `fresh` have just become known, or just got a draft half. `above` are some of the pages before them: the host may
    have given them up, or never had room for them, and without them the fresh ones could not be reached. No page of
    `keep` goes to make room: the end of a prompt must not push its own beginning out.
    """

    fresh: Sequence[Entry]
    above: Sequence[Entry]
    keep: Collection[Entry]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A page that is being copied to host page `page`; `draft` says whether its draft half was there to go along."""

    entry: Entry
    page: int
    draft: bool


class Writeback:
    """Copies published pages down the tiers. Engine thread only."""

    def __init__(self, index: Index, transfer: Transfer, io: Storage | None, metrics: Metrics) -> None:
        self._index = index
        self._transfer = transfer
        self._io = io
        self._metrics = metrics
        self._jobs: list[tuple[Job, list[_Copy]]] = []
        self._copying: set[Entry] = set()
        self._late: set[Entry] = set()
        """Pages whose draft half came while they were copied, read or written."""
        self._refused: set[Entry] = set()
        """Pages that storage did not take when they were new."""
        self._try_again = 0.0
        self._writing = 0
        self._draining = False
        self._max_writing = max(64, index.host.total // 4)

    @property
    def copying(self) -> bool:
        """Whether a copy to the host is under way."""
        return bool(self._jobs)

    @property
    def busy(self) -> bool:
        """Whether a copy or a storage write is under way."""
        return bool(self._jobs) or self._writing > 0

    def taken_host_pages(self) -> list[int]:
        """Host pages that backup jobs own, for the integrity check."""
        return [copy.page for _, copies in self._jobs for copy in copies if copy.entry.host is None]

    # ---- device -> host

    def backup(self, wanted: Sequence[Wanted]) -> None:
        """Copies device halves that the host lacks, in one job; fresh pages without room are dropped and counted."""
        copies: list[_Copy] = []
        for each in wanted:
            copies += self._copies(each)
        if not copies:
            return
        self._index.pin_device([copy.entry for copy in copies])
        moves = [Move(_device_page(copy.entry), copy.page, copy.draft) for copy in copies]
        self._jobs.append((self._transfer.backup(moves), copies))

    def _copies(self, wanted: Wanted) -> list[_Copy]:
        """The entries of one request to copy, each with its host page, which the copy owns from here on."""
        wished = dict.fromkeys((*wanted.above, *wanted.fresh))  # a page may be both, its draft half being fresh
        entries = [entry for entry in wished if entry not in self._copying]
        new = [entry for entry in entries if entry.host is None]
        repair = [e for e in entries if e.host is not None and draft_missing(e) and e.host_pins == 0]
        self._late.update(e for e in wished if draft_missing(e) and (e in self._copying or e.host_pins))
        self._index.pin_host(repair)  # before pages are taken: they must not go to make room
        pages = self._index.take_host(len(new), keep=wanted.keep)
        dropped = len(set(new[len(pages) :]) & set(wanted.fresh))
        if dropped:
            self._metrics.dropped_pages.labels(reason="host_full").inc(dropped)
        copies = [_Copy(e, page, e.draft_on_device) for e, page in zip(new, pages, strict=False)]
        copies += [_Copy(entry, entry.host, True) for entry in repair if entry.host is not None]
        self._copying.update(copy.entry for copy in copies)
        return copies

    def poll(self) -> bool:
        """Completes finished copies and queues their storage writes; True if there were any."""
        done = [item for item in self._jobs if item[0].done()]
        for item in done:
            self._jobs.remove(item)
            job, copies = item
            self._metrics.transfer_bytes.labels(direction="device_to_host").inc(job.nbytes)
            self._metrics.transfer_seconds.labels(direction="device_to_host").inc(job.seconds)
            for copy in copies:
                self._landed(copy)
        self._follow_up()
        self._offer_again()
        return bool(done)

    def _landed(self, copy: _Copy) -> None:
        entry = copy.entry
        self._copying.remove(entry)
        if entry.host is None:
            self._index.attach_host(entry, copy.page, draft=copy.draft)
        else:
            entry.draft_on_host = True
            self._index.unpin_host([entry])
        self._index.unpin_device([entry])
        self.store(entry)

    def _follow_up(self) -> None:
        """Copies draft halves that came while their pages were busy."""
        free = [e for e in self._late if e not in self._copying and not e.host_pins]
        self._late.difference_update(free)
        missing = [entry for entry in free if draft_missing(entry)]
        if missing:
            self.backup([Wanted(missing, [], ())])

    # ---- host -> storage

    def note_use(self, entries: Iterable[Entry]) -> None:
        """Tells storage that these pages are in use, of each at most once in TOUCH_S; what is gone is written again."""
        if self._io is None:
            return
        now = time.monotonic()
        for entry in entries:
            if entry.stored_target and now - entry.stored_used > TOUCH_S:
                entry.stored_used = now
                self._io.touch(entry.key, entry.parent, entry.stored_draft, self._touched(entry))

    def _touched(self, entry: Entry) -> Callable[[Outcome], None]:
        def then(outcome: Outcome) -> None:
            if outcome is Outcome.MISS:
                entry.stored_target = entry.stored_draft = False
                self.store(entry)

        return then

    def _offer_again(self) -> None:
        """Offers some of the pages to storage again that it has refused, every now and then, if they are still there."""
        if not self._refused or time.monotonic() < self._try_again:
            return
        self._try_again = time.monotonic() + REFUSED_S
        some = list(islice(self._refused, REFUSED_PAGES))
        self._refused.difference_update(some)
        for entry in some:
            self.store(entry)

    def store(self, entry: Entry) -> None:
        """Writes the halves on the host that storage is not known to hold."""
        if self._io is None or not _unstored(entry):
            return
        if self._writing >= self._max_writing and not self._draining:
            self._metrics.dropped_pages.labels(reason="write_backlog").inc()
            return
        assert entry.host is not None
        draft = entry.draft_on_host and not entry.stored_draft
        self._index.pin_host([entry])
        self._writing += 1
        self._io.write(entry.key, entry.parent, entry.host, draft, entry.successors, self._written(entry))

    def _written(self, entry: Entry) -> Callable[[PairWrite], None]:
        def then(result: PairWrite) -> None:
            self._writing -= 1
            self._index.unpin_host([entry])
            entry.stored_target = entry.stored_target or result.target.stored
            entry.stored_draft = entry.stored_draft or result.draft.stored
            if result.target is Outcome.WRITTEN:
                entry.stored_used = time.monotonic()
            if (result.target.failed or result.draft.failed) and not self._draining:
                reason = "storage_full" if Outcome.FULL in (result.target, result.draft) else "storage_write"
                self._metrics.dropped_pages.labels(reason=reason).inc()
                self._refused.add(entry)

        return then

    @property
    def unstored(self) -> int:
        """Pages on the host of which storage is not known to hold every half."""
        return 0 if self._io is None else sum(_unstored(entry) for entry in self._index.entries())

    def store_all(self) -> None:
        """Queues every host page that storage lacks, however many are waiting. What fails from here on is not counted
        as dropped: it can be tried again, and whoever ends this says what is left."""
        if self._io is None:
            return
        self._draining = True
        self._io.hurry()
        for entry in list(self._index.entries()):
            self.store(entry)


def draft_missing(entry: Entry) -> bool:
    """Whether the host copy lacks a draft half that the device copy has."""
    return entry.draft_on_device and not entry.draft_on_host


def _device_page(entry: Entry) -> int:
    assert entry.device is not None
    return entry.device


def _unstored(entry: Entry) -> bool:
    """Whether a half on the host is not known to be in storage."""
    return entry.host is not None and (not entry.stored_target or (entry.draft_on_host and not entry.stored_draft))
