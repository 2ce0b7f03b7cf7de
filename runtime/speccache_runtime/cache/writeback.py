"""Write-through: every published page is copied to the host, and from there to storage, as a pair.

    published ──backup job──▶ host page attached ──storage write──▶ stored
        │                         │
        no host page free         too many writes waiting: the page stays on the host and is written when drained

A page that could not be copied is a later miss, never a loss: each is counted with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from speccache_runtime.cache.index import Entry, Index
from speccache_runtime.cache.pool import HostArena
from speccache_runtime.cache.storage.store import HalfWrite, PairWrite
from speccache_runtime.cache.storage_io import StorageIO
from speccache_runtime.cache.transfer import Job, Move, Transfer
from speccache_runtime.metrics import Metrics

_STORED = (HalfWrite.WRITTEN, HalfWrite.EXISTS)
_FAILED = (HalfWrite.ERROR, HalfWrite.DROPPED)


class Writeback:
    """Copies published pages down the tiers. Engine thread only."""

    def __init__(
        self, index: Index, arena: HostArena, transfer: Transfer, io: StorageIO | None, metrics: Metrics
    ) -> None:
        self._index = index
        self._arena = arena
        self._transfer = transfer
        self._io = io
        self._metrics = metrics
        self._jobs: list[tuple[Job, list[tuple[Entry, int]]]] = []
        self._copying: set[Entry] = set()
        self._writing = 0
        self._max_writing = max(64, arena.num_pages // 4)

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
        return [page for _, copies in self._jobs for entry, page in copies if entry.host is None]

    # ---- device -> host

    def backup(self, fresh: Sequence[Entry], above: Sequence[Entry]) -> None:
        """Copies the device halves that the host lacks; pages that find no room are dropped and counted.

        `fresh` are pages that have just become known, `above` the pages before them. Of those the host may have given
        some up or never had room for them; without them the fresh pages could not be reached. All are pinned on the
        device by their requests, and in prefix order.
        """
        entries = [entry for entry in dict.fromkeys([*above, *fresh]) if entry not in self._copying]
        new = [entry for entry in entries if entry.host is None]
        held = [entry for entry in entries if entry.host is not None]
        repair = [e for e in held if e.draft_on_device and not e.draft_on_host and e.host_pins == 0]
        self._index.pin_host(held)  # the end of a prompt must not push its own beginning out
        pages = self._index.take_host(len(new))
        kept = set(repair)
        self._index.unpin_host([entry for entry in held if entry not in kept])
        dropped = len(set(new[len(pages) :]) & set(fresh))
        if dropped:
            self._metrics.dropped_pages.labels(reason="host_full").inc(dropped)
        copies = list(zip(new, pages, strict=False))
        copies += [(entry, entry.host) for entry in repair if entry.host is not None]
        if not copies:
            return
        self._copying.update(entry for entry, _ in copies)
        self._index.pin_device([entry for entry, _ in copies])
        moves = [Move(_device_page(entry), page, entry.draft_on_device) for entry, page in copies]
        self._jobs.append((self._transfer.backup(moves), copies))

    def poll(self) -> bool:
        """Completes finished copies and queues their storage writes; True if there were any."""
        done = [item for item in self._jobs if item[0].done()]
        for item in done:
            self._jobs.remove(item)
            job, copies = item
            self._metrics.transfer_bytes.labels(direction="device_to_host").inc(job.nbytes)
            self._metrics.transfer_seconds.labels(direction="device_to_host").inc(job.seconds)
            for entry, page in copies:
                self._landed(entry, page)
        return bool(done)

    def _landed(self, entry: Entry, page: int) -> None:
        self._copying.remove(entry)
        if entry.host is None:
            self._index.attach_host(entry, page, draft=entry.draft_on_device)
        else:
            entry.draft_on_host = True
            self._index.unpin_host([entry])
        self._index.unpin_device([entry])
        self.store(entry)

    # ---- host -> storage

    def store(self, entry: Entry) -> None:
        """Writes the halves on the host that storage is not known to hold."""
        if self._io is None or not _lacks(entry):
            return
        if self._writing >= self._max_writing:
            self._metrics.dropped_pages.labels(reason="write_backlog").inc()
            return
        self._write(self._io, entry, draft=entry.draft_on_host and not entry.stored_draft)

    def store_all(self) -> None:
        """Queues every host page, however many are waiting: first those that storage lacks, then all others.

        What was stored may be gone, because a volume may be cleared under us, and this is the last chance to mend it. A
        page that is still there costs an existence check per half.
        """
        if self._io is None:
            return
        held = [entry for entry in self._index.entries() if entry.host is not None]
        for entry in sorted(held, key=_lacks, reverse=True):
            self._write(self._io, entry, draft=entry.draft_on_host)

    def _write(self, io: StorageIO, entry: Entry, *, draft: bool) -> None:
        assert entry.host is not None
        self._index.pin_host([entry])
        self._writing += 1
        target = self._arena.target_half(entry.host)
        draft_half = self._arena.draft_half(entry.host) if draft else None
        io.write(entry.key, target, draft_half, entry.successors, self._written(entry))

    def _written(self, entry: Entry) -> Callable[[PairWrite], None]:
        def then(result: PairWrite) -> None:
            self._writing -= 1
            self._index.unpin_host([entry])
            entry.stored_target = entry.stored_target or result.target in _STORED
            entry.stored_draft = entry.stored_draft or result.draft in _STORED
            target_lost = result.target in _FAILED and not entry.stored_target
            draft_lost = result.draft in _FAILED and not entry.stored_draft
            if target_lost or draft_lost:
                self._metrics.dropped_pages.labels(reason="storage_write").inc()

        return then


def _lacks(entry: Entry) -> bool:
    """Whether the host holds a half that storage was never seen to hold."""
    return entry.host is not None and not (entry.stored_target and (entry.stored_draft or not entry.draft_on_host))


def _device_page(entry: Entry) -> int:
    assert entry.device is not None
    return entry.device
