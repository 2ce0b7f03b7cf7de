"""Storage -> host: brings the pages that a waiting request could use, before it is scheduled.

    lookup (how long is the stored run?) ──▶ take host pages for just that run ──▶ read pairs ──▶ known to the index

Host memory is taken only once the hit is known. Two requests that want the same page read it once. A request waits
for its own prefetch until its deadline, and not at all while storage answers nobody. What it no longer wants and nobody
else does is not read; what was being read still lands, and serves others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from speccache_api.drafts import Draft
from speccache_runtime.cache.index import Entry, Index
from speccache_runtime.cache.keys import KeyChain, PageName
from speccache_runtime.cache.lease import Prefetch
from speccache_runtime.cache.patience import Patience
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairRead, Run
from speccache_runtime.cache.storage_io import Storage, Ticket
from speccache_runtime.metrics import Metrics


@dataclass(slots=True)
class _Reading:
    """A page that is being read into host page `host`, and for whom."""

    host: int
    waiters: list[Prefetch]
    ticket: Ticket | None = field(default=None)


class Prefetcher:
    """Reads stored pairs into host pages. Engine thread only."""

    def __init__(
        self,
        index: Index,
        io: Storage,
        metrics: Metrics,
        *,
        draft: Draft | None,
        answer: MissingDraft,
    ) -> None:
        """`draft` is what makes the draft halves; None when pages have none."""
        self._index = index
        self._io = io
        self._metrics = metrics
        self._draft = draft
        self._answer = answer
        self._reading: dict[bytes, _Reading] = {}
        self._patience = Patience()
        self._open: set[Prefetch] = set()
        self._ended = False

    @property
    def busy(self) -> bool:
        """Whether a read is under way."""
        return bool(self._reading)

    @property
    def hangs(self) -> bool:
        """Whether storage has been asked and answers nobody."""
        return self._patience.exhausted

    def taken_host_pages(self) -> list[int]:
        """Host pages that reads own, for the integrity check."""
        return [reading.host for reading in self._reading.values()]

    def start(self, chain: KeyChain, pages: int, deadline: float) -> Prefetch | None:
        """Begins to fetch what the index lacks of the first `pages` pages of `chain`; None when it lacks nothing, or
        storage hangs.

        The caller ends it with `finish`, whether or not it is still pending.
        """
        keys = chain.keys[:pages]
        known = self._index.walk(keys, chain.packed[:pages])
        if len(known) == pages:
            return None
        first = len(known)
        if self._patience.exhausted:
            if self._patience.may_knock():
                self._lookup(keys[first : first + 1], chain.page(first).parent, lambda found: None)
            return None
        prefetch = Prefetch(keys, deadline)
        self._open.add(prefetch)
        prefetch.pinned = {e.key: e for e in known if e.host is not None}
        self._index.pin_host(prefetch.pinned.values())
        wanted = [chain.page(number) for number in range(first, pages)]
        self._lookup([page.key for page in wanted], wanted[0].parent, self._looked_up(prefetch, wanted))
        return prefetch

    def finish(self, prefetch: Prefetch) -> None:
        """Ends the wait and unpins, once. What nobody else waits for and is not being read yet will not be."""
        if prefetch.closed:
            return
        prefetch.closed = True
        self._open.discard(prefetch)
        self._give_up(prefetch, list(prefetch.waiting_for))
        self._index.unpin_host([prefetch.pinned[key] for key in prefetch.keys if key in prefetch.pinned])
        prefetch.pinned = {}

    def end(self) -> None:
        """Ends all waits: nothing is read any more, and what arrives of what was being read is dropped."""
        self._ended = True
        for prefetch in list(self._open):
            self.finish(prefetch)

    def _give_up(self, prefetch: Prefetch, keys: Sequence[bytes]) -> None:
        for key in keys:
            prefetch.waiting_for.discard(key)
            reading = self._reading[key]
            reading.waiters.remove(prefetch)
            if not reading.waiters and reading.ticket is not None:
                reading.ticket.cancel()

    def _lookup(self, keys: Sequence[bytes], parent: bytes, then: Callable[[Run], None]) -> None:
        def answered(found: Run) -> None:
            self._patience.answered(failed=False)
            then(found)

        self._patience.asked()
        self._io.lookup(keys, parent, answered)

    def _looked_up(self, prefetch: Prefetch, wanted: Sequence[PageName]) -> Callable[[Run], None]:
        def then(found: Run) -> None:
            prefetch.looking = False
            if prefetch.closed:
                return
            use, try_draft = found.target, found.target
            if self._draft is None:
                try_draft = 0
            elif self._draft.rebuilds:
                try_draft = found.draft
            elif self._answer is MissingDraft.RECOMPUTE:
                use = found.draft
            self._count("target", "miss", len(wanted) - found.target)
            self._count("draft", "clamped", found.target - use)
            self._read(prefetch, wanted[:use], try_draft)

        return then

    def _read(self, prefetch: Prefetch, pages: Sequence[PageName], drafts: int) -> None:
        """Has pages read that nobody reads yet; the first `drafts` of them with their draft half."""
        new: list[tuple[PageName, bool]] = []
        for number, page in enumerate(pages):
            if page.key in self._reading:
                self._reading[page.key].waiters.append(prefetch)
                prefetch.waiting_for.add(page.key)
            elif (entry := self._index.find(page.key, page.packed)) is None:
                new.append((page, number < drafts))
            elif entry.host is not None:  # read for another request since this one asked
                self._land(prefetch, entry)
        hosts = self._index.take_host(len(new))
        if len(hosts) < len(new):
            self._metrics.dropped_pages.labels(reason="host_full_prefetch").inc(len(new) - len(hosts))
        for (page, draft), host in zip(new, hosts, strict=False):
            self._reading[page.key] = _Reading(host, [prefetch])
            prefetch.waiting_for.add(page.key)
            self._ask(page, draft)

    def _ask(self, page: PageName, draft: bool) -> None:
        reading = self._reading[page.key]
        self._patience.asked()
        reading.ticket = self._io.read(page.key, page.parent, reading.host, draft, self._arrived(page, draft))

    def _arrived(self, page: PageName, draft: bool) -> Callable[[PairRead], None]:
        def then(result: PairRead) -> None:
            if self._ended:
                self._index.give_host([self._reading.pop(page.key).host])
                return
            self._patience.answered(failed=result.target.failed or result.target is Outcome.NOT_ASKED)
            if result.target is Outcome.NOT_ASKED and self._reading[page.key].waiters:
                self._ask(page, draft)  # wanted again since it was cancelled
                return
            reading = self._reading.pop(page.key)
            entry = None
            if result.target is Outcome.HIT:
                has_draft = result.draft is Outcome.HIT
                entry = self._index.add_host(page, reading.host, draft=has_draft, successors=result.successors)
            if entry is None:
                self._index.give_host([reading.host])
            else:
                entry.stored_target, entry.stored_draft = True, result.draft is Outcome.HIT
                entry.stored_used = time.monotonic() - result.age
            self._count("target", result.target, 1)
            if draft:
                self._count("draft", result.draft, 1)
            for prefetch in reading.waiters:
                prefetch.waiting_for.discard(page.key)
                if entry is not None:
                    self._land(prefetch, entry)
                if self._breaks(result, draft):
                    behind = prefetch.keys[page.depth + 1 :]
                    self._give_up(prefetch, [key for key in behind if key in prefetch.waiting_for])

        return then

    def _breaks(self, result: PairRead, draft: bool) -> bool:
        """Whether the run has ended before this page, so that those behind it are of no use to who waited for it.

        Behind a damaged one they are read all the same: the next damaged one would only be found when it is needed.
        """
        if result.target is Outcome.MISS or result.target.failed:
            return True
        clamps = self._draft is not None and not self._draft.rebuilds and self._answer is MissingDraft.RECOMPUTE
        return clamps and draft and result.draft is Outcome.MISS

    def _land(self, prefetch: Prefetch, entry: Entry) -> None:
        prefetch.landed.add(entry.key)
        prefetch.pinned[entry.key] = entry
        self._index.pin_host([entry])

    def _count(self, half: str, result: str, pages: int) -> None:
        if pages and result != Outcome.NOT_ASKED:
            self._metrics.page_lookups.labels(tier="storage", half=half, result=result).inc(pages)
