"""Whole files from and to the caller's memory, past the system's page cache where that can be.

A page that was read lies in the host tier then, so another copy of it in the page cache serves nobody: making it costs
more than the disk's own time, and it counts as the pod's memory. Direct input and output needs a file system that has
it, and memory and lengths that are multiples of a block; everything else goes the usual way.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import threading

from speccache_runtime.cache.storage.base import Read
from speccache_runtime.cache.storage.outcome import Outcome

BLOCK = 4096
"""No disk and no file system asks for more alignment than this."""

_OWN = threading.local()
"""`block` is this thread's aligned memory for a header, since the caller's lies anywhere."""


def fill(descriptor: int, buffers: list[memoryview]) -> Read:
    """Read a whole file into the buffers."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != sum(map(len, buffers)):
        return Read(Outcome.CORRUPT)
    header = buffers[0]
    direct = go_direct(descriptor, buffers)
    rest = [_block(), *buffers[1:]] if direct else buffers
    offset = 0
    while rest:
        count = os.preadv(descriptor, rest, offset)
        if count == 0:
            return Read(Outcome.CORRUPT)  # cut while we read
        offset += count
        rest = _rest(rest, count)
    if direct:
        header[:] = _block()
    return Read(Outcome.HIT, status.st_mtime)


def drain(descriptor: int, buffers: list[memoryview]) -> None:
    """Write all of the buffers; a short write (a disk that fills up, or more than the kernel takes at once) goes on."""
    if go_direct(descriptor, buffers):
        _block()[:] = buffers[0]
        buffers = [_block(), *buffers[1:]]
    while buffers:
        buffers = _rest(buffers, os.writev(descriptor, buffers))


def go_direct(descriptor: int, buffers: list[memoryview]) -> bool:
    """Make an open file's input and output direct, if buffers and file system allow it; else leave it as it is."""
    if len(buffers) != 2 or len(buffers[0]) != BLOCK or not _aligned(buffers[1]):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        return False
    return True


def remove(path: str) -> None:
    """Remove a file of ours after a failure, which is what shall be reported, not this."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _aligned(buffer: memoryview) -> bool:
    """Of read-only memory, which no page is, ctypes does not tell where it lies."""
    if buffer.readonly or len(buffer) == 0 or len(buffer) % BLOCK:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % BLOCK == 0


def _block() -> memoryview:
    block: memoryview | None = getattr(_OWN, "block", None)
    if block is None:
        block = _OWN.block = memoryview(mmap.mmap(-1, BLOCK))
    return block


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []
