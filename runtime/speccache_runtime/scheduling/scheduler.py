"""Decides what the next step computes. Plain Python over integers: no torch, no I/O, no clock.

Every state change of a sequence happens in this file: `add` (WAITING), `schedule` (WAITING -> RUNNING, and back by
preemption), `finish` (-> FINISHED).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from speccache_runtime.core import Tier
from speccache_runtime.scheduling.sequence import Sequence, Status


class Hit(Protocol):
    """What admission found in the cache."""

    @property
    def tokens(self) -> int: ...
    @property
    def by_tier(self) -> dict[Tier, int]: ...
    @property
    def draft_absent(self) -> int: ...


class Cache(Protocol):
    """What the scheduler needs of the cache (`cache.paired.PairedCache`). Leases and prefetches are the cache's own."""

    def prefetch_pending(self, prefetch: Any) -> bool: ...
    def end_prefetch(self, prefetch: Any) -> None: ...
    def admit(self, lease: Any, tokens: Seq[int], prefetch: Any) -> Hit | None: ...
    def grow(self, lease: Any, num_slots: int) -> bool: ...
    def release(self, lease: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's share of a step: positions [start, start + rows).

    With `decode`, the rows are the newest token and its proposals. `wants_token` says that the last row's logits
    (decode: every row's) choose tokens.
    """

    seq: Sequence
    start: int
    rows: int
    decode: bool
    wants_token: bool


class Scheduler:
    """Decoding sequences first, then prefill within `prefill_budget` tokens a step, first come first served."""

    def __init__(self, cache: Cache, *, max_running: int, prefill_budget: int) -> None:
        self._cache = cache
        self._max_running = max_running
        self._prefill_budget = prefill_budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._crowded = False

    def add(self, seq: Sequence) -> None:
        """Takes a new sequence at the end of the queue."""
        self.waiting.append(seq)

    def sequences(self) -> Iterator[Sequence]:
        """All sequences that are not finished."""
        yield from self.running
        yield from self.waiting

    def finish(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives its pages back."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._cache.release(seq.lease)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self._end_prefetch(seq)
        seq.status = Status.FINISHED

    def schedule(self) -> list[Work]:
        """The next step's work; empty when nothing can run now."""
        work: list[Work] = []
        self._crowded = False
        for seq in [s for s in self.running if s.decoding]:
            self._schedule_decode(seq, work)
        budget = self._prefill_budget
        for seq in [s for s in self.running if not s.decoding]:
            budget -= self._schedule_prefill(seq, budget, work)
        # While somebody is short of room nobody comes in: who was just preempted would take the room back, and others
        # would only hold pages that they cannot use yet.
        while budget > 0 and len(self.running) < self._max_running and not self._crowded:
            admitted = self._admit_next()
            if admitted is None:
                break
            budget -= self._schedule_prefill(admitted, budget, work)
        return [w for w in work if w.seq.status is Status.RUNNING]

    def _schedule_decode(self, seq: Sequence, work: list[Work]) -> None:
        rows = 1 + seq.num_proposals
        if self._make_room(seq, seq.computed + rows):
            work.append(Work(seq, seq.computed, rows, decode=True, wants_token=True))

    def _schedule_prefill(self, seq: Sequence, budget: int, work: list[Work]) -> int:
        """Adds a prefill chunk of at most `budget` tokens; returns its size."""
        rows = min(budget, len(seq.tokens) - seq.computed)
        if rows <= 0 or not self._make_room(seq, seq.computed + rows):
            return 0
        last = seq.computed + rows == len(seq.tokens)
        work.append(Work(seq, seq.computed, rows, decode=False, wants_token=last))
        return rows

    def _make_room(self, seq: Sequence, slots: int) -> bool:
        """Grows `seq`, preempting younger ones if it must. False: it sits this step out, or was itself preempted."""
        if seq.status is not Status.RUNNING:
            return False
        while not self._cache.grow(seq.lease, slots):
            self._crowded = True
            victim = self.running[-1]
            if victim is seq:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._cache.release(seq.lease)
        seq.status = Status.WAITING
        seq.computed = 0
        seq.num_proposals = 0
        self.waiting.appendleft(seq)
        self.preemptions += 1

    def _admit_next(self) -> Sequence | None:
        for seq in self.waiting:
            if self._cache.prefetch_pending(seq.prefetch):
                continue
            hit = self._cache.admit(seq.lease, seq.tokens, seq.prefetch)
            if hit is None:
                return None
            self._end_prefetch(seq)
            self.waiting.remove(seq)
            self.running.append(seq)
            seq.status = Status.RUNNING
            seq.computed = hit.tokens
            if seq.cached is None:
                seq.cached, seq.draft_absent = dict(hit.by_tier), hit.draft_absent
            return seq
        return None

    def _end_prefetch(self, seq: Sequence) -> None:
        self._cache.end_prefetch(seq.prefetch)
        seq.prefetch = None
