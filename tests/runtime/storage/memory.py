"""A backend in memory: the shortest thing that is one, and the measure of what the others may do."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence

from speccache_runtime.cache.storage.base import Note, NoteName, ObjectName, Read, StoredObject, fingerprint_path
from speccache_runtime.cache.storage.codec import Bytes
from speccache_runtime.cache.storage.outcome import Outcome


class Shelf:
    """What several backends share: content and time of last change by path. `ahead` moves its clock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: dict[str, tuple[bytes, float]] = {}
        self.ahead = 0.0

    def now(self) -> float:
        return time.time() + self.ahead


class MemoryBackend:
    """See `Backend` for what the methods promise."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def probe(self) -> None:
        pass

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        with self._shelf.lock:
            return [name.path in self._shelf.kept for name in names]

    def read(self, name: ObjectName, header: bytearray, payload: memoryview) -> Read:
        with self._shelf.lock:
            content, used_at = self._shelf.kept.get(name.path, (None, 0.0))
        if content is None:
            return Read(Outcome.MISS)
        if len(content) != len(header) + len(payload):
            return Read(Outcome.CORRUPT)
        header[:] = content[: len(header)]
        payload[:] = content[len(header) :]
        return Read(Outcome.HIT, used_at)

    def write(self, name: ObjectName, header: bytes, payload: Bytes) -> bool:
        return self._put(name.path, header + bytes(payload), replace=False)

    def touch(self, name: ObjectName) -> bool:
        with self._shelf.lock:
            found = self._shelf.kept.get(name.path)
            if found is not None:
                self._shelf.kept[name.path] = (found[0], self._shelf.now())
            return found is not None

    def delete(self, names: Sequence[ObjectName]) -> None:
        with self._shelf.lock:
            for name in names:
                self._shelf.kept.pop(name.path, None)

    def objects(self, fingerprint: str) -> Iterator[StoredObject]:
        with self._shelf.lock:
            kept = list(self._shelf.kept.items())
        for path, (content, used_at) in kept:
            name = ObjectName.parse(path)
            if name is not None and path.startswith(f"{fingerprint_path(fingerprint)}/"):
                yield StoredObject(name, len(content), used_at)

    def create_note(self, name: NoteName, body: bytes) -> bool:
        return self._put(name.path, body, replace=False)

    def write_note(self, name: NoteName, body: bytes) -> None:
        self._put(name.path, body, replace=True)

    def read_note(self, name: NoteName) -> Note | None:
        with self._shelf.lock:
            found = self._shelf.kept.get(name.path)
        return None if found is None else Note(*found)

    def list_notes(self, fingerprint: str, kind: str) -> Sequence[NoteName]:
        folder = "/".join(NoteName(fingerprint, kind, "0").directory) + "/"
        with self._shelf.lock:
            ids = sorted(path.removeprefix(folder) for path in self._shelf.kept if path.startswith(folder))
        return [NoteName(fingerprint, kind, found) for found in ids if re.fullmatch("[0-9a-f]{1,64}", found)]

    def delete_note(self, name: NoteName) -> None:
        with self._shelf.lock:
            self._shelf.kept.pop(name.path, None)

    def now(self) -> float:
        return self._shelf.now()

    def close(self) -> None:
        pass

    def _put(self, path: str, content: bytes, *, replace: bool) -> bool:
        with self._shelf.lock:
            if path in self._shelf.kept and not replace:
                return False
            self._shelf.kept[path] = (content, self._shelf.now())
            return True
