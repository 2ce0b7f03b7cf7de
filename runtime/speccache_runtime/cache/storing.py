"""Host -> storage: pages on the host are written through, and written again where storage did not take them or has lost
them.

Storage can be taken away, or be another one, at any time: what is known of a page's halves in storage is then forgotten
(`forget_stored`), and a new `Storing` begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from speccache_runtime.cache.index import Entry, Index
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairWrite
from speccache_runtime.cache.storage_io import Storage
from speccache_runtime.metrics import Metrics

TOUCH_S = 3600.0
"""How often storage is told that a page is in use."""

REFUSED_S = 5.0
REFUSED_PAGES = 64
"""Pages that storage did not take are offered again: so many, so often."""


@dataclass(frozen=True, slots=True)
class Flush:
    """How far a flush is: pages that storage is asked about, that are being written, that it is not known to hold
    whole, and that it has taken since it was attached."""

    asking: int
    writing: int
    unstored: int
    written: int

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.asking or self.writing or self.unstored)


class Storing:
    """Writes host pages to one storage, and tells it which are in use. Engine thread only."""

    def __init__(self, index: Index, io: Storage, metrics: Metrics) -> None:
        self._index = index
        self._io = io
        self._metrics = metrics
        self._writing: set[Entry] = set()
        self._asking = 0
        self._written = 0
        self._refused: dict[Entry, None] = {}
        """Pages that storage has not taken, those first that were offered longest ago."""
        self._try_again = 0.0
        self._draining = False
        self._ended = False
        self._max_writing = max(64, index.host.total // 4)

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return bool(self._writing)

    @property
    def unstored(self) -> int:
        """Pages on the host of which storage is not known to hold every half."""
        return sum(_unstored(entry) for entry in self._index.entries())

    def end(self) -> None:
        """Storage is not used any more: what is under way ends, and says nothing of any page."""
        self._ended = True
        self._refused.clear()

    # ---- writing

    def store(self, entry: Entry) -> None:
        """Writes the halves on the host that storage is not known to hold."""
        if entry in self._writing or not _unstored(entry):
            return
        if len(self._writing) >= self._max_writing and not self._draining:
            self._metrics.dropped_pages.labels(reason="write_backlog").inc()
            return
        assert entry.host is not None
        draft = entry.draft_on_host and not entry.stored_draft
        self._index.pin_host([entry])
        self._writing.add(entry)
        self._io.write(entry.key, entry.parent, entry.host, draft, entry.successors, self._answered(entry))

    def _answered(self, entry: Entry) -> Callable[[PairWrite], None]:
        def then(result: PairWrite) -> None:
            self._writing.remove(entry)
            self._index.unpin_host([entry])
            if self._ended:
                return
            entry.stored_target = entry.stored_target or result.target.stored
            entry.stored_draft = entry.stored_draft or result.draft.stored
            if result.target is Outcome.WRITTEN:
                entry.stored_used = time.monotonic()
            self._written += Outcome.WRITTEN in (result.target, result.draft)
            if not (result.target.failed or result.draft.failed):
                self._refused.pop(entry, None)
                self.store(entry)  # what storage has lost meanwhile
            elif not self._draining and entry not in self._refused:
                reason = "storage_full" if Outcome.FULL in (result.target, result.draft) else "storage_write"
                self._metrics.dropped_pages.labels(reason=reason).inc()
                if not self._refused:
                    self._try_again = time.monotonic() + REFUSED_S
                self._refused[entry] = None

        return then

    def offer_again(self) -> None:
        """Offers some of the pages to storage again that it has refused, every now and then."""
        if not self._refused or time.monotonic() < self._try_again:
            return
        self._try_again = time.monotonic() + REFUSED_S
        for entry in list(islice(self._refused, REFUSED_PAGES)):
            del self._refused[entry]
            if _unstored(entry):
                self._refused[entry] = None
                self.store(entry)

    def store_all(self) -> None:
        """Queues every host page that storage lacks, however many are waiting. What fails from here on is not counted
        as dropped: it can be tried again, and whoever ends this says what is left."""
        self._draining = True
        self._io.hurry()
        for entry in list(self._index.entries()):
            self.store(entry)

    # ---- what storage has

    def note_use(self, entries: Iterable[Entry]) -> None:
        """Tells storage that these pages are in use, of each at most once in TOUCH_S; what is gone is written again."""
        now = time.monotonic()
        for entry in entries:
            if entry.stored_target and now - entry.stored_used > TOUCH_S:
                self._touch(entry, (Outcome.MISS,))

    def ask_again(self) -> None:
        """Begins a flush: asks storage about every page on the host that it is believed to hold, which are all noted as
        used there. What it lacks is written again, and so is what it did not answer for."""
        doubts = (Outcome.MISS, Outcome.ERROR, Outcome.DROPPED)
        for entry in [e for e in self._index.entries() if e.host is not None and e.stored_target]:
            self._touch(entry, doubts)

    def flush(self) -> Flush:
        """Goes on with a flush: queues as many of the pages that storage lacks as may wait, those that it has refused
        before too."""
        if not (self._asking or self._writing):
            lacking = [entry for entry in self._index.entries() if _unstored(entry)]
            for entry in lacking[: self._max_writing]:
                self.store(entry)
        return Flush(self._asking, len(self._writing), self.unstored, self._written)

    def _touch(self, entry: Entry, lost: Collection[Outcome]) -> None:
        """Marks a page as used now; with an outcome in `lost` it counts as gone."""
        entry.stored_used = time.monotonic()
        self._asking += 1
        self._io.touch(entry.key, entry.parent, entry.stored_draft, self._touched(entry, lost))

    def _touched(self, entry: Entry, lost: Collection[Outcome]) -> Callable[[Outcome], None]:
        def then(outcome: Outcome) -> None:
            self._asking -= 1
            if outcome in lost and not self._ended:
                entry.stored_target = entry.stored_draft = False
                self.store(entry)

        return then


def forget_stored(index: Index) -> None:
    """What storage holds is not known any more, of no page."""
    for entry in index.entries():
        entry.stored_target = entry.stored_draft = False
        entry.stored_used = 0.0


def _unstored(entry: Entry) -> bool:
    """Whether a half on the host is not known to be in storage."""
    return entry.host is not None and (not entry.stored_target or (entry.draft_on_host and not entry.stored_draft))
