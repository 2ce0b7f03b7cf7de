"""One half of all pages in storage: names, identities, checks. Knows nothing of the other half."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from speccache_runtime.cache.storage.base import Backend, ObjectName, parent_digits
from speccache_runtime.cache.storage.capacity.budget import Budget
from speccache_runtime.cache.storage.codec import (
    DIGEST_SIZE,
    HEADER_SIZE,
    Bytes,
    Corrupt,
    CorruptReason,
    Half,
    Identity,
    check,
    encode_header,
)
from speccache_runtime.cache.storage.gate import Gate
from speccache_runtime.cache.storage.observer import Operation
from speccache_runtime.cache.storage.outcome import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HalfRead:
    """What became of reading one half; unless HIT, the destination's content is undefined.

    `successors` are those of the object, `age` is how long ago it was last written or touched, in seconds; () and 0.0
    unless HIT.
    """

    outcome: Outcome
    successors: tuple[int, ...] = ()
    age: float = 0.0


class HalfStore:
    """The target or the draft objects of one namespace, all with payloads of `nbytes` bytes. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        gate: Gate,
        budget: Budget,
        half: Half,
        fingerprint: str,
        namespace: bytes,
        nbytes: int,
    ) -> None:
        """Raises ValueError for a namespace that is no 32-byte digest or a size below 1."""
        if len(namespace) != DIGEST_SIZE or nbytes < 1:
            raise ValueError(f"{half}: need a namespace of {DIGEST_SIZE} bytes and a page size of at least 1 byte")
        self._backend = backend
        self._gate = gate
        self._budget = budget
        self._half = half
        self._fingerprint = fingerprint
        self._namespace = namespace
        self._nbytes = nbytes

    def flat(self, buffer: Bytes) -> memoryview:
        """The buffer as a run of bytes; raises ValueError unless it is contiguous and exactly one payload long."""
        view = memoryview(buffer)
        if not view.c_contiguous or view.nbytes != self._nbytes:
            raise ValueError(f"a {self._half} buffer must be {self._nbytes} contiguous bytes, not {view.nbytes}")
        return view.cast("B")

    def exists(self, pages: Sequence[tuple[bytes, bytes]]) -> list[bool] | None:
        """One batch of existence checks of pages by (key, parent's key); None when storage could not answer."""
        names = [self._name(key, parent) for key, parent in pages]
        return self._gate.call(Operation.LOOKUP, self._half, lambda: (Outcome.DONE, 0, self._backend.exists(names)))[1]

    def read(self, key: bytes, parent: bytes, into: memoryview) -> HalfRead:
        """Fill `into` with the page's half. A corrupt object is deleted."""
        name = self._name(key, parent)
        outcome, found = self._gate.call(Operation.READ, self._half, lambda: self._fetch(name, key, into))
        if outcome is Outcome.CORRUPT:
            self._gate.call(Operation.DELETE, self._half, lambda: self._delete(name))
        return found or HalfRead(outcome)

    def write(self, key: bytes, parent: bytes, payload: memoryview, successors: tuple[int, ...]) -> Outcome:
        """Store the page's half unless an object is there, or there is no room."""
        name, size = self._name(key, parent), HEADER_SIZE + self._nbytes
        if not self._budget.take(size):
            self._gate.observer.on_operation(Operation.WRITE, self._half, Outcome.FULL, 0.0, 0)
            return Outcome.FULL
        outcome, _ = self._gate.call(Operation.WRITE, self._half, lambda: self._put(name, key, payload, successors))
        if outcome in (Outcome.EXISTS, Outcome.DROPPED):  # after an error it may be there all the same
            self._budget.give_back(size)
        return outcome

    def touch(self, key: bytes, parent: bytes) -> Outcome:
        """Mark the page's half as used now: DONE, MISS, or why it was not possible."""
        name = self._name(key, parent)
        return self._gate.call(Operation.TOUCH, self._half, lambda: self._mark(name))[0]

    def _name(self, key: bytes, parent: bytes) -> ObjectName:
        return ObjectName(self._fingerprint, self._half, self._namespace.hex(), key.hex(), parent_digits(parent))

    def _identity(self, key: bytes) -> Identity:
        return Identity(self._namespace, self._half, key)

    def _fetch(self, name: ObjectName, key: bytes, into: memoryview) -> tuple[Outcome, int, HalfRead | None]:
        # Not kept from read to read: reads run in several threads.
        header = bytearray(HEADER_SIZE)
        found = self._backend.read(name, header, into)
        if found.outcome is Outcome.MISS:
            return Outcome.MISS, 0, None
        try:
            if found.outcome is Outcome.CORRUPT:
                raise Corrupt(CorruptReason.LENGTH)
            checked = check(header, self._identity(key), into)
        except Corrupt as corrupt:
            logger.warning("storage object %s is corrupt (%s) and will be deleted", name.path, corrupt.reason)
            self._gate.observer.on_corrupt(self._half, corrupt.reason)
            return Outcome.CORRUPT, 0, None
        return (
            Outcome.HIT,
            len(into),
            HalfRead(Outcome.HIT, checked.successors, max(0.0, self._backend.now() - found.used_at)),
        )

    def _put(
        self, name: ObjectName, key: bytes, payload: memoryview, successors: tuple[int, ...]
    ) -> tuple[Outcome, int, None]:
        if self._backend.write(name, encode_header(self._identity(key), successors, payload), payload):
            return Outcome.WRITTEN, len(payload), None
        return Outcome.EXISTS, 0, None

    def _mark(self, name: ObjectName) -> tuple[Outcome, int, None]:
        return Outcome.DONE if self._backend.touch(name) else Outcome.MISS, 0, None

    def _delete(self, name: ObjectName) -> tuple[Outcome, int, None]:
        self._backend.delete([name])
        return Outcome.DONE, 0, None
