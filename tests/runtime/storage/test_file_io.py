"""Files past the page cache: where buffers and file system allow it, and with the same bytes where they do not."""

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from speccache_runtime.cache.storage.file_io import BLOCK, drain, fill, go_direct
from speccache_runtime.cache.storage.outcome import Outcome

HEADER = os.urandom(BLOCK)
SHAPES = [(0, 3 * BLOCK), (1, 3 * BLOCK), (0, 3 * BLOCK - 1), (512, BLOCK), (BLOCK, BLOCK), (0, 1)]


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path if request.param == "disk" else request.getfixturevalue("mount_tmpfs")("size=1m")


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize(("start", "nbytes"), SHAPES)
def test_whole_files_come_back(folder: Path, start: int, nbytes: int) -> None:
    """In blocks of memory or not; what lies beside the page is not touched."""
    memory = memoryview(mmap.mmap(-1, 5 * BLOCK))
    memory[:] = wrote = os.urandom(len(memory))
    path = folder / "object"
    with path.open("xb", buffering=0) as file:
        drain(file.fileno(), [memoryview(HEADER), memory[start : start + nbytes]])
    assert path.read_bytes() == HEADER + wrote[start : start + nbytes]

    memory[:] = bytes(len(memory))
    header = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        found = fill(file.fileno(), [memoryview(header), memory[start : start + nbytes]])
    assert (found.outcome, header) == (Outcome.HIT, HEADER)
    assert bytes(memory) == bytes(start) + wrote[start : start + nbytes] + bytes(len(memory) - start - nbytes)


@pytest.mark.parametrize(("start", "nbytes"), SHAPES)
def test_whole_blocks_go_directly(tmp_path: Path, start: int, nbytes: int) -> None:
    memory = memoryview(mmap.mmap(-1, 5 * BLOCK))
    with (tmp_path / "object").open("xb", buffering=0) as file:
        buffers = [memoryview(HEADER), memory[start : start + nbytes]]
        assert go_direct(file.fileno(), buffers) == is_direct(file.fileno()) == (start % BLOCK == nbytes % BLOCK == 0)


def test_other_buffers_do_not(tmp_path: Path) -> None:
    """A note, a header of another length, memory that may not be written."""
    block = memoryview(mmap.mmap(-1, BLOCK))
    with (tmp_path / "object").open("xb", buffering=0) as file:
        for buffers in ([block], [block[:100], block], [block, block.toreadonly()], [block, block[:0]]):
            assert not go_direct(file.fileno(), buffers)
        assert not is_direct(file.fileno())


def test_a_file_that_has_no_such_way_goes_the_usual_one() -> None:
    """As some file systems have none: here the one of /proc."""
    memory = memoryview(mmap.mmap(-1, BLOCK))
    descriptor = os.open("/proc/self/cmdline", os.O_RDONLY)
    try:
        assert not go_direct(descriptor, [memoryview(HEADER), memory])
    finally:
        os.close(descriptor)
