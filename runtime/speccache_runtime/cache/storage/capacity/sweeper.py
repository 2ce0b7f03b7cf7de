"""The sweeper's round: look what is used, remove what is too much, tell the writers how far they may go on.

The shell around `account`, `ledger` and `lease`. Removing goes in batches, and before each the lease is looked at: a
pod that was stopped for a while and goes on must not remove beside its successor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from speccache_runtime.cache.storage.base import Backend, NoteName
from speccache_runtime.cache.storage.capacity.account import Account, excess, limits
from speccache_runtime.cache.storage.capacity.lease import SweeperLease
from speccache_runtime.cache.storage.capacity.ledger import Ledger, StoredPage
from speccache_runtime.cache.storage.capacity.notes import STATE, USAGE, State, Usage
from speccache_runtime.cache.storage.capacity.recent import contains

SPARED_S = 60.0
"""What was written, touched or read in so many seconds stays."""

WRITER_TTL_S = 60.0
"""A writer that has not said anything for so long has ended."""

FORGET_S = 3600.0
"""After so long its note is removed."""

LIST_EVERY_S = 3600.0
"""How old a listing may get while nothing has to be removed."""

_FRESH_S = 60.0
_FRESH_SHARE = 20
"""A listing from which pages are removed is at most so many seconds old, or so many times as long as listing took."""

_BATCH = 100

_STATES = 64
"""As many as a writer may have heard of last that still counts as alive: more than rounds in WRITER_TTL_S."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What a round has found and done. `used` and `objects` are what is left."""

    used: int
    objects: int
    removed_pages: int = 0
    removed_bytes: int = 0


class Sweeper:
    """One pod's sweeping of one fingerprint; for one thread. Every round raises BackendError when storage fails."""

    def __init__(
        self,
        backend: Backend,
        fingerprint: str,
        capacity: int | None,
        lease: SweeperLease,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity` in bytes; None: only count. `clock` gives seconds that never go back."""
        self._backend = backend
        self._fingerprint = fingerprint
        self._capacity = capacity
        self._lease = lease
        self._clock = clock
        self._ledger: Ledger | None = None
        self._account: Account
        self._states: list[State] = []
        self._listed_at = 0.0
        self._listing_took = 0.0

    def round(self) -> Swept | None:
        """One round, if the lease is ours; None otherwise."""
        if not self._lease.hold():
            self._ledger = None
            return None
        if self._ledger is None:
            self._states = self._state_of_predecessor()
        usages = self._usages()
        written = {writer: usage.written for writer, usage in usages.items()}
        if self._ledger is None or self._age() > LIST_EVERY_S or self._account.seen.keys() - written.keys():
            self._list(written)  # also when a writer has ended: nobody knows what it wrote at last
        used = self._account.used(written)
        swept = Swept(used, self._ledger.objects if self._ledger else 0)
        if self._capacity is not None:
            swept = self._make_room(self._capacity, usages, written, used)
        self._publish(swept, usages, written)
        return swept

    def _make_room(self, capacity: int, usages: Mapping[str, Usage], written: Mapping[str, int], used: int) -> Swept:
        largest = max((usage.largest for usage in usages.values()), default=0)
        if excess(used, capacity, len(usages), largest) and self._age() > max(
            _FRESH_S, _FRESH_SHARE * self._listing_took
        ):
            self._list(written)
            used = self._account.used(written)
        assert self._ledger is not None
        too_much = excess(used, capacity, len(usages), largest)
        pages, nbytes = self._remove(too_much, [usage.recent for usage in usages.values()]) if too_much else (0, 0)
        self._account.removed += nbytes
        return Swept(self._account.used(written), self._ledger.objects, pages, nbytes)

    def _remove(self, too_much: int, recent: list[bytes]) -> tuple[int, int]:
        """Removes pages until so many bytes are gone, or no page may go; how many pages and bytes went."""
        assert self._ledger is not None
        victims = self._ledger.victims(
            self._backend.now() - SPARED_S, lambda key: any(contains(each, bytes.fromhex(key)) for each in recent)
        )
        pages = removed = 0
        for batch in _batches(victims, too_much):
            if not self._lease.held():
                self._ledger = None
                break
            self._backend.delete([name for page in batch for name in page.names])
            pages += len(batch)
            removed += sum(page.nbytes for page in batch)
        return pages, removed

    def _age(self) -> float:
        return self._clock() - self._listed_at

    def _list(self, written: Mapping[str, int]) -> None:
        begun = self._clock()
        self._ledger = Ledger(self._backend.objects(self._fingerprint))
        self._account = Account(self._ledger.nbytes, dict(written))
        self._listed_at = self._clock()
        self._listing_took = self._listed_at - begun

    def _usages(self) -> dict[str, Usage]:
        """What the living writers say; the notes of those that ended long ago are removed."""
        found = {}
        now = self._backend.now()
        for name in self._backend.list_notes(self._fingerprint, USAGE):
            note = self._backend.read_note(name)
            if note is None:
                continue
            if now - note.changed_at > FORGET_S:
                self._backend.delete_note(name)
            usage = Usage.from_bytes(note.body)
            if usage is not None and now - note.changed_at <= WRITER_TTL_S:
                found[name.id] = usage
        return found

    def _state_of_predecessor(self) -> list[State]:
        note = self._backend.read_note(state_name(self._fingerprint))
        state = State.from_bytes(note.body) if note is not None else None
        return [] if state is None else [state]

    def _publish(self, swept: Swept, usages: Mapping[str, Usage], written: Mapping[str, int]) -> None:
        until = None
        if self._capacity is not None:
            held = {writer: self._held(writer, usage) for writer, usage in usages.items()}
            until = limits(swept.used, self._capacity, written, held)
        number = self._states[-1].number + 1 if self._states else 1
        self._states = [*self._states[-_STATES:], State(swept.used, swept.objects, number, until)]
        self._backend.write_note(state_name(self._fingerprint), self._states[-1].to_bytes())

    def _held(self, writer: str, usage: Usage) -> int:
        """The most that this writer may write before it hears of the next state."""
        since = [state.until for state in self._states if state.until and state.number > usage.heard]
        return max([usage.until, *(until.get(writer, 0) for until in since)])


def state_name(fingerprint: str) -> NoteName:
    """Where the sweeper tells all pods what it knows."""
    return NoteName(fingerprint, STATE, "0")


def _batches(victims: Iterator[StoredPage], too_much: int) -> Iterator[list[StoredPage]]:
    """Pages in batches, until they hold so many bytes together."""
    left = too_much

    def wanted() -> Iterator[StoredPage]:
        nonlocal left
        for page in victims:
            yield page
            left -= page.nbytes
            if left <= 0:
                return

    pages = wanted()
    while batch := list(islice(pages, _BATCH)):
        yield batch
