"""FileBackend on real directories: what is kept, where, and what happens to things that are no objects."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def test_halves_and_namespaces_do_not_meet(backend: FileBackend) -> None:
    names = [
        ObjectName(fingerprint * 32, half, space * 32, "cd" * 32, parent)
        for fingerprint in ("98", "99")
        for space in ("ab", "ac")
        for half in Half
        for parent in ("00" * 8, "17" * 8)
    ]
    for number, name in enumerate(names):
        backend.write(name, HEADER, bytes([number]) * 100)
    for number, name in enumerate(names):
        assert read(backend, name, 100) == (Outcome.HIT, HEADER, bytes([number]) * 100)


def test_exists_and_delete(backend: FileBackend) -> None:
    other = ObjectName("99" * 32, Half.TARGET, "ab" * 32, "ce" * 32, "17" * 8)
    backend.write(NAME, HEADER, PAYLOAD)
    assert backend.exists([other, NAME, other]) == [False, True, False]
    assert backend.exists([]) == []
    backend.delete([NAME])
    backend.delete([NAME])
    assert backend.exists([NAME]) == [False]
    assert read(backend, NAME)[0] is Outcome.MISS


def test_what_is_there_is_left_alone(backend: FileBackend) -> None:
    assert backend.write(NAME, HEADER, PAYLOAD)
    assert not backend.write(NAME, HEADER, b"x" * 10)
    assert read(backend, NAME) == (Outcome.HIT, HEADER, PAYLOAD)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, HEADER_SIZE + len(PAYLOAD) + 5000))
def test_any_other_length_is_told(backend: FileBackend, tmp_path: Path, length: int) -> None:
    backend.delete([NAME])
    backend.write(NAME, HEADER, PAYLOAD)
    os.truncate(tmp_path / NAME.path, length)
    expected = Outcome.HIT if length == HEADER_SIZE + len(PAYLOAD) else Outcome.CORRUPT
    assert read(backend, NAME)[0] is expected


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


def test_a_volume_emptied_while_in_use_is_filled_again(backend: FileBackend, tmp_path: Path) -> None:
    backend.write(NAME, HEADER, PAYLOAD)
    os.rename(tmp_path / "v2", tmp_path / "old")
    assert backend.exists([NAME]) == [False]
    assert read(backend, NAME)[0] is Outcome.MISS
    backend.write(NAME, HEADER, PAYLOAD)
    assert read(backend, NAME) == (Outcome.HIT, HEADER, PAYLOAD)


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


def test_many_threads_write_read_and_delete_the_same_names(backend: FileBackend, tmp_path: Path) -> None:
    names = [ObjectName("99" * 32, Half.TARGET, "ab" * 32, f"{number:064x}", "0" * 16) for number in range(4)]
    bodies = {name: bytes([number]) * 50_000 for number, name in enumerate(names)}
    wrong: list[object] = []
    found = threading.Event()

    def work(number: int) -> None:
        for turn in range(150):
            name = names[(number + turn) % len(names)]
            backend.write(name, HEADER, bodies[name])
            status, header, payload = read(backend, name, 50_000)
            if status is Outcome.HIT:
                found.set()
                if (header, payload) != (HEADER, bodies[name]):
                    wrong.append(name)
            elif status is not Outcome.MISS:
                wrong.append(status)
            if turn % 7 == 0:
                backend.delete([name])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert found.is_set()
    assert unfinished(tmp_path) == []


@pytest.mark.parametrize(
    ("namespace", "key"),
    [("../" + "a" * 61, "a" * 64), ("a" * 64, "A" * 64), ("a" * 63, "a" * 64), ("a" * 64, "a" * 63 + "\n"), ("", "")],
)
def test_only_digests_become_names(namespace: str, key: str) -> None:
    with pytest.raises(ValueError, match="digests"):
        ObjectName("99" * 32, Half.TARGET, namespace, key, "0" * 16)
    with pytest.raises(ValueError, match="digests"):
        ObjectName(namespace, Half.TARGET, "99" * 32, key, 0)
