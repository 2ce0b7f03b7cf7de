"""Whole files from and to the caller's memory."""

from __future__ import annotations

import contextlib
import os
import stat

from speccache_runtime.cache.storage.base import Read
from speccache_runtime.cache.storage.outcome import Outcome


def fill(descriptor: int, buffers: list[memoryview]) -> Read:
    """Read a whole file into the buffers."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != sum(map(len, buffers)):
        return Read(Outcome.CORRUPT)
    offset = 0
    while buffers:
        count = os.preadv(descriptor, buffers, offset)
        if count == 0:
            return Read(Outcome.CORRUPT)  # cut while we read
        offset += count
        buffers = _rest(buffers, count)
    return Read(Outcome.HIT, status.st_mtime)


def drain(descriptor: int, buffers: list[memoryview]) -> None:
    """Write all of the buffers; a short write (a disk that fills up, or more than the kernel takes at once) goes on."""
    while buffers:
        buffers = _rest(buffers, os.writev(descriptor, buffers))


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def remove(path: str) -> None:
    """Remove a file of ours after a failure, which is what shall be reported, not this."""
    with contextlib.suppress(OSError):
        os.unlink(path)
