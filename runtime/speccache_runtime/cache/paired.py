"""The cache that the engine talks to: target and draft pages as pairs, through every tier.

A request's pages go through this class in five verbs: `prefetch` (storage -> host, while it waits), `admit` (host ->
device, shared pages pinned), `grow` (private pages), `publish` (private pages become known and are written through),
`release`. All of it runs on the engine thread; only storage operations run elsewhere (`storage_io`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from speccache_api.drafts import Draft
from speccache_runtime.cache.accounting import PageGauges, count_lookups
from speccache_runtime.cache.attachment import Attachment
from speccache_runtime.cache.index import Entry, Index
from speccache_runtime.cache.lease import Hit, Lease, Prefetch
from speccache_runtime.cache.loads import Loads
from speccache_runtime.cache.policy import MissingDraft, cacheable_pages, publishable_pages, usable_pages
from speccache_runtime.cache.pool import HostArena, KVPool
from speccache_runtime.cache.prefetch import Prefetcher
from speccache_runtime.cache.ranks import NoOtherRanks, OtherRanks
from speccache_runtime.cache.storage.store import PairStore, StoreState
from speccache_runtime.cache.storage_io import StorageIO
from speccache_runtime.cache.storing import Flush, Storing, forget_stored
from speccache_runtime.cache.transfer import Move
from speccache_runtime.cache.transfers import make_transfer
from speccache_runtime.cache.writeback import Wanted, Writeback, draft_missing
from speccache_runtime.core import Tier
from speccache_runtime.errors import ConfigError
from speccache_runtime.metrics import Metrics

PREFETCH_DEADLINE_S = 30.0
"""How long a request waits for storage before it computes what has not arrived."""

SWEEP = 32
"""Pages of a running request that are looked at again with each one that it publishes, in prefix order and round and
round: they are marked as used, and copied to the host if it has lost them. All of them every time would make a page
of a long prompt cost what the whole prompt costs."""


class PairedCache:
    """Pages of one target and at most one draft, on the device, on the host and in storage."""

    def __init__(self, target: KVPool, *, host_pages: int, answer: MissingDraft, metrics: Metrics) -> None:
        self._target = target
        self._draft: KVPool | None = None
        self._facts: Draft | None = None
        self._host_pages = host_pages
        self._answer = answer
        self._metrics = metrics
        self.page_size = target.shape.page_size
        self.index = Index(device_pages=target.num_pages, host_pages=host_pages)
        self._leases: set[Lease] = set()
        self._loading: dict[int, list[Entry]] = {}
        self._arriving: dict[Entry, int] = {}
        self._gauges = PageGauges(metrics)
        self._opened = False
        self._arena: HostArena
        self.loads: Loads
        self._wake: Callable[[], None]
        self._storage: Attachment | None = None
        self._ending: list[Attachment] = []
        """Storage that was detached and has operations under way."""
        self._ranks: OtherRanks = NoOtherRanks()
        self._writeback: Writeback

    # ---- startup

    def register_draft(self, pool: KVPool, draft: Draft) -> None:
        """Adds the half of `draft` to every page. Once, before `open`.

        Raises ConfigError when the pool cannot share page numbers with the target's.
        """
        if self._opened or self._draft is not None:
            raise ConfigError("speculative.draftModel: the draft pool is registered once, before the first request")
        if pool.num_pages != self._target.num_pages or pool.shape.page_size != self.page_size:
            raise ConfigError(
                f"speculative.draftModel: draft pool has {pool.num_pages} pages of {pool.shape.page_size} tokens, "
                f"target pool {self._target.num_pages} of {self.page_size}; they must share page numbers"
            )
        self._draft, self._facts = pool, draft

    def open(self, store: PairStore | None, wake: Callable[[], None], ranks: OtherRanks | None = None) -> None:
        """Allocates the host pages and starts the tiers; the cache owns `store` from here on, which is None without
        storage.

        `wake` is called from a worker thread when `poll` has something to do. `ranks` do with their own pages all that
        is done with the pages here.
        """
        self._opened = True
        self._wake = wake
        self._ranks = ranks or self._ranks
        self._arena = HostArena.of(self._target, self._draft, self._host_pages, self._ranks.memory)
        transfer = self._ranks.transfer(make_transfer(self._arena, self._target, self._draft))
        self.loads = Loads(transfer)
        self._writeback = Writeback(self.index, transfer, self._metrics, self._store)
        self.attach(store)

    def attach(self, store: PairStore | None) -> None:
        """Puts `store`, which the cache owns from here on, in the place of the storage attached until now; None: there
        is none any more.

        Requests that wait for the old one wait no longer. Its operations that have not begun are dropped; those under
        way end, and nothing comes of them. With other ranks only once, from `open`.
        """
        if self._storage is not None:
            self._storage.end()
            self._ending.append(self._storage)
            forget_stored(self.index)
        self._storage = self._attachment(store) if store is not None else None

    def _attachment(self, store: PairStore) -> Attachment:
        store.begin()
        local = StorageIO(store, self._arena, self._wake)
        io = self._ranks.storage(local)
        prefetcher = Prefetcher(self.index, io, self._metrics, draft=self._facts, answer=self._answer)
        return Attachment(local, io, prefetcher, Storing(self.index, io, self._metrics))

    def _store(self, entry: Entry) -> None:
        """Writes a page that has come to the host through."""
        if self._storage is not None:
            self._storage.storing.store(entry)

    # ---- a request's way

    def prefetch(self, lease: Lease, tokens: Sequence[int]) -> Prefetch | None:
        """Starts to fetch what storage may hold of this prompt; None when there is nothing to wait for.

        While storage answers nobody there is nothing to wait for: a volume that hangs costs those requests a moment
        that are there when it begins to, and no later one.
        """
        if self._storage is None:
            return None
        pages = cacheable_pages(len(tokens), self.page_size)
        lease.chain.extend(tokens, pages)
        deadline = time.monotonic() + PREFETCH_DEADLINE_S
        return self._storage.prefetcher.start(lease.chain, pages, deadline)

    def prefetch_pending(self, prefetch: Prefetch | None) -> bool:
        """Whether the request should go on waiting; past its deadline, or while storage answers nobody, it should not,
        which is counted."""
        if prefetch is None or not prefetch.pending or self._storage is None:
            return False
        if time.monotonic() < prefetch.deadline and not self._storage.prefetcher.hangs:
            return True
        if not prefetch.late:
            prefetch.late = True
            self._metrics.prefetch_deadlines.inc()
        return False

    def end_prefetch(self, prefetch: Prefetch | None) -> None:
        """Gives up what a prefetch holds, after `admit` or when the request is gone."""
        if prefetch is not None and self._storage is not None:
            self._storage.prefetcher.finish(prefetch)

    def admit(self, lease: Lease, tokens: Sequence[int], prefetch: Prefetch | None) -> Hit | None:
        """Gives an empty lease the longest usable cached prefix of `tokens`.

        Pages on the host get device pages and are on their way when this returns; `lease.loads` names the jobs, also
        those that bring a page for another request. None when there are too few device pages now: then no page has
        moved or changed hands.
        """
        pages = cacheable_pages(len(tokens), self.page_size)
        lease.chain.extend(tokens, pages)
        found = self.index.walk(lease.chain.keys[:pages], lease.chain.packed[:pages])
        swap = {entry for entry in found if self._host_copy_is_better(entry)}
        present = [self._draft is None or entry.draft_present or entry in swap for entry in found]
        use = usable_pages(present, self._answer, rebuilds=self._rebuilds)
        hits, present = found[:use], present[:use]
        loading = [e for e in hits if e.device is None or e in swap]
        device_pages = self._take_for(hits, loading, swap)
        if device_pages is None:
            return None
        count_lookups(self._metrics, pages, found, present, "rebuilt" if self._rebuilds else "degraded")
        from_storage = prefetch.landed if prefetch else set()
        tiers = [_tier_of(e, from_storage) for e in hits]
        self._load(loading, device_pages)
        self.index.touch(lease.chain.keys[:pages])
        masked = [not p and not self._rebuilds for p in present]
        lease.add([_page(e) for e in hits], list(hits), masked)
        lease.loads = tuple(sorted({self._arriving[e] for e in hits if e in self._arriving}))
        lease.published = use
        self._leases.add(lease)
        if self._storage is not None:
            self._storage.storing.note_use(hits)
        by_tier = {tier: tiers.count(tier) * self.page_size for tier in Tier}
        return Hit(use * self.page_size, by_tier, present.count(False) * self.page_size)

    @property
    def _rebuilds(self) -> bool:
        return self._facts is not None and self._facts.rebuilds

    def _host_copy_is_better(self, entry: Entry) -> bool:
        """Whether the device copy, which nobody uses, lacks its draft half and the host copy has it."""
        return entry.device is not None and not entry.draft_on_device and entry.draft_on_host and not entry.device_pins

    def _take_for(self, hits: list[Entry], loading: list[Entry], swap: set[Entry]) -> list[int] | None:
        """Pins the pages of a hit where they are, and takes device pages for those of `loading`, of which `swap` give
        up the ones they have. None, and nothing has changed, if there are too few."""
        resident = [e for e in hits if e.device is not None and e not in swap]
        self.index.pin_device(resident)
        if len(loading) > self.index.device.num_available:
            self.index.unpin_device(resident)
            return None
        self.index.pin_host(loading)
        for entry in loading:
            if entry in swap:
                self.index.drop_device(entry)
        return self.index.take_device(len(loading))

    def loading(self, lease: Lease) -> bool:
        """Whether pages of this lease are still on their way to the device."""
        return any(number in self.loads for number in lease.loads)

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

    def publish(self, leases: Sequence[tuple[Lease, Sequence[int], int, int]]) -> None:
        """Makes final pages known and writes them through. One item per request: lease, its tokens, how many slots the
        target has computed, and how many the draft.

        A draft half is published with its page if the draft has got past it, and later when it gets there. What a page
        costs does not depend on the length of its prefix.
        """
        wanted = []
        lookahead = self._facts.lookahead if self._facts else 0
        for lease, tokens, computed, drafted in leases:
            late = self._pair_up(lease, drafted) if self._rebuilds else []
            upto = publishable_pages(len(tokens), computed, self.page_size, lookahead)
            if upto <= lease.published:
                if late:
                    wanted.append(Wanted(late, [], lease.known))
                continue
            lease.chain.extend(tokens, upto)
            above = self._sweep(lease, SWEEP * (upto - lease.published))
            fresh = [self._publish_page(lease, tokens, page, drafted) for page in range(lease.published, upto)]
            lease.published = upto
            wanted.append(Wanted([*late, *(e for e in fresh if e is not None)], above, lease.known))
        if wanted:
            self._writeback.backup(wanted)

    def _pair_up(self, lease: Lease, drafted: int) -> list[Entry]:
        """Notes the draft halves that this request has made since in pages that were known without; their entries."""
        done = drafted // self.page_size
        entries = [e for e in lease.entries[lease.paired : done] if e is not None and not e.draft_on_device]
        for entry in entries:
            self.index.add_draft(entry)
        lease.paired = max(lease.paired, done)
        return entries

    def _sweep(self, lease: Lease, most: int) -> list[Entry]:
        """Marks the next pages of a running request as used, `most` of them; those of them that the host lacks."""
        lost: list[Entry] = []
        left = min(most, lease.published)
        while left:
            if lease.swept >= lease.published:
                lease.swept = 0
            if lease.swept == 0:
                lease.stamp = self.index.stamp(lease.published)
            entries = lease.entries[lease.swept : lease.swept + min(left, lease.published - lease.swept)]
            self.index.touch_some(entries, lease.swept, lease.stamp)
            lost += [e for e in entries if e is not None and (e.host is None or draft_missing(e))]
            lease.swept += len(entries)
            left -= len(entries)
        return lost

    def release(self, lease: Lease) -> None:
        """Gives every page back: shared ones stay known, private ones become free."""
        self.index.give_device(lease.private_pages())
        self.index.unpin_device([e for e in lease.entries if e is not None])
        self.index.touch(lease.chain.keys[: len(lease.pages)])
        self._leases.discard(lease)
        lease.clear()

    # ---- upkeep

    def poll(self) -> bool:
        """Completes finished jobs and storage operations; True if there were any."""
        self._ranks.poll()
        done = self.loads.finished()
        for number, job in done.items():
            self._loaded(self._loading.pop(number))
            self._metrics.transfer_bytes.labels(direction="host_to_device").inc(job.nbytes)
            self._metrics.transfer_seconds.labels(direction="host_to_device").inc(job.seconds)
        stored = [attached.io.poll() for attached in self._attachments()]
        self._close_ended()
        copied = self._writeback.poll()
        if self._storage is not None:
            self._storage.storing.offer_again()
        return bool(done) or any(stored) or copied

    def _attachments(self) -> list[Attachment]:
        """The storage attached now, and all of which something is under way."""
        return [*self._ending, *([] if self._storage is None else [self._storage])]

    def _close_ended(self) -> None:
        for attached in [each for each in self._ending if each.ended]:
            self._ending.remove(attached)
            attached.local.close()

    @property
    def copying(self) -> bool:
        """Whether pages are being copied. Unlike storage operations, copies do not call `wake` when they end."""
        return bool(self._loading) or self._writeback.copying

    @property
    def storing(self) -> bool:
        """Whether pages are on their way to the host, or to the storage attached now."""
        return self._writeback.copying or (self._storage is not None and self._storage.storing.busy)

    @property
    def busy(self) -> bool:
        """Whether jobs or storage writes are under way."""
        return self.copying or any(attached.busy for attached in self._attachments())

    def store_all(self) -> None:
        """Queues a storage write for every host page that storage lacks (drain). May be called again for those that
        failed; `unstored` says how many there are."""
        if self._storage is not None:
            self._storage.storing.store_all()

    @property
    def unstored(self) -> int:
        """Host pages of which storage is not known to hold every half; 0 without storage."""
        return 0 if self._storage is None else self._storage.storing.unstored

    @property
    def storage_state(self) -> StoreState | None:
        """How the storage attached now is; None without."""
        return None if self._storage is None else self._storage.local.state

    @property
    def num_ending(self) -> int:
        """Storages that were detached and have operations under way."""
        return len(self._ending)

    def ask_again(self) -> None:
        """Begins a flush: see `Storing.ask_again`. Nothing without storage."""
        if self._storage is not None:
            self._storage.storing.ask_again()

    def flush(self) -> Flush | None:
        """Goes on with a flush and says how far it is; to be called until it is done. None without storage."""
        return None if self._storage is None else self._storage.storing.flush()

    def close(self) -> None:
        """Stops the tiers; the cache must not be used afterwards."""
        for attached in self._attachments():
            attached.io.close()
        self._arena.close()

    def update_gauges(self) -> None:
        """Refreshes the page gauges and eviction counters."""
        self._gauges.refresh(self.index)

    def check_integrity(self) -> None:
        """Counts every page of both tiers exactly once; raises AssertionError otherwise."""
        device = [page for lease in self._leases for page in lease.private_pages()]
        host = self._writeback.taken_host_pages()
        for attached in self._attachments():
            host += attached.prefetcher.taken_host_pages()
        self.index.check_integrity(device_taken=device, host_taken=host)

    # ---- parts

    def _load(self, entries: list[Entry], device_pages: list[int]) -> None:
        """Brings host copies to the device. Both copies stay pinned until the job has ended, also when the request
        ends before: a page that somebody else got meanwhile would be overwritten."""
        if not entries:
            return
        moves = []
        for entry, page in zip(entries, device_pages, strict=True):
            assert entry.host is not None
            draft = self._draft is not None and entry.draft_on_host
            moves.append(Move(page, entry.host, draft))
            self.index.attach_device(entry, page, draft=draft)
        self.index.pin_device(entries)
        number = self.loads.start(moves)
        self._loading[number] = entries
        self._arriving.update(dict.fromkeys(entries, number))

    def _loaded(self, entries: list[Entry]) -> None:
        self.index.unpin_host(entries)
        self.index.unpin_device(entries)
        for entry in entries:
            del self._arriving[entry]

    def _publish_page(self, lease: Lease, tokens: Sequence[int], page: int, drafted: int) -> Entry | None:
        end = (page + 1) * self.page_size
        facts = self._facts
        # What a draft computed behind a masked page is good only if it did not depend on that page.
        clean = facts is not None and end <= drafted and (facts.local or not lease.num_absent)
        entry, owned = self.index.publish(
            lease.chain.page(page),
            lease.pages[page],
            draft=clean,
            successors=tuple(tokens[end : end + facts.lookahead]) if facts is not None else (),
        )
        if not owned:
            return None
        lease.own(page, entry)
        return entry


def _tier_of(entry: Entry, from_storage: set[bytes]) -> Tier:
    if entry.device is not None:
        return Tier.DEVICE
    return Tier.STORAGE if entry.key in from_storage else Tier.HOST


def _page(entry: Entry) -> int:
    assert entry.device is not None
    return entry.device
