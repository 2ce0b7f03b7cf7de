"""The cache that the engine talks to: target and draft pages as pairs, through every tier.

A request's pages go through this class in five verbs: `prefetch` (storage -> host, while it waits), `admit` (host ->
device, shared pages pinned), `grow` (private pages), `publish` (private pages become known and are written through),
`release`. All of it runs on the engine thread; only storage operations run elsewhere (`storage_io`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from speccache_runtime.cache.accounting import PageGauges, count_lookups
from speccache_runtime.cache.index import Entry, Index
from speccache_runtime.cache.layout import HostRecord
from speccache_runtime.cache.lease import Lease
from speccache_runtime.cache.policy import MissingDraft, cacheable_pages, publishable_pages, usable_pages
from speccache_runtime.cache.pool import HostArena, KVPool
from speccache_runtime.cache.prefetch import Prefetch, Prefetcher
from speccache_runtime.cache.storage.store import PairStore
from speccache_runtime.cache.storage_io import StorageIO
from speccache_runtime.cache.transfer import Job, Move, Transfer, make_transfer
from speccache_runtime.cache.writeback import Writeback
from speccache_runtime.core import Tier
from speccache_runtime.errors import ConfigError
from speccache_runtime.metrics import Metrics

PREFETCH_DEADLINE_S = 30.0
"""How long a request waits for storage before it computes what has not arrived."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What admission found. `tokens` are cached; `draft_absent` of them have no draft half."""

    tokens: int
    by_tier: dict[Tier, int] = field(default_factory=dict)
    draft_absent: int = 0


class PairedCache:
    """Pages of one target and at most one draft, on the device, on the host and in storage."""

    def __init__(self, target: KVPool, *, host_pages: int, answer: MissingDraft, metrics: Metrics) -> None:
        self._target = target
        self._draft: KVPool | None = None
        self._lookahead = 0
        self._host_pages = host_pages
        self._answer = answer
        self._metrics = metrics
        self.page_size = target.shape.page_size
        self.index = Index(device_pages=target.num_pages, host_pages=host_pages)
        self._leases: set[Lease] = set()
        self._loads: list[tuple[Job, list[Entry]]] = []
        self._gauges = PageGauges(metrics)
        self._stalled = False
        self._opened = False
        self._arena: HostArena
        self._transfer: Transfer
        self._io: StorageIO | None = None
        self._writeback: Writeback
        self._prefetcher: Prefetcher | None = None

    # ---- startup

    def register_draft(self, pool: KVPool, *, lookahead: int) -> None:
        """Adds the draft's half to every page. Once, before `open`.

        `lookahead` is how many successor tokens the draft's KV at a position depends on (EAGLE: 1, standalone draft:
        0). Raises ConfigError when the pool cannot share page numbers with the target's.
        """
        if self._opened or self._draft is not None:
            raise ConfigError("speculative.draftModel: the draft pool is registered once, before the first request")
        if pool.num_pages != self._target.num_pages or pool.shape.page_size != self.page_size:
            raise ConfigError(
                f"speculative.draftModel: draft pool has {pool.num_pages} pages of {pool.shape.page_size} tokens, "
                f"target pool {self._target.num_pages} of {self.page_size}; they must share page numbers"
            )
        self._draft, self._lookahead = pool, lookahead

    def open(self, store: PairStore | None, wake: Callable[[], None]) -> None:
        """Allocates the host records and starts the tiers; the cache owns `store` from here on.

        `wake` is called from a worker thread when `poll` has something to do.
        """
        self._opened = True
        record = HostRecord(self._target.layout, self._draft.layout if self._draft else None)
        self._arena = HostArena(record, self._host_pages, pinned=self._target.k[0].is_cuda)
        self._transfer = make_transfer(self._arena, self._target, self._draft)
        self._io = StorageIO(store, wake) if store else None
        self._writeback = Writeback(self.index, self._arena, self._transfer, self._io, self._metrics)
        if self._io:
            self._prefetcher = Prefetcher(
                self.index,
                self._arena,
                self._io,
                self._metrics,
                draft=self._draft is not None,
                answer=self._answer,
            )

    # ---- a request's way

    def prefetch(self, lease: Lease, tokens: Sequence[int]) -> Prefetch | None:
        """Starts to fetch what storage may hold of this prompt; None when there is nothing to wait for.

        After a missed deadline nobody else waits until storage has answered something: a volume that hangs costs one
        deadline, not one per request.
        """
        if self._prefetcher is None or self._stalled:
            return None
        pages = cacheable_pages(len(tokens), self.page_size)
        lease.chain.extend(tokens, pages)
        deadline = time.monotonic() + PREFETCH_DEADLINE_S
        return self._prefetcher.start(lease.chain.keys[:pages], lease.chain.packed[:pages], deadline)

    def prefetch_pending(self, prefetch: Prefetch | None) -> bool:
        """Whether the request should go on waiting; past its deadline it should not, which is counted."""
        if prefetch is None or not prefetch.pending:
            return False
        if time.monotonic() < prefetch.deadline:
            return True
        if not prefetch.late:
            prefetch.late = self._stalled = True
            self._metrics.prefetch_deadlines.inc()
        return False

    def end_prefetch(self, prefetch: Prefetch | None) -> None:
        """Gives up what a prefetch holds, after `admit` or when the request is gone."""
        if prefetch is not None and self._prefetcher is not None:
            self._prefetcher.finish(prefetch)

    def admit(self, lease: Lease, tokens: Sequence[int], prefetch: Prefetch | None) -> Hit | None:
        """Gives an empty lease the longest usable cached prefix of `tokens`.

        Pages on the host get device pages and are on their way when this returns; `wait_target_layer` and `wait_draft`
        order compute behind them. None when there are too few device pages now: nothing has changed then.
        """
        pages = cacheable_pages(len(tokens), self.page_size)
        lease.chain.extend(tokens, pages)
        found = self.index.walk(lease.chain.keys[:pages], lease.chain.packed[:pages])
        self._prefer_whole_pairs(found)
        present = [self._draft is None or entry.draft_present for entry in found]
        use = usable_pages(present, self._answer)
        hits, present = found[:use], present[:use]
        resident = [e for e in hits if e.device is not None]
        loading = [e for e in hits if e.device is None]
        self.index.pin_device(resident)
        self.index.pin_host(loading)
        device_pages = self.index.take_device(len(loading))
        if device_pages is None:
            self.index.unpin_host(loading)
            self.index.unpin_device(resident)
            return None
        count_lookups(self._metrics, pages, found, present)
        from_storage = prefetch.landed if prefetch else set()
        tiers = [_tier_of(e, from_storage) for e in hits]
        self._load(loading, device_pages)
        self.index.touch(lease.chain.keys[:pages])
        lease.add([_page(e) for e in hits], list(hits), [not p for p in present])
        lease.published = use
        self._leases.add(lease)
        by_tier = {tier: tiers.count(tier) * self.page_size for tier in Tier}
        return Hit(use * self.page_size, by_tier, lease.num_absent * self.page_size)

    def grow(self, lease: Lease, num_slots: int) -> bool:
        """Adds private pages until the lease holds `num_slots` token slots; False, and no change, if it cannot."""
        missing = -(-(num_slots - lease.num_slots) // self.page_size)
        if missing <= 0:
            return True
        pages = self.index.take_device(missing)
        if pages is None:
            return False
        lease.add(pages, [None] * missing, [False] * missing)
        return True

    def publish(self, leases: Sequence[tuple[Lease, Sequence[int], int]]) -> None:
        """Makes final pages known and writes them through. One item per request: lease, its tokens, computed slots.

        The draft half of every slot whose successors are known must be computed by now.
        """
        fresh: list[Entry] = []
        above: list[Entry] = []
        for lease, tokens, computed in leases:
            upto = publishable_pages(len(tokens), computed, self.page_size, self._lookahead)
            if upto <= lease.published:
                continue
            lease.chain.extend(tokens, upto)
            above += [entry for entry in lease.entries[: lease.published] if entry is not None]
            for page in range(lease.published, upto):
                entry = self._publish_page(lease, tokens, page)
                if entry is not None:
                    fresh.append(entry)
            lease.published = upto
            self.index.touch(lease.chain.keys[:upto])
        if fresh:
            self._writeback.backup(fresh, above)

    def release(self, lease: Lease) -> None:
        """Gives every page back: shared ones stay known, private ones become free."""
        self.index.give_device(lease.private_pages())
        self.index.unpin_device([e for e in lease.entries if e is not None])
        self.index.touch(lease.chain.keys[: len(lease.pages)])
        self._leases.discard(lease)
        lease.clear()

    # ---- ordering with compute

    def wait_target_layer(self, layer: int) -> None:
        """Orders the compute stream behind the loads of this target layer."""
        for job, _ in self._loads:
            job.wait_target_layer(layer)

    def wait_draft(self) -> None:
        """Orders the compute stream behind the loads of draft halves."""
        for job, _ in self._loads:
            job.wait_draft()

    # ---- upkeep

    def poll(self) -> bool:
        """Completes finished jobs and storage operations; True if there were any."""
        done = [item for item in self._loads if item[0].done()]
        for item in done:
            self._loads.remove(item)
            job, entries = item
            self.index.unpin_host(entries)
            self._metrics.transfer_bytes.labels(direction="host_to_device").inc(job.nbytes)
            self._metrics.transfer_seconds.labels(direction="host_to_device").inc(job.seconds)
        stored = self._io.poll() if self._io else False
        if stored:
            self._stalled = False
        copied = self._writeback.poll()
        return bool(done) or stored or copied

    @property
    def copying(self) -> bool:
        """Whether pages are being copied. Unlike storage operations, copies do not call `wake` when they end."""
        return bool(self._loads) or self._writeback.copying

    @property
    def storing(self) -> bool:
        """Whether pages are on their way to the host or to storage."""
        return self._writeback.busy

    @property
    def busy(self) -> bool:
        """Whether jobs or storage writes are under way."""
        return bool(self._loads) or self._writeback.busy or (self._prefetcher is not None and self._prefetcher.busy)

    def store_all(self) -> None:
        """Queues a storage write for every host page that storage lacks (drain)."""
        self._writeback.store_all()

    def close(self) -> None:
        """Stops the tiers; the cache must not be used afterwards."""
        if self._io:
            self._io.close()
        self._arena.close()

    def update_gauges(self) -> None:
        """Refreshes the page gauges and eviction counters."""
        self._gauges.refresh(self.index)

    def check_integrity(self) -> None:
        """Counts every page of both tiers exactly once; raises AssertionError otherwise."""
        device = [page for lease in self._leases for page in lease.private_pages()]
        host = self._writeback.taken_host_pages()
        host += self._prefetcher.taken_host_pages() if self._prefetcher else []
        self.index.check_integrity(device_taken=device, host_taken=host)

    # ---- parts

    def _prefer_whole_pairs(self, entries: Sequence[Entry]) -> None:
        """Lets the host copy serve where the device copy lacks its draft half and the host copy has it."""
        for entry in entries:
            if entry.device is not None and not entry.draft_on_device and entry.draft_on_host and not entry.device_pins:
                self.index.drop_device(entry)

    def _load(self, entries: list[Entry], device_pages: list[int]) -> None:
        if not entries:
            return
        moves = []
        for entry, page in zip(entries, device_pages, strict=True):
            assert entry.host is not None
            draft = self._draft is not None and entry.draft_on_host
            moves.append(Move(page, entry.host, draft))
            self.index.attach_device(entry, page, draft=draft)
        self._loads.append((self._transfer.load(moves), entries))

    def _publish_page(self, lease: Lease, tokens: Sequence[int], page: int) -> Entry | None:
        end = (page + 1) * self.page_size
        entry, owned = self.index.publish(
            lease.chain.keys[page],
            lease.chain.parent(page),
            lease.chain.packed[page],
            lease.pages[page],
            draft=self._draft is not None,
            successors=tuple(tokens[end : end + self._lookahead]),
        )
        if not owned:
            return None
        lease.entries[page] = entry
        return entry


def _tier_of(entry: Entry, from_storage: set[bytes]) -> Tier:
    if entry.device is not None:
        return Tier.DEVICE
    return Tier.STORAGE if entry.key in from_storage else Tier.HOST


def _page(entry: Entry) -> int:
    assert entry.device is not None
    return entry.device
