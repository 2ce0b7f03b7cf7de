"""Write-through: every published page is copied to the host, and from there to storage (`storing`), as a pair.

    published ──backup job──▶ host page attached ──storage write──▶ stored
        │                         │
        no host page free         too many writes waiting: the page stays on the host and is written when drained

A draft half that is made after its page was published follows by the same way; if the page is just being copied or
written, when that has ended.

A page that could not be copied is a later miss, never a loss: each is counted with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from speccache_runtime.cache.index import Entry, Index
from speccache_runtime.cache.transfer import Job, Move, Transfer
from speccache_runtime.metrics import Metrics


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
    """Copies published pages to the host. Engine thread only."""

    def __init__(self, index: Index, transfer: Transfer, metrics: Metrics, on_host: Callable[[Entry], None]) -> None:
        """`on_host` is told of each page that has landed."""
        self._index = index
        self._transfer = transfer
        self._on_host = on_host
        self._metrics = metrics
        self._jobs: list[tuple[Job, list[_Copy]]] = []
        self._copying: set[Entry] = set()
        self._late: set[Entry] = set()
        """Pages whose draft half came while they were copied, read or written."""

    @property
    def copying(self) -> bool:
        """Whether a copy to the host is under way."""
        return bool(self._jobs)

    def taken_host_pages(self) -> list[int]:
        """Host pages that backup jobs own, for the integrity check."""
        return [copy.page for _, copies in self._jobs for copy in copies if copy.entry.host is None]

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
        """Completes finished copies; True if there were any."""
        done = [item for item in self._jobs if item[0].done()]
        for item in done:
            self._jobs.remove(item)
            job, copies = item
            self._metrics.transfer_bytes.labels(direction="device_to_host").inc(job.nbytes)
            self._metrics.transfer_seconds.labels(direction="device_to_host").inc(job.seconds)
            for copy in copies:
                self._landed(copy)
        self._follow_up()
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
        self._on_host(entry)

    def _follow_up(self) -> None:
        """Copies draft halves that came while their pages were busy."""
        free = [e for e in self._late if e not in self._copying and not e.host_pins]
        self._late.difference_update(free)
        missing = [entry for entry in free if draft_missing(entry)]
        if missing:
            self.backup([Wanted(missing, [], ())])


def draft_missing(entry: Entry) -> bool:
    """Whether the host copy lacks a draft half that the device copy has."""
    return entry.draft_on_device and not entry.draft_on_host


def _device_page(entry: Entry) -> int:
    assert entry.device is not None
    return entry.device
