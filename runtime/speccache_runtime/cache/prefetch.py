"""Storage -> host: brings the pages that a waiting request could use, before it is scheduled.

    lookup (how long is the stored run?) ──▶ take host pages for just that run ──▶ read pairs ──▶ known to the index

Host memory is taken only once the hit is known. Two requests that want the same page read it once. A request waits
for its own prefetch until its deadline; what lands later still serves others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speccache_api.drafts import Draft
from speccache_runtime.cache.index import Entry, Index
from speccache_runtime.cache.keys import ROOT
from speccache_runtime.cache.lease import Prefetch
from speccache_runtime.cache.policy import MissingDraft, usable_pages
from speccache_runtime.cache.storage.store import HalfRead, PairRead, Presence
from speccache_runtime.cache.storage_io import Storage
from speccache_runtime.metrics import Metrics

_RESULTS = {
    HalfRead.PRESENT: "hit",
    HalfRead.ABSENT: "miss",
    HalfRead.CORRUPT: "corrupt",
    HalfRead.ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class _Page:
    key: bytes
    parent: bytes
    packed: bytes


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
        self._reading: dict[bytes, tuple[int, list[Prefetch]]] = {}

    @property
    def busy(self) -> bool:
        """Whether a read is under way."""
        return bool(self._reading)

    def taken_host_pages(self) -> list[int]:
        """Host pages that reads own, for the integrity check."""
        return [page for page, _ in self._reading.values()]

    def start(self, keys: Sequence[bytes], packed: Sequence[bytes], deadline: float) -> Prefetch | None:
        """Begins to fetch what the index lacks of the prefix `keys`; None when it lacks nothing.

        The caller ends it with `finish`, whether or not it is still pending.
        """
        known = self._index.walk(keys, packed)
        if len(known) == len(keys):
            return None
        prefetch = Prefetch(keys, deadline)
        prefetch.pinned = {e.key: e for e in known if e.host is not None}
        self._index.pin_host(prefetch.pinned.values())
        first = len(known)
        parents = [keys[first - 1] if first else ROOT, *keys[first:]]
        wanted = [_Page(*p) for p in zip(keys[first:], parents, packed[first:], strict=False)]
        self._io.lookup([page.key for page in wanted], self._looked_up(prefetch, wanted))
        return prefetch

    def finish(self, prefetch: Prefetch) -> None:
        """Ends the wait and unpins; reads under way go on for the benefit of others."""
        prefetch.closed = True
        self._index.unpin_host([prefetch.pinned[key] for key in prefetch.keys if key in prefetch.pinned])
        prefetch.pinned = {}

    def _looked_up(self, prefetch: Prefetch, wanted: Sequence[_Page]) -> Callable[[Sequence[Presence]], None]:
        def then(found: Sequence[Presence]) -> None:
            prefetch.looking = False
            if prefetch.closed:
                return
            use = len(found)
            if self._draft is not None:
                use = usable_pages([p.draft for p in found], self._answer, rebuilds=self._draft.rebuilds)
            self._count("target", "miss", len(wanted) - len(found))
            self._count("draft", "clamped", len(found) - use)
            self._read(prefetch, [(page, p.draft) for page, p in zip(wanted[:use], found, strict=False)])

        return then

    def _read(self, prefetch: Prefetch, pages: Sequence[tuple[_Page, bool]]) -> None:
        new = []
        for page, has_draft in pages:
            if page.key in self._reading:
                self._reading[page.key][1].append(prefetch)
                prefetch.waiting_for.add(page.key)
            elif (entry := self._index.find(page.key, page.packed)) is None:
                new.append((page, has_draft))
            elif entry.host is not None:  # read for another request since this one asked
                self._land(prefetch, entry)
        hosts = self._index.take_host(len(new))
        if len(hosts) < len(new):
            self._metrics.dropped_pages.labels(reason="host_full_prefetch").inc(len(new) - len(hosts))
        for (page, has_draft), host in zip(new, hosts, strict=False):
            self._reading[page.key] = (host, [prefetch])
            prefetch.waiting_for.add(page.key)
            self._io.read(page.key, host, self._draft is not None and has_draft, self._arrived(page))

    def _arrived(self, page: _Page) -> Callable[[PairRead], None]:
        def then(result: PairRead) -> None:
            host, waiters = self._reading.pop(page.key)
            self._count("target", _RESULTS[result.target], 1)
            if self._draft is not None and result.target is HalfRead.PRESENT:
                self._count("draft", _RESULTS[result.draft], 1)
            entry = None
            if result.target is HalfRead.PRESENT:
                has_draft = result.draft is HalfRead.PRESENT
                entry = self._index.add_host(
                    page.key, page.parent, page.packed, host, draft=has_draft, successors=result.successors
                )
            if entry is None:
                self._index.give_host([host])
            else:
                entry.stored_target, entry.stored_draft = True, result.draft is HalfRead.PRESENT
            for prefetch in waiters:
                prefetch.waiting_for.discard(page.key)
                if entry is not None and not prefetch.closed:
                    self._land(prefetch, entry)

        return then

    def _land(self, prefetch: Prefetch, entry: Entry) -> None:
        prefetch.landed.add(entry.key)
        prefetch.pinned[entry.key] = entry
        self._index.pin_host([entry])

    def _count(self, half: str, result: str, pages: int) -> None:
        if pages:
            self._metrics.page_lookups.labels(tier="storage", half=half, result=result).inc(pages)
