"""Decides what the next step computes. Plain Python over integers: no torch, no I/O, no clock.

Every state change of a sequence happens in this file: `add` (WAITING), `schedule` (WAITING -> LOADING or RUNNING,
LOADING -> RUNNING, and back to WAITING by preemption), `finish` (-> FINISHED).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from speccache_api.drafts import Draft
from speccache_runtime.cache.lease import Hit, Lease, Prefetch
from speccache_runtime.scheduling.drafting import Drafting, DraftShare
from speccache_runtime.scheduling.sequence import Sequence, Status


class Cache(Protocol):
    """What the scheduler needs of the cache (`cache.paired.PairedCache`)."""

    def prefetch_pending(self, prefetch: Prefetch | None) -> bool: ...
    def end_prefetch(self, prefetch: Prefetch | None) -> None: ...
    def admit(self, lease: Lease, tokens: Seq[int], prefetch: Prefetch | None) -> Hit | None: ...
    def loading(self, lease: Lease) -> bool: ...
    def grow(self, lease: Lease, num_slots: int) -> bool: ...
    def release(self, lease: Lease) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's share of a step: positions [start, start + rows).

    With `decode`, the rows are the newest token and its proposals. `wants_token` says that the last row's logits
    (decode: every row's) choose tokens. `loads` are the jobs it must wait for. `draft` is what the draft computes
    afterwards, `propose` how many proposals the request may get then: its lease has room for them.
    """

    seq: Sequence
    start: int
    rows: int
    decode: bool
    wants_token: bool
    loads: tuple[int, ...] = ()
    draft: DraftShare | None = None
    propose: int = 0


class Scheduler:
    """Decoding sequences first, then prefill within `prefill_budget` tokens a step, first come first served. What is
    left of them goes to drafts that are behind, and then to who comes in.

    A sequence whose pages are on their way joins a step only when nobody else has anything to compute: the pass that it
    joins waits for its pages, and whoever shares the device with that pass would wait with it.
    """

    def __init__(
        self, cache: Cache, *, max_running: int, prefill_budget: int, num_steps: int, draft: Draft | None = None
    ) -> None:
        """`num_steps` is the most proposals that a request gets at once, `draft` what makes them; 0 and None without
        speculation."""
        self.drafting = Drafting(draft)
        self._cache = cache
        self._max_running = max_running
        self._prefill_budget = prefill_budget
        self._num_steps = num_steps
        self._rows = list(range(max_running))
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
        if seq.status in (Status.RUNNING, Status.LOADING):
            self._stop(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self._end_prefetch(seq)
        seq.status = Status.FINISHED

    def schedule(self) -> list[Work]:
        """The next step's work, decoding first; empty when nothing can run now."""
        work: list[Work] = []
        self._crowded = False
        self.drafting.begin()
        for seq in self.running:
            if seq.status is Status.LOADING and not self._cache.loading(seq.lease):
                seq.status = Status.RUNNING
        ready = [s for s in self.running if s.status is Status.RUNNING]
        for seq in [s for s in ready if s.decoding]:
            self._schedule_decode(seq, work)
        budget = self._prefill_budget
        for seq in [s for s in ready if not s.decoding]:
            budget -= self._schedule_prefill(seq, budget, work)
        for item in work:
            budget -= self.drafting.catch_up(item.seq, budget)
        self._admit(budget, work)
        work = [w for w in work if w.seq.status is Status.RUNNING]
        if not work:
            work = self._wait_with_a_pass()
        return [self._with_draft(w) for w in work]

    def _admit(self, budget: int, work: list[Work]) -> None:
        # While somebody is short of room nobody comes in: who was just preempted would take the room back, and others
        # would only hold pages that they cannot use yet.
        while budget > 0 and len(self.running) < self._max_running and not self._crowded:
            admitted = self._admit_next()
            if admitted is None:
                break
            if admitted.status is Status.RUNNING:
                budget -= self._schedule_prefill(admitted, budget, work)
                budget -= self.drafting.catch_up(admitted, budget)

    def _wait_with_a_pass(self) -> list[Work]:
        """Work for sequences whose pages are on their way: it begins layer by layer as they arrive."""
        work: list[Work] = []
        budget = self._prefill_budget
        for seq in [s for s in self.running if s.status is Status.LOADING]:
            rows = self._schedule_prefill(seq, budget, work)
            if rows:
                seq.status = Status.RUNNING
                work[-1] = replace(work[-1], loads=seq.lease.loads)
            budget -= rows
            budget -= self.drafting.catch_up(seq, budget) if rows else 0
        return [w for w in work if w.seq.status is Status.RUNNING]

    def _schedule_decode(self, seq: Sequence, work: list[Work]) -> None:
        rows = 1 + seq.num_proposals
        if self._make_room(seq, seq.computed + rows + self.drafting.spare):
            work.append(Work(seq, seq.computed, rows, decode=True, wants_token=True))

    def _schedule_prefill(self, seq: Sequence, budget: int, work: list[Work]) -> int:
        """Adds a prefill chunk of at most `budget` tokens; returns its size."""
        rows = min(budget, len(seq.tokens) - seq.computed)
        last = seq.computed + rows == len(seq.tokens)
        slots = seq.computed + rows + (self.drafting.spare if last else 0)
        if rows <= 0 or not self._make_room(seq, slots):
            return 0
        work.append(Work(seq, seq.computed, rows, decode=False, wants_token=last))
        return rows

    def _with_draft(self, work: Work) -> Work:
        """Adds the draft's part, and asks for proposals if there is room for their slots; nobody is preempted for
        that."""
        seq = work.seq
        share = self.drafting.share(seq, 1 if work.decode else work.rows, chooses=work.wants_token)
        want = min(self._num_steps, seq.tokens_left - 2) if work.wants_token else 0
        if self.drafting.behind(seq, share):
            want = 0
        if want <= 0 or not self._cache.grow(seq.lease, work.start + work.rows + want + self.drafting.spare):
            want = 0
        return replace(work, draft=share, propose=want)

    def _make_room(self, seq: Sequence, slots: int) -> bool:
        """Grows `seq`, preempting younger ones if it must. False: it sits this step out, or was itself preempted."""
        if seq.status is Status.WAITING:
            return False
        while not self._cache.grow(seq.lease, slots):
            self._crowded = True
            victim = self.running[-1]
            if victim is seq:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._stop(seq)
        seq.status = Status.WAITING
        seq.computed = seq.drafted = 0
        seq.num_proposals, seq.proposals = 0, ()
        self.waiting.appendleft(seq)
        self.preemptions += 1

    def _stop(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._cache.release(seq.lease)
        heapq.heappush(self._rows, seq.row)

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
            seq.row, seq.tabled = heapq.heappop(self._rows), 0
            seq.status = Status.LOADING if self._cache.loading(seq.lease) else Status.RUNNING
            seq.computed = hit.tokens
            self.drafting.admit(seq)
            if seq.cached is None:
                seq.cached, seq.draft_absent = dict(hit.by_tier), hit.draft_absent
            return seq
        return None

    def _end_prefetch(self, seq: Sequence) -> None:
        self._cache.end_prefetch(seq.prefetch)
        seq.prefetch = None
