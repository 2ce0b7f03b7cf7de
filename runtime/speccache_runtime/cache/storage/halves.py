"""One half of all pages in storage: names, identities, checks. Knows nothing of the other half."""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence

from speccache_runtime.cache.storage.base import Backend, ObjectName, ReadStatus
from speccache_runtime.cache.storage.codec import (
    DIGEST_SIZE,
    HEADER_SIZE,
    Bytes,
    Corrupt,
    CorruptReason,
    Half,
    Header,
    Identity,
    check,
    encode_header,
)
from speccache_runtime.cache.storage.gate import Gate
from speccache_runtime.cache.storage.observer import Operation, Result

logger = logging.getLogger(__name__)


class HalfRead(enum.StrEnum):
    """What became of reading one half. On anything but PRESENT the destination's content is undefined."""

    PRESENT = "present"
    ABSENT = "absent"
    """No such object, not asked for, not wanted without its target, or not tried because the breaker is open."""
    CORRUPT = "corrupt"
    """There was an object that is not this page's half; it has been deleted if storage let us."""
    ERROR = "error"


class HalfWrite(enum.StrEnum):
    """What became of writing one half."""

    WRITTEN = "written"
    EXISTS = "exists"
    """An object was there already and was left alone."""
    NOT_GIVEN = "not_given"
    """There was no draft half to write."""
    ERROR = "error"
    DROPPED = "dropped"
    """Not tried: a breaker is open, or storage could not say whether the object exists."""


_READS = {
    Result.OK: HalfRead.PRESENT,
    Result.MISS: HalfRead.ABSENT,
    Result.DROPPED: HalfRead.ABSENT,
    Result.CORRUPT: HalfRead.CORRUPT,
    Result.ERROR: HalfRead.ERROR,
}
_WRITES = {Result.OK: HalfWrite.WRITTEN, Result.DROPPED: HalfWrite.DROPPED, Result.ERROR: HalfWrite.ERROR}


class HalfStore:
    """The target or the draft objects of one namespace, all with payloads of `nbytes` bytes. Thread-safe."""

    def __init__(self, backend: Backend, gate: Gate, half: Half, namespace: bytes, nbytes: int) -> None:
        """Raises ValueError for a namespace that is no 32-byte digest or a size below 1."""
        if len(namespace) != DIGEST_SIZE or nbytes < 1:
            raise ValueError(f"{half}: need a namespace of {DIGEST_SIZE} bytes and a page size of at least 1 byte")
        self._backend = backend
        self._gate = gate
        self._half = half
        self._namespace = namespace
        self._nbytes = nbytes

    def flat(self, buffer: Bytes) -> memoryview:
        """The buffer as a run of bytes; raises ValueError unless it is contiguous and exactly one payload long."""
        view = memoryview(buffer)
        if not view.c_contiguous or view.nbytes != self._nbytes:
            raise ValueError(f"a {self._half} buffer must be {self._nbytes} contiguous bytes, not {view.nbytes}")
        return view.cast("B")

    def exists(self, keys: Sequence[bytes]) -> list[bool] | None:
        """One batch of existence checks; None when storage could not answer."""
        names = [self._name(key) for key in keys]
        return self._gate.call(Operation.LOOKUP, self._half, lambda: (Result.OK, 0, self._backend.exists(names)))[1]

    def read(self, key: bytes, into: memoryview) -> tuple[HalfRead, Header | None]:
        """Fill `into` with the page's half; the header comes exactly with PRESENT. A corrupt object is deleted."""
        name = self._name(key)
        result, header = self._gate.call(Operation.READ, self._half, lambda: self._fetch(name, key, into))
        if result is Result.CORRUPT:
            self._gate.call(Operation.DELETE, self._half, lambda: self._delete(name))
        return _READS[result], header

    def write(self, key: bytes, payload: memoryview, successors: tuple[int, ...]) -> HalfWrite:
        """Store the page's half unless an object is there."""
        name = self._name(key)
        # Asked first: a volume that takes no writes should not go on costing an existence check per page.
        there = None if self._gate.blocked(Operation.WRITE) else self.exists([key])
        if there is None:
            self._gate.drop(Operation.WRITE, self._half)
            return HalfWrite.DROPPED
        if there[0]:
            self._gate.observer.on_operation(Operation.WRITE, self._half, Result.SKIPPED, 0.0, 0)
            return HalfWrite.EXISTS
        result, _ = self._gate.call(Operation.WRITE, self._half, lambda: self._put(name, key, payload, successors))
        return _WRITES[result]

    def _name(self, key: bytes) -> ObjectName:
        return ObjectName(self._namespace.hex(), self._half, key.hex())

    def _identity(self, key: bytes) -> Identity:
        return Identity(self._namespace, self._half, key)

    def _fetch(self, name: ObjectName, key: bytes, into: memoryview) -> tuple[Result, int, Header | None]:
        # Not kept from read to read: reads run in several threads.
        header = bytearray(HEADER_SIZE)
        status = self._backend.read(name, header, into)
        if status is ReadStatus.MISSING:
            return Result.MISS, 0, None
        try:
            if status is ReadStatus.WRONG_LENGTH:
                raise Corrupt(CorruptReason.LENGTH)
            return Result.OK, len(into), check(header, self._identity(key), into)
        except Corrupt as corrupt:
            logger.warning("storage object %s is corrupt (%s) and will be deleted", name.path, corrupt.reason)
            self._gate.observer.on_corrupt(self._half, corrupt.reason)
            return Result.CORRUPT, 0, None

    def _put(
        self, name: ObjectName, key: bytes, payload: memoryview, successors: tuple[int, ...]
    ) -> tuple[Result, int, None]:
        self._backend.write(name, encode_header(self._identity(key), successors, payload), payload)
        return Result.OK, len(payload), None

    def _delete(self, name: ObjectName) -> tuple[Result, int, None]:
        self._backend.delete(name)
        return Result.OK, 0, None
