"""Pages in storage, as pairs: what makes half a pair a known state and a damaged object a miss.

    write   draft object, then target object      a target that is visible has had its draft's chance
    lookup  where do the targets end, the drafts?  existence only, nothing is believed yet
    read    target object, then draft object       header and checksum compared before HIT is said

No method raises because storage fails: the answer says so, the observer counts it, and after several failures in a row
a breaker stops asking for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speccache_runtime.cache.storage.base import Backend
from speccache_runtime.cache.storage.breaker import BreakerSettings, BreakerState
from speccache_runtime.cache.storage.capacity.budget import Budget
from speccache_runtime.cache.storage.capacity.keeper import Keeper
from speccache_runtime.cache.storage.capacity.recent import Recent
from speccache_runtime.cache.storage.codec import Bytes, Half, check_successors
from speccache_runtime.cache.storage.gate import Gate
from speccache_runtime.cache.storage.halves import HalfRead, HalfStore
from speccache_runtime.cache.storage.observer import NullObserver, Operation, StorageObserver
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.runs import run_length


@dataclass(frozen=True, slots=True)
class Run:
    """How many leading pages of a lookup seem to be stored, and how many of those with their draft half: existence
    only, nothing has been read yet."""

    target: int
    draft: int


@dataclass(frozen=True, slots=True)
class PairRead:
    """What became of reading a pair. `successors` are those the draft half was made with, () unless it is a HIT.
    `age` is how many seconds ago storage last noted a use of them, of the half where that is longer ago.
    """

    target: Outcome
    draft: Outcome
    successors: tuple[int, ...] = ()
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class PairWrite:
    """What became of writing a pair."""

    target: Outcome
    draft: Outcome


@dataclass(frozen=True, slots=True)
class StoreState:
    """How a store is: its breakers, and bytes and objects of all pods as far as they are known. `capacity` in bytes."""

    read: BreakerState
    write: BreakerState
    used: int | None
    objects: int | None
    capacity: int | None


class PairStore:
    """Reads and writes pairs of one target and, if there is one, one draft. Thread-safe, synchronous.

    Where ranks share a half, rank 0 alone keeps it, and the store of another rank is without.
    """

    def __init__(
        self,
        backend: Backend,
        fingerprint: str,
        target_namespace: bytes | None,
        draft_namespace: bytes | None,
        target_bytes: int,
        draft_bytes: int,
        observer: StorageObserver | None = None,
        *,
        keeper: Keeper | None = None,
        clock: Callable[[], float] = time.monotonic,
        breaker: BreakerSettings | None = None,
    ) -> None:
        """`backend` must have been probed. `keeper`, not started yet, keeps the store at its size; None: it may grow.
        `close` closes both.

        `fingerprint` (hex) and the namespaces (32 bytes) are digests (`speccache_api.fingerprint`); a namespace of None
        means that this half is not kept here: every draft half is absent then, and any target half may be elsewhere.
        `target_bytes` and `draft_bytes` are the payload sizes of one page, 0 for a half that is not kept. Raises
        ValueError when these do not fit together.
        """
        if (target_namespace is None) != (target_bytes == 0) or (draft_namespace is None) != (draft_bytes == 0):
            raise ValueError("target_bytes and draft_bytes must be 0 exactly for a half that is not kept")
        gate = Gate(observer or NullObserver(), clock, breaker or BreakerSettings())
        self._gate = gate
        self._backend = backend
        budget = Budget(limited=False) if keeper is None else keeper.budget
        self._keeper = keeper
        self._recent = Recent() if keeper is None else keeper.recent
        self._target = self._draft = None
        if target_namespace is not None:
            self._target = HalfStore(backend, gate, budget, Half.TARGET, fingerprint, target_namespace, target_bytes)
        if draft_namespace is not None:
            self._draft = HalfStore(backend, gate, budget, Half.DRAFT, fingerprint, draft_namespace, draft_bytes)

    def lookup(self, keys: Sequence[bytes], parent: bytes) -> Run:
        """Say what is there of a run of chained page keys (32 bytes each); `parent` is the key before the first.

        Costs O(log n) rounds of parallel existence checks for each half; an error or an open breaker ends the run with
        what was sure before. A store without targets ends the run of targets nowhere.
        """
        target = len(keys) if self._target is None else self._length(self._target, keys, parent)
        draft = self._length(self._draft, keys[:target], parent) if self._draft is not None else 0
        return Run(target, draft)

    def read_pair(
        self, key: bytes, parent: bytes, target_into: memoryview | None, draft_into: memoryview | None
    ) -> PairRead:
        """Read a page's halves into the caller's buffers of exactly `target_bytes` and `draft_bytes` bytes.

        **A half that is not a HIT leaves its buffer with undefined content** (partly overwritten, another page's
        bytes): the caller must treat it as absent and never attend to it. A target that is not a HIT makes the pair
        a miss and its draft is not read. Corrupt objects are deleted. Pass None to leave a half out. Raises ValueError
        for a buffer or key of the wrong size, or a buffer for a half that is not kept.
        """
        target_view = None if target_into is None else self._with_target().flat(target_into)
        draft_view = None if draft_into is None else self._with_draft().flat(draft_into)
        target = HalfRead(Outcome.NOT_ASKED)
        if target_view is not None:
            target = self._with_target().read(key, parent, target_view)
            if target.outcome is not Outcome.HIT:
                return PairRead(target.outcome, Outcome.NOT_ASKED, (), target.age)
        self._recent.add(key)
        if draft_view is None:
            return PairRead(target.outcome, Outcome.NOT_ASKED, (), target.age)
        draft = self._with_draft().read(key, parent, draft_view)
        return PairRead(target.outcome, draft.outcome, draft.successors, max(target.age, draft.age))

    def write_pair(
        self, key: bytes, parent: bytes, target: Bytes | None, draft: Bytes | None, successors: tuple[int, ...] = ()
    ) -> PairWrite:
        """Store the halves that storage lacks: draft first, target second.

        `successors` are the token ids after the page that the draft half depends on, at most four, kept in its header.
        A target that is stored without its draft gets the draft added. A draft that cannot be written does not stop the
        target. The buffers must not change during the call. Raises ValueError for a buffer or key of the wrong size, a
        half that is not kept, or successors that a header cannot hold.
        """
        check_successors(successors)
        target_view = None if target is None else self._with_target().flat(target)
        target_outcome = draft_outcome = Outcome.NOT_ASKED
        if draft is not None:
            draft_outcome = self._with_draft().write(key, parent, self._with_draft().flat(draft), successors)
        if target_view is not None:
            target_outcome = self._with_target().write(key, parent, target_view, ())
            self._recent.add(parent)  # a sweeper that has listed before would take it for a page without children
        return PairWrite(target_outcome, draft_outcome)

    def touch(self, key: bytes, parent: bytes, draft: bool) -> Outcome:
        """Mark a page as used now, its draft half too if `draft`: DONE, MISS when a half has gone, or why it was not
        possible."""
        target = Outcome.DONE if self._target is None else self._target.touch(key, parent)
        if target is not Outcome.DONE or not draft:
            return target
        return self._with_draft().touch(key, parent)

    def begin(self) -> None:
        """The store is used from here on: starts the keeper."""
        if self._keeper is not None:
            self._keeper.start()

    def end(self) -> None:
        """The store is not used any more, but for operations under way: ends the keeper. `close` it when those have
        ended and `ended` is True."""
        self._gate.observer.on_end()
        if self._keeper is not None:
            self._keeper.close()

    @property
    def ended(self) -> bool:
        """Whether, after `end`, nothing here uses the backend by itself any more."""
        return self._keeper is None or self._keeper.ended

    @property
    def state(self) -> StoreState:
        """How it is now."""
        told = self._keeper.state if self._keeper is not None else None
        return StoreState(
            self._gate.state(Operation.READ),
            self._gate.state(Operation.WRITE),
            told.used if told else None,
            told.objects if told else None,
            self._keeper.capacity if self._keeper is not None else None,
        )

    def hurry(self) -> None:
        """Try writes again soon after each failure from here on (a drain)."""
        self._gate.hurry()

    def close(self) -> None:
        """Close keeper and backend. No other method may be called afterwards."""
        if self._keeper is not None:
            self._keeper.close()
        self._backend.close()

    def _with_target(self) -> HalfStore:
        if self._target is None:
            raise ValueError("this store was made without targets")
        return self._target

    def _with_draft(self) -> HalfStore:
        if self._draft is None:
            raise ValueError("this store was made without a draft")
        return self._draft

    def _length(self, half: HalfStore, keys: Sequence[bytes], parent: bytes) -> int:
        chain = [parent, *keys]
        return run_length(len(keys), lambda places: half.exists([(chain[place + 1], chain[place]) for place in places]))
