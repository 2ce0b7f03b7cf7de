"""Objects as files under one directory: a local disk or a volume that several pods mount for writing at once.

    <root>/<path of the object or note, see base.py>     whole objects, never changed after their rename
    <root>/v2/tmp/w-<random>                             objects being written

A writer fills a file of its own in `tmp` and renames it: readers see nothing or everything, two writers of one key
replace equal content by equal content, and a killed writer leaves a file that no reader looks at. Those lie in one
folder of their own, not beside the objects, because whoever opens the volume clears the old ones and must not walk
millions of pages for it.

Nothing is synced to disk: this is a cache, and what a power cut tears fails its checksum later.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from speccache_runtime.cache.storage.base import (
    LAYOUT,
    NOTE_BYTES,
    BackendError,
    Note,
    NoteName,
    ObjectName,
    Read,
    StoredObject,
    fingerprint_path,
)
from speccache_runtime.cache.storage.codec import Bytes
from speccache_runtime.cache.storage.file_io import drain, fill, remove
from speccache_runtime.cache.storage.outcome import Outcome

logger = logging.getLogger(__name__)

LEFTOVER_AGE_S = 3600.0
"""Seconds without a change after which an unfinished file counts as a dead writer's. No live write takes so long."""

# NOFOLLOW: a link planted on a shared volume must not make us read elsewhere. NONBLOCK: nor a pipe make us wait.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_NOTE_ID = re.compile(r"[0-9a-f]{1,64}")
_UNFINISHED = re.compile(r"w-[0-9a-f]{32}")
_PROBE_BYTES = 8192

_REMEDIES = {
    errno.ENOENT: "does not exist: mount the volume there or create the directory",
    errno.ENOTDIR: "is not a directory: name the directory where the volume is mounted",
    errno.EROFS: "is read-only: mount the volume for writing",
    errno.ENOSPC: "is full: free space on the volume or enlarge it",
    errno.EDQUOT: "is full (quota): free space on the volume or raise the quota",
}

_WHOLE_VOLUME = frozenset({errno.EROFS, errno.ENOSPC, errno.EDQUOT})
"""What no object has by itself."""


class FileBackend:
    """A `Backend` on a directory. Holds no open files and no state, so every method is thread-safe."""

    def __init__(self, root: Path, leftover_age_s: float = LEFTOVER_AGE_S) -> None:
        """`root` must exist: making it here would hide a volume that is not mounted. Touches nothing yet."""
        self._root = os.fspath(root)
        self._tmp = f"{self._root}/{LAYOUT}/tmp"
        self._leftover_age_s = leftover_age_s
        self._clock_offset = time.time() - time.monotonic()

    def probe(self) -> None:
        """See `Backend.probe`. Makes `<root>/v2/tmp` and removes files there that dead writers have left."""
        try:
            if not stat.S_ISDIR(os.stat(self._root).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self._root)
            os.listdir(self._root)
            self._make_directories((LAYOUT, "tmp"))
            # Before anything is written: what dead writers have left may be what fills the volume.
            os.utime(self._tmp)
            now = os.stat(self._tmp).st_mtime
            self._clock_offset = now - time.monotonic()
            self._sweep(now - self._leftover_age_s)
            self._round_trip()
        except OSError as error:
            raise self._unusable(error) from error

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        """See `Backend.exists`: one lstat per name."""
        return [self._is_file(self._path(name)) for name in names]

    def read(self, name: ObjectName, header: bytearray, payload: memoryview) -> Read:
        """See `Backend.read`. The payload goes from the file straight into the caller's memory."""
        path = self._path(name)
        try:
            descriptor = os.open(path, _READ_FLAGS)
        except FileNotFoundError:
            return Read(Outcome.MISS)
        except OSError as error:
            raise self._failed(error, "open", path) from error
        try:
            try:
                return fill(descriptor, [memoryview(header), payload])
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._failed(error, "read", path) from error

    def write(self, name: ObjectName, header: bytes, payload: Bytes) -> bool:
        """See `Backend.write`."""
        path = self._path(name)
        if self._is_file(path):
            return False
        self._put(name, [memoryview(header), memoryview(payload)])
        return True

    def touch(self, name: ObjectName) -> bool:
        """See `Backend.touch`: the file's time of last change, as the volume's server has it."""
        path = self._path(name)
        try:
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._failed(error, "touch", path) from error
        return True

    def delete(self, names: Sequence[ObjectName]) -> None:
        """See `Backend.delete`."""
        for name in names:
            self._unlink(self._path(name))

    def objects(self, fingerprint: str) -> Iterator[StoredObject]:
        """See `Backend.objects`. Folders are walked as they are asked for."""
        top = fingerprint_path(fingerprint)
        try:
            for path, found in _files(self._root, top):
                name = ObjectName.parse(path)
                if name is not None:
                    yield StoredObject(name, found.st_size, found.st_mtime)
        except OSError as error:
            raise self._failed(error, "list", f"{self._root}/{top}") from error

    def create_note(self, name: NoteName, body: bytes) -> bool:
        """See `Backend.create_note`: a link, which the volume's server makes for one caller only."""
        path = self._path(name)
        try:
            unfinished = self._create([memoryview(body)])
            try:
                self._in_folder(name, lambda: os.link(unfinished, path, follow_symlinks=False))
            finally:
                remove(unfinished)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._failed(error, "write", path) from error
        return True

    def write_note(self, name: NoteName, body: bytes) -> None:
        """See `Backend.write_note`."""
        self._put(name, [memoryview(body)])

    def read_note(self, name: NoteName) -> Note | None:
        """See `Backend.read_note`."""
        path = self._path(name)
        try:
            descriptor = os.open(path, _READ_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(error, "open", path) from error
        try:
            with os.fdopen(descriptor, "rb") as file:
                return Note(file.read(NOTE_BYTES), os.fstat(descriptor).st_mtime)
        except OSError as error:
            raise self._failed(error, "read", path) from error

    def list_notes(self, fingerprint: str, kind: str) -> Sequence[NoteName]:
        """See `Backend.list_notes`."""
        folder = "/".join((self._root, *NoteName(fingerprint, kind, "0").directory))
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise self._failed(error, "list", folder) from error
        return [NoteName(fingerprint, kind, name) for name in sorted(names) if _NOTE_ID.fullmatch(name)]

    def delete_note(self, name: NoteName) -> None:
        """See `Backend.delete_note`."""
        self._unlink(self._path(name))

    def now(self) -> float:
        """See `Backend.now`."""
        return time.monotonic() + self._clock_offset

    def close(self) -> None:
        """Nothing is open."""

    def _path(self, name: ObjectName | NoteName) -> str:
        return f"{self._root}/{name.path}"

    def _is_file(self, path: str) -> bool:
        try:
            return stat.S_ISREG(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._failed(error, "look for", path) from error

    def _make_directories(self, parts: tuple[str, ...]) -> None:
        """Make the folders under the root that are missing, but never the root itself."""
        path = self._root
        for part in parts:
            path = f"{path}/{part}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)

    def _create(self, buffers: list[memoryview], *, sync: bool = False) -> str:
        """Write the buffers into a new file in `tmp`, close it and return its path; leaves no file when that fails."""
        path = f"{self._tmp}/w-{secrets.token_hex(16)}"
        try:
            descriptor = os.open(path, _WRITE_FLAGS, 0o664)
        except FileNotFoundError:
            # Somebody has emptied the volume under us: a cache may be cleared at any time.
            self._make_directories((LAYOUT, "tmp"))
            descriptor = os.open(path, _WRITE_FLAGS, 0o664)
        try:
            try:
                drain(descriptor, buffers)
                if sync:
                    os.fsync(descriptor)
            finally:
                # Network file systems tell of a full disk only here, so this must come before the rename.
                os.close(descriptor)
        except BaseException:
            remove(path)
            raise
        return path

    def _put(self, name: ObjectName | NoteName, buffers: list[memoryview]) -> None:
        """Make or replace a file: whole, in one step."""
        path = self._path(name)
        try:
            unfinished = self._create(buffers)
            try:
                self._in_folder(name, lambda: os.rename(unfinished, path))
            except BaseException:
                remove(unfinished)
                raise
        except OSError as error:
            raise self._failed(error, "write", path) from error

    def _in_folder(self, name: ObjectName | NoteName, put: Callable[[], None]) -> None:
        """Put something into a folder that may not be there yet."""
        try:
            put()
        except FileNotFoundError:
            self._make_directories(name.directory)
            put()

    def _unlink(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._failed(error, "delete", path) from error

    def _round_trip(self) -> None:
        """Write, rename, list, read back and delete a file in `tmp`."""
        wrote = secrets.token_bytes(_PROBE_BYTES)
        unfinished = self._create([memoryview(wrote)], sync=True)
        renamed = f"{self._tmp}/w-{secrets.token_hex(16)}"
        try:
            os.rename(unfinished, renamed)
            if os.path.basename(renamed) not in os.listdir(self._tmp):
                raise BackendError("Lying", f"storage path {self._root} does not list a file just written: check it")
            if Path(renamed).read_bytes() != wrote:
                raise BackendError(
                    "Lying", f"storage path {self._root} returns other bytes than were written: check it"
                )
            os.unlink(renamed)
        except BaseException:
            remove(unfinished)
            remove(renamed)
            raise

    def _sweep(self, before: float) -> None:
        """Remove unfinished files last changed before that time. What cannot be removed is logged and left."""
        removed = 0
        with os.scandir(self._tmp) as entries:
            for entry in entries:
                try:
                    if not _UNFINISHED.fullmatch(entry.name) or entry.stat(follow_symlinks=False).st_mtime >= before:
                        continue
                    os.unlink(entry.path)
                    removed += 1
                except FileNotFoundError:
                    continue  # its writer has finished, or another pod sweeps too
                except OSError as error:
                    logger.warning("cannot remove what a dead writer left in storage: %s", error)
        if removed:
            logger.info("removed %d unfinished files of dead writers from %s", removed, self._tmp)

    def _failed(self, error: OSError, doing: str, path: str) -> BackendError:
        """The error of one operation: in the words of `probe` where not this object but the whole place is at fault."""
        usable = os.path.isdir(self._root) and os.access(self._root, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
        if error.errno in _WHOLE_VOLUME or not usable:
            return self._unusable(error)
        return BackendError.from_os_error(error, f"{doing} {path}")

    def _unusable(self, error: OSError) -> BackendError:
        """What is wrong with the storage path, and what to do."""
        remedy = _REMEDIES.get(error.errno or 0)
        if error.errno in (errno.EACCES, errno.EPERM):
            remedy = (
                f"may not be listed, read and written by uid {os.geteuid()} gid {os.getegid()}: grant access (fsGroup)"
            )
        path = self._root
        if error.errno == errno.ENOTDIR and error.filename and os.path.isdir(path):
            path = os.path.dirname(error.filename)
            remedy = "is not a directory: remove the file there"
        if remedy is None:
            return BackendError.from_os_error(error, f"use storage path {path}")
        return BackendError(errno.errorcode[error.errno or 0], f"storage path {path} {remedy}")


def _files(root: str, folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """All regular files below a folder, as (path below the root, status); links are not followed. A folder or file that
    goes meanwhile, or was never there, has none."""
    try:
        entries = os.scandir(f"{root}/{folder}")
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            path = f"{folder}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _files(root, path)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    yield path, entry.stat(follow_symlinks=False)
