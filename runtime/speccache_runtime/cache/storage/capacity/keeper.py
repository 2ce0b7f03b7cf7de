"""This pod's part in keeping a store at its size: says what it writes and reads, obeys the limits, sweeps in its turn.

    every few seconds   state note ◀── store          what is used, and how far this pod may go on writing
                        usage note ──▶ store          what this pod has written, obeys, and has read of late
                        sweeper's round, if the lease is ours (see sweeper.py)

When the store does not answer, writes go on up to the limit told last, for STATE_TTL_S seconds.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable

from speccache_runtime.cache.storage.base import Backend, BackendError, NoteName
from speccache_runtime.cache.storage.capacity.budget import Budget
from speccache_runtime.cache.storage.capacity.lease import SweeperLease
from speccache_runtime.cache.storage.capacity.notes import USAGE, State, Usage
from speccache_runtime.cache.storage.capacity.recent import Recent
from speccache_runtime.cache.storage.capacity.sweeper import Sweeper, state_name
from speccache_runtime.cache.storage.observer import StorageObserver

logger = logging.getLogger(__name__)

BUSY_S = 2.0
"""Between two rounds while this pod is short of room, or knows of no limit yet."""
ROUND_S = 5.0
"""Between two rounds with a capacity."""
IDLE_S = 20.0
"""Between two rounds without one: then there is nothing but counting. Less than the lease lasts, or pods would take
turns and each list the store anew."""
FIRST_LIMIT_S = 15.0
"""A pod that has just begun has its first limit after two rounds, the sweeper's and its own; its writes wait for it."""
CLOSE_S = 3.0
"""How long `close` waits for the round under way."""
STATE_TTL_S = 60.0
"""A limit told so long ago holds no more, and nothing is written until there is another."""


class Keeper:
    """Owns a thread. `budget` is what writers ask, `recent` is where readers say what they have read."""

    def __init__(
        self,
        backend: Backend,
        fingerprint: str,
        capacity: int | None,
        observer: StorageObserver,
        *,
        sweeps: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`backend` must have been probed and outlive this. `capacity` in bytes, or None. With `sweeps` False this
        process only writes: another rank of its replica sweeps. `clock` gives seconds that never go back."""
        self.budget = Budget(limited=capacity is not None)
        self.recent = Recent(clock)
        self._backend = backend
        self._capacity = capacity
        self._observer = observer
        self._clock = clock
        self._writer = NoteName(fingerprint, USAGE, secrets.token_hex(16))
        self._state = state_name(fingerprint)
        self._lease = SweeperLease(backend, fingerprint, self._writer.id)
        self._sweeper = Sweeper(backend, fingerprint, capacity, self._lease, clock) if sweeps else None
        self._told_at = -STATE_TTL_S
        self._heard = 0
        self.state: State | None = None
        """What was last told of the whole store; None as long as nothing was."""
        self._end = threading.Event()
        self._failing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins with a round at once, on a thread of its own."""
        self.budget.expect(FIRST_LIMIT_S)
        self._thread = threading.Thread(target=self._run, name="storage-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and gives the lease up, before the backend is closed; does not wait long for a store that
        hangs."""
        self._end.set()
        self.budget.expect(0)
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    @property
    def ended(self) -> bool:
        """Whether no thread of it uses the backend any more."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def capacity(self) -> int | None:
        """In bytes, or None."""
        return self._capacity

    def round(self) -> None:
        """Learns the limit, tells, and sweeps if it is our turn. Raises BackendError when storage fails."""
        self._learn()
        budget = self.budget
        usage = Usage(budget.written, budget.largest, budget.until, self._heard, self.recent.filter())
        self._backend.write_note(self._writer, usage.to_bytes())
        swept = self._sweeper.round() if self._sweeper is not None else None
        if swept is not None and swept.removed_pages:
            self._observer.on_swept(swept.removed_pages, swept.removed_bytes)
        if swept is not None:
            self._learn()

    def _learn(self) -> None:
        note = self._backend.read_note(self._state)
        state = State.from_bytes(note.body) if note is not None else None
        if note is not None and state is not None and self._backend.now() - note.changed_at < STATE_TTL_S:
            self._told_at = self._clock()
            self.state = state
            self._observer.on_usage(state.used, state.objects, self._capacity)
            if state.until is not None:
                self._heard = state.number
                until = state.until.get(self._writer.id)
                if until is None:
                    self.budget.stop()  # the sweeper has not seen us yet, or not for a while
                else:
                    self.budget.allow(until)
        elif self._clock() - self._told_at > STATE_TTL_S:
            self.budget.stop()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                self.round()
                self._failing = False
            except BackendError as error:
                if not self._failing:
                    logger.warning("the size of storage is not looked after at the moment: %s", error)
                self._failing = True
                if self._clock() - self._told_at > STATE_TTL_S:
                    self.budget.stop()
            except Exception:
                # Without it nothing would be written any more, and nobody would know why.
                logger.exception("a bug in the keeper of storage; it goes on")
            self._end.wait(self._pause())
        try:
            self._lease.release()
            self._backend.delete_note(self._writer)
        except BackendError as error:
            logger.info("storage's sweeper lease is left to expire: %s", error)

    def _pause(self) -> float:
        if self._capacity is None:
            return IDLE_S
        return BUSY_S if self.budget.short or not self.budget.told else ROUND_S
