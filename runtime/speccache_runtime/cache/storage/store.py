"""Pages in storage, as pairs: what makes half a pair a known state and a damaged object a miss.

    write   draft object, then target object      a target that is visible has had its draft's chance
    lookup  walk of target objects, then drafts    existence only, nothing is believed yet
    read    target object, then draft object       header and checksum compared before PRESENT is said

No method raises because storage fails: the answer says so, the observer counts it, and after several failures in a row
a breaker stops asking for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speccache_runtime.cache.storage.base import Backend
from speccache_runtime.cache.storage.breaker import BreakerSettings
from speccache_runtime.cache.storage.codec import Bytes, Half, check_successors
from speccache_runtime.cache.storage.gate import Gate
from speccache_runtime.cache.storage.halves import HalfRead, HalfStore, HalfWrite
from speccache_runtime.cache.storage.observer import NullObserver, StorageObserver

__all__ = ["HalfRead", "HalfWrite", "PairRead", "PairStore", "PairWrite", "Presence"]

_FIRST_BATCH = 16
_LARGEST_BATCH = 256


@dataclass(frozen=True, slots=True)
class Presence:
    """Which halves of a page have an object; not yet checked."""

    target: bool
    draft: bool


@dataclass(frozen=True, slots=True)
class PairRead:
    """What became of reading a pair. `successors` are those the draft half was made with; () unless it is PRESENT."""

    target: HalfRead
    draft: HalfRead
    successors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PairWrite:
    """What became of writing a pair."""

    target: HalfWrite
    draft: HalfWrite


class PairStore:
    """Reads and writes pairs of one target and, if there is one, one draft. Thread-safe, synchronous."""

    def __init__(
        self,
        backend: Backend,
        target_namespace: bytes,
        draft_namespace: bytes | None,
        target_bytes: int,
        draft_bytes: int,
        observer: StorageObserver | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        breaker: BreakerSettings | None = None,
    ) -> None:
        """`backend` must have been probed; `close` closes it.

        Namespaces are 32-byte digests (`speccache_api.fingerprint`); `draft_namespace` None means no draft, and then
        every draft half is absent. `target_bytes` and `draft_bytes` are the payload sizes of one page (the latter is 0
        without a draft). Raises ValueError when these do not fit together.
        """
        if (draft_namespace is None) != (draft_bytes == 0):
            raise ValueError("draft_bytes must be 0 exactly when there is no draft")
        gate = Gate(observer or NullObserver(), clock, breaker or BreakerSettings())
        self._backend = backend
        self._target = HalfStore(backend, gate, Half.TARGET, target_namespace, target_bytes)
        self._draft = None
        if draft_namespace is not None:
            self._draft = HalfStore(backend, gate, Half.DRAFT, draft_namespace, draft_bytes)

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        """Say what is there for a run of chained page keys (32 bytes each), up to the first page without a target.

        The answer belongs to a prefix of `keys`, so every `Presence` in it has a target. An error or an open breaker
        ends the run. Costs one existence check per half of the answer and at most as many again, in batches that grow,
        since most runs are either short or long.
        """
        run = 0
        size = _FIRST_BATCH
        while run < len(keys):
            batch = keys[run : run + size]
            found = self._target.exists(batch) or []
            hits = next((i for i, there in enumerate(found) if not there), len(found))
            run += hits
            if hits < len(batch):
                break
            size = min(size * 2, _LARGEST_BATCH)
        drafts = self._draft.exists(keys[:run]) if run and self._draft is not None else None
        return [Presence(True, draft) for draft in drafts or [False] * run]

    def read_pair(self, key: bytes, target_into: memoryview, draft_into: memoryview | None) -> PairRead:
        """Read a page's halves into the caller's buffers of exactly `target_bytes` and `draft_bytes` bytes.

        **A half that is not PRESENT leaves its buffer with undefined content** (partly overwritten, another page's
        bytes): the caller must treat it as absent and never attend to it. A target that is not PRESENT makes the pair
        a miss and its draft is not read. Corrupt objects are deleted. Pass `draft_into` None to leave the draft out.
        Raises ValueError for a buffer or key of the wrong size, or a draft buffer in a store without a draft.
        """
        target_view = self._target.flat(target_into)
        draft_view = None if draft_into is None else self._with_draft().flat(draft_into)
        target, _ = self._target.read(key, target_view)
        if target is not HalfRead.PRESENT or draft_view is None:
            return PairRead(target, HalfRead.ABSENT)
        draft, header = self._with_draft().read(key, draft_view)
        return PairRead(target, draft, () if header is None else header.successors)

    def write_pair(self, key: bytes, target: Bytes, draft: Bytes | None, successors: tuple[int, ...] = ()) -> PairWrite:
        """Store the halves that storage lacks: draft first, target second.

        `successors` are the token ids after the page that the draft half depends on, at most four, kept in its header.
        A target that is stored without its draft gets the draft added. A draft that cannot be written does not stop the
        target. The buffers must not change during the call. Raises ValueError for a buffer or key of the wrong size, a
        draft in a store without one, or successors that a header cannot hold.
        """
        check_successors(successors)
        target_view = self._target.flat(target)
        draft_result = HalfWrite.NOT_GIVEN
        if draft is not None:
            draft_result = self._with_draft().write(key, self._with_draft().flat(draft), successors)
        return PairWrite(self._target.write(key, target_view, ()), draft_result)

    def close(self) -> None:
        """Close the backend. No other method may be called afterwards."""
        self._backend.close()

    def _with_draft(self) -> HalfStore:
        if self._draft is None:
            raise ValueError("this store was made without a draft")
        return self._draft
