"""The storage tier that is not there: every page is a miss, every write is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

from speccache_runtime.cache.storage.base import ObjectName, ReadStatus
from speccache_runtime.cache.storage.codec import Bytes


class NullBackend:
    """A `Backend` that keeps nothing and never fails."""

    def probe(self) -> None:
        """Nothing to check."""

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        """Nothing exists."""
        return [False] * len(names)

    def read(self, name: ObjectName, header: bytearray, payload: memoryview) -> ReadStatus:
        """Always MISSING; the buffers are not touched."""
        return ReadStatus.MISSING

    def write(self, name: ObjectName, header: bytes, payload: Bytes) -> None:
        """Forget the object."""

    def delete(self, name: ObjectName) -> None:
        """Nothing to remove."""

    def close(self) -> None:
        """Nothing is open."""
