"""What only a directory's backend must do: where files lie, and what happens to things that are no objects."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from speccache_runtime.cache.storage.base import BackendError, ObjectName
from speccache_runtime.cache.storage.codec import HEADER_SIZE, Half
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.cache.storage.file_io import fill
from speccache_runtime.cache.storage.outcome import Outcome

NAME = ObjectName("99" * 32, Half.TARGET, "ab" * 32, "cd" * 32, "17" * 8)
HEADER = bytes(range(256)) * 16
PAYLOAD = os.urandom(10_000)


@pytest.fixture
def backend(tmp_path: Path) -> FileBackend:
    made = FileBackend(tmp_path)
    made.probe()
    return made


def read(backend: FileBackend, name: ObjectName, nbytes: int = len(PAYLOAD)) -> tuple[Outcome, bytes, bytes]:
    header, payload = bytearray(HEADER_SIZE), bytearray(nbytes)
    found = backend.read(name, header, memoryview(payload))
    return found.outcome, bytes(header), bytes(payload)


def unfinished(root: Path) -> list[Path]:
    return list((root / "v2" / "tmp").iterdir())


def test_an_object_comes_back_from_where_the_layout_says(backend: FileBackend, tmp_path: Path) -> None:
    backend.write(NAME, HEADER, PAYLOAD)
    assert (tmp_path / f"v2/{'99' * 32}/t/{'ab' * 32}/cd/{'cd' * 32}-{'17' * 8}").read_bytes() == HEADER + PAYLOAD
    assert read(backend, NAME) == (Outcome.HIT, HEADER, PAYLOAD)
    assert unfinished(tmp_path) == []


def test_a_file_that_ends_before_its_size_is_no_endless_read() -> None:
    """As when it is cut between the look at its size and the read. A sysfs file claims a page and has a few bytes."""
    descriptor = os.open("/sys/devices/system/cpu/online", os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        assert fill(descriptor, [memoryview(bytearray(size))]).outcome is Outcome.CORRUPT
    finally:
        os.close(descriptor)


def test_a_link_is_not_followed(backend: FileBackend, tmp_path: Path) -> None:
    backend.write(NAME, HEADER, PAYLOAD)
    os.rename(tmp_path / NAME.path, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / NAME.path)
    assert backend.exists([NAME]) == [False]
    with pytest.raises(BackendError, match="ELOOP"):
        read(backend, NAME)
    backend.write(NAME, HEADER, PAYLOAD)
    assert read(backend, NAME) == (Outcome.HIT, HEADER, PAYLOAD)


def test_a_pipe_does_not_make_a_reader_wait(backend: FileBackend, tmp_path: Path) -> None:
    backend.write(NAME, HEADER, PAYLOAD)
    backend.delete([NAME])
    os.mkfifo(tmp_path / NAME.path)
    assert backend.exists([NAME]) == [False]
    assert read(backend, NAME)[0] is Outcome.CORRUPT


def test_a_directory_in_an_objects_place(backend: FileBackend, tmp_path: Path) -> None:
    (tmp_path / NAME.path).mkdir(parents=True)
    assert backend.exists([NAME]) == [False]
    assert read(backend, NAME)[0] is Outcome.CORRUPT
    with pytest.raises(BackendError) as caught:
        backend.write(NAME, HEADER, PAYLOAD)
    assert caught.value.code in ("EISDIR", "EEXIST")
    assert unfinished(tmp_path) == []


def test_a_root_that_vanished_is_an_error_and_not_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "volume"
    root.mkdir()
    backend = FileBackend(root)
    backend.probe()
    os.rename(root, tmp_path / "gone")
    with pytest.raises(BackendError) as caught:
        backend.write(NAME, HEADER, PAYLOAD)
    assert caught.value.code == "ENOENT"
    assert not root.exists()


def test_racing_writers_leave_no_unfinished_files(backend: FileBackend, tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        wrote = list(pool.map(lambda _: backend.write(NAME, HEADER, PAYLOAD), range(60)))
    assert any(wrote)
    assert read(backend, NAME) == (Outcome.HIT, HEADER, PAYLOAD)
    assert unfinished(tmp_path) == []
