"""A real directory whose operations go wrong when a test says so, and that knows by whose hand something is gone."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from speccache_runtime.cache.storage.base import BackendError, Note, NoteName, ObjectName, Read, StoredObject
from speccache_runtime.cache.storage.codec import Bytes
from speccache_runtime.cache.storage.file import FileBackend

WRITE_FAULTS = ("torn", "partial", "late")


class Killed(BaseException):
    """The process has ended here."""


class FaultyVolume:
    """A `Backend` for several caches, whose calls a test runs one after the other.

    `broken` operations fail with `error`. `write_fault` befalls the next write: "torn" is reported as done and leaves
    half an object, as a power cut does; "partial" finds the disk full in the middle; "late" does its work and reports
    an error all the same. `meanwhile` is done once, in front of the next operation of its name.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = FileBackend(root)
        self.broken: set[str] = set()
        self.error = BackendError("EIO", "broken on purpose")
        self.write_fault: str | None = None
        self.meanwhile: tuple[str, Callable[[], None]] | None = None
        self.writer = 0
        """Who makes the calls just now."""
        self.untold: list[set[str]] = [set(), set()]
        """Keys of pages that each writer has written; a test forgets them."""
        self.gone: set[str] = set()
        """Paths of objects that were stored once and were deleted or damaged."""
        self.planted = 0
        """Bytes that no writer has written."""
        self.changed = False
        self._paths: list[Path] | None = None

    def _pass(self, operation: str) -> None:
        if self.meanwhile is not None and self.meanwhile[0] == operation:
            action, self.meanwhile = self.meanwhile[1], None
            action()
        if operation.partition(" ")[0] in self.broken:
            raise self.error

    # ---- what a backend does

    def probe(self) -> None:
        self.files.probe()

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self._pass("exists")
        return self.files.exists(names)

    def read(self, name: ObjectName, header: bytearray, payload: memoryview) -> Read:
        self._pass(f"read {name.half}")
        return self.files.read(name, header, payload)

    def write(self, name: ObjectName, header: bytes, payload: Bytes) -> bool:
        self._pass(f"write {name.half}")
        fault, self.write_fault = self.write_fault, None
        if fault == "partial":
            (self.root / "v2" / "tmp" / f"w-{os.urandom(16).hex()}").write_bytes(header)
            raise BackendError(errno.errorcode[errno.ENOSPC], "no room for the rest")
        if fault == "torn" and not self.files.exists([name])[0]:
            self.files.write(name, header, bytes(payload)[: len(payload) // 2])
            self._wrote(name)
            self.gone.add(name.path)
            return True
        if written := self.files.write(name, header, payload):
            self._wrote(name)
        if fault == "late":
            raise BackendError("Timeout", "no answer")
        return written

    def _wrote(self, name: ObjectName) -> None:
        self.gone.discard(name.path)
        self.untold[self.writer].add(name.key)
        self.changed = True
        self._paths = None

    def touch(self, name: ObjectName) -> bool:
        self._pass("touch")
        return self.files.touch(name)

    def delete(self, names: Sequence[ObjectName]) -> None:
        self._pass("delete")
        self.gone.update(name.path for name in names)
        self._paths = None
        self.files.delete(names)

    def objects(self, fingerprint: str) -> Iterator[StoredObject]:
        self._pass("objects")
        return self.files.objects(fingerprint)

    def create_note(self, name: NoteName, body: bytes) -> bool:
        self._pass("write note")
        return self.files.create_note(name, body)

    def write_note(self, name: NoteName, body: bytes) -> None:
        self._pass("write note")
        self.files.write_note(name, body)

    def read_note(self, name: NoteName) -> Note | None:
        self._pass("read note")
        return self.files.read_note(name)

    def list_notes(self, fingerprint: str, kind: str) -> Sequence[NoteName]:
        self._pass("read note")
        return self.files.list_notes(fingerprint, kind)

    def delete_note(self, name: NoteName) -> None:
        self._pass("delete")
        self.files.delete_note(name)

    def now(self) -> float:
        return self.files.now()

    def close(self) -> None:
        """Other caches go on."""

    # ---- behind its back

    def paths(self) -> list[Path]:
        """Of all objects."""
        if self._paths is None:
            folders = [folder for half in "td" for folder in self.root.glob(f"v2/*/{half}")]
            self._paths = sorted(path for folder in folders for path in folder.rglob("*-*"))
        return self._paths

    def spoilt(self, path: Path) -> None:
        """The object of that path will not be what was written from now on."""
        self.gone.add(str(path.relative_to(self.root)))
        self._paths = None

    def age(self, seconds: float) -> None:
        """Everything was changed so much longer ago."""
        for path in (self.root / "v2").rglob("*"):
            if path.is_file():
                changed = path.stat().st_mtime - seconds
                os.utime(path, (changed, changed))
