"""One storage and what is done with it, from the moment it is attached until its last operation has ended.

    attached ──▶ read by `prefetcher`, written by `storing`
    ended    ──▶ nothing is asked any more; what is under way ends and is dropped; then it is closed

The pages that an operation reads into or writes from stay where they are until it has ended, so a store that hangs
keeps those, and nothing else waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from speccache_runtime.cache.prefetch import Prefetcher
from speccache_runtime.cache.storage_io import Storage, StorageIO
from speccache_runtime.cache.storing import Storing


@dataclass(frozen=True, slots=True)
class Attachment:
    """Engine thread only. `local` is this process's part of `io`, the storage of all ranks."""

    local: StorageIO
    io: Storage
    prefetcher: Prefetcher
    storing: Storing

    def end(self) -> None:
        """Asks nothing more; `poll` and, when it has `ended`, `close`."""
        self.prefetcher.end()
        self.storing.end()
        self.local.end()

    @property
    def ended(self) -> bool:
        """Whether, after `end`, nothing is under way."""
        return self.local.ended

    @property
    def busy(self) -> bool:
        """Whether pages are being read or written."""
        return self.prefetcher.busy or self.storing.busy
