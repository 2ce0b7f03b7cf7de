"""What every backend must do, tried on each kind of store: see `places.py`, also for how to try another S3 server."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speccache_runtime.cache.storage.base import NOTE_BYTES, Backend, Note, NoteName, ObjectName, Read
from speccache_runtime.cache.storage.codec import HEADER_SIZE, Half
from speccache_runtime.cache.storage.outcome import Outcome

from .places import PLACES, Place

FINGERPRINT = "0f" * 32
NAME = ObjectName(FINGERPRINT, Half.TARGET, "ab" * 32, "cd" * 32, "5e" * 8)
OTHER = ObjectName(FINGERPRINT, Half.TARGET, "ab" * 32, "ce" * 32, "5e" * 8)
LEASE = NoteName(FINGERPRINT, "lease", "0a")
HEADER = bytes(range(256)) * 16
PAYLOAD = os.urandom(10_000)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return PLACES[request.param](request)


@pytest.fixture
def open_backend(place: Place) -> Iterator[Callable[[], Backend]]:
    opened: list[Backend] = []

    def make() -> Backend:
        backend = place.open()
        opened.append(backend)
        backend.probe()
        return backend

    yield make
    for backend in opened:
        backend.close()


@pytest.fixture
def backend(open_backend: Callable[[], Backend]) -> Backend:
    return open_backend()


def read(backend: Backend, name: ObjectName, nbytes: int = len(PAYLOAD)) -> tuple[Outcome, bytes, bytes]:
    header, payload = bytearray(HEADER_SIZE), bytearray(nbytes)
    found = backend.read(name, header, memoryview(payload))
    assert (found.used_at > 0) == (found.outcome is Outcome.HIT)
    return found.outcome, bytes(header), bytes(payload)


def used_at(backend: Backend, name: ObjectName) -> float:
    return backend.read(name, bytearray(HEADER_SIZE), memoryview(bytearray(len(PAYLOAD)))).used_at


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.02)


def test_a_probe_leaves_nothing_behind(backend: Backend, place: Place) -> None:
    backend.probe()
    assert place.paths() == []


def test_an_object_comes_back_from_where_its_name_says(backend: Backend, place: Place) -> None:
    assert backend.write(NAME, HEADER, PAYLOAD)
    assert read(backend, NAME) == (Outcome.HIT, HEADER, PAYLOAD)
    assert place.paths() == [NAME.path]
    assert place.get(NAME.path) == HEADER + PAYLOAD


def test_bytes_are_taken_from_and_put_into_the_callers_memory(backend: Backend) -> None:
    """Views into a pool, as the pages are: nothing beside the page is read or written."""
    pool = bytearray(b"x" * 40_000)
    pool[5000:15_000] = PAYLOAD
    assert backend.write(NAME, HEADER, memoryview(pool)[5000:15_000])
    assert backend.read(NAME, bytearray(HEADER_SIZE), memoryview(pool)[20_000:30_000]).outcome is Outcome.HIT
    assert pool[20_000:30_000] == PAYLOAD
    assert set(pool[:5000] + pool[15_000:20_000] + pool[30_000:]) == {ord("x")}


def test_names_that_differ_in_anything_do_not_meet(backend: Backend) -> None:
    names = [
        ObjectName(fingerprint * 32, half, space * 32, key * 32, parent * 8)
        for fingerprint in ("0f", "0e")
        for half in Half
        for space in ("ab", "ac")
        for key in ("cd", "ce")
        for parent in ("00", "fe")
    ]
    for number, name in enumerate(names):
        assert backend.write(name, HEADER, bytes([number]) * 100)
    for number, name in enumerate(names):
        assert read(backend, name, 100) == (Outcome.HIT, HEADER, bytes([number]) * 100)


def test_exists_and_delete(backend: Backend) -> None:
    backend.write(NAME, HEADER, PAYLOAD)
    assert backend.exists([OTHER, NAME, OTHER]) == [False, True, False]
    assert backend.exists([NAME]) == [True]
    assert backend.exists([NAME] * 16) == [True] * 16
    assert backend.exists([]) == []
    backend.delete([OTHER, NAME])
    backend.delete([NAME])
    backend.delete([])
    assert backend.exists([NAME, OTHER]) == [False, False]
    assert backend.exists([NAME]) == [False]
    assert read(backend, NAME)[0] is Outcome.MISS


def test_many_are_deleted_in_one_call(backend: Backend, place: Place) -> None:
    names = [ObjectName(FINGERPRINT, Half.DRAFT, "ab" * 32, f"{number:064x}", "5e" * 8) for number in range(2100)]
    kept = [names[0], names[999], names[1000], names[2099]]
    for name in (*kept, OTHER):
        backend.write(name, HEADER, b"p")
    backend.delete(names)
    assert place.paths() == [OTHER.path]


def test_what_is_there_is_left_alone(backend: Backend, open_backend: Callable[[], Backend]) -> None:
    """Also for a writer who has never asked whether it is there."""
    assert backend.write(NAME, HEADER, PAYLOAD)
    assert not backend.write(NAME, HEADER, b"y" * len(PAYLOAD))
    assert not open_backend().write(NAME, HEADER, b"z" * len(PAYLOAD))
    assert read(backend, NAME) == (Outcome.HIT, HEADER, PAYLOAD)


def test_another_pod_sees_what_was_written(backend: Backend, open_backend: Callable[[], Backend]) -> None:
    other = open_backend()
    backend.write(NAME, HEADER, PAYLOAD)
    assert other.exists([NAME]) == [True]
    assert read(other, NAME) == (Outcome.HIT, HEADER, PAYLOAD)
    other.delete([NAME])
    assert read(backend, NAME)[0] is Outcome.MISS


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, HEADER_SIZE + len(PAYLOAD) + 5000))
def test_any_other_length_is_told(backend: Backend, place: Place, length: int) -> None:
    place.put(NAME.path, (HEADER + PAYLOAD + bytes(5000))[:length])
    expected = Outcome.HIT if length == HEADER_SIZE + len(PAYLOAD) else Outcome.CORRUPT
    assert read(backend, NAME)[0] is expected
    assert backend.exists([NAME]) == [True]


def test_a_touched_object_is_as_new_and_as_it_was(backend: Backend, place: Place) -> None:
    """After a while: not every store's dates are finer than a second."""
    backend.write(NAME, HEADER, PAYLOAD)
    written = used_at(backend, NAME)
    assert abs(written - backend.now()) < 3.0
    wait_until(lambda: backend.now() > written + 4.0)
    assert used_at(backend, NAME) == written  # reading is no touch
    assert backend.touch(NAME)
    assert written + 2.0 < used_at(backend, NAME) <= backend.now() + 2.0
    assert next(backend.objects(FINGERPRINT)).used_at == used_at(backend, NAME)
    assert read(backend, NAME) == (Outcome.HIT, HEADER, PAYLOAD)
    assert place.paths() == [NAME.path]


def test_what_is_missing_cannot_be_touched(backend: Backend, place: Place) -> None:
    assert not backend.touch(NAME)
    assert place.paths() == []


def test_a_listing_has_sizes_and_dates_and_nothing_foreign(backend: Backend, place: Place) -> None:
    draft = ObjectName(FINGERPRINT, Half.DRAFT, "12" * 32, "cd" * 32, "5e" * 8)
    elsewhere = ObjectName("0e" * 32, Half.TARGET, "ab" * 32, "cd" * 32, "5e" * 8)
    sizes = {NAME: 10, OTHER: 2000, draft: 1, elsewhere: 5}
    for name, nbytes in sizes.items():
        backend.write(name, HEADER, bytes(nbytes))
    backend.create_note(LEASE, b"me")
    folder = NAME.path.rpartition("/")[0]
    foreign = [f"{folder}/readme.txt", f"{folder}/{'cd' * 32}", f"v1/{'ab' * 32}/t/cd/{'cd' * 32}", "notes.txt"]
    foreign += [NAME.path.replace("/cd/", "/ce/"), f"{NAME.path[:-1]}g"]
    for path in foreign:
        place.put(path, b"not ours")
    found = {entry.name: entry for entry in backend.objects(FINGERPRINT)}
    assert {name: entry.nbytes for name, entry in found.items()} == {
        name: HEADER_SIZE + sizes[name] for name in (NAME, OTHER, draft)
    }
    assert all(abs(entry.used_at - backend.now()) < 5.0 for entry in found.values())
    assert list(backend.objects("99" * 32)) == []
    assert set(foreign) <= set(place.paths())


def test_a_listing_of_more_than_one_answer_holds(backend: Backend, place: Place) -> None:
    names = {ObjectName(FINGERPRINT, Half.TARGET, "ab" * 32, f"{number:064x}", "5e" * 8) for number in range(1100)}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: place.put(name.path, b"x"), names))
    listed = [entry.name for entry in backend.objects(FINGERPRINT)]
    assert len(listed) == len(names)
    assert set(listed) == names


def test_notes(backend: Backend, open_backend: Callable[[], Backend]) -> None:
    other = open_backend()
    assert backend.read_note(LEASE) is None
    backend.delete_note(LEASE)
    assert backend.create_note(LEASE, b"mine")
    assert not other.create_note(LEASE, b"his")
    found = other.read_note(LEASE)
    assert isinstance(found, Note)
    assert found.body == b"mine"
    assert abs(found.changed_at - backend.now()) < 5.0
    longest = os.urandom(NOTE_BYTES)
    other.write_note(LEASE, longest)
    changed = backend.read_note(LEASE)
    assert changed is not None
    assert changed.body == longest
    backend.delete_note(LEASE)
    assert other.read_note(LEASE) is None
    assert other.create_note(LEASE, b"his")


def test_a_rewritten_note_is_as_new(backend: Backend) -> None:
    backend.write_note(LEASE, b"one")
    first = backend.read_note(LEASE)
    assert first is not None

    def newer() -> bool:
        backend.write_note(LEASE, b"two")
        now = backend.read_note(LEASE)
        return now is not None and now.body == b"two" and now.changed_at > first.changed_at

    wait_until(newer)


def test_notes_are_listed_by_kind_and_are_no_objects(backend: Backend, place: Place) -> None:
    names = [NoteName(FINGERPRINT, "usage", id_) for id_ in ("ff", "0", "0a")]
    for name in (*names, LEASE, NoteName("0e" * 32, "usage", "1")):
        backend.write_note(name, b"x")
    place.put("/".join((*LEASE.directory, "not-hex")), b"x")
    assert backend.list_notes(FINGERPRINT, "usage") == [names[1], names[2], names[0]]
    assert backend.list_notes(FINGERPRINT, "lease") == [LEASE]
    assert list(backend.list_notes(FINGERPRINT, "none")) == []
    assert list(backend.objects(FINGERPRINT)) == []


def test_one_of_many_makes_a_note(backend: Backend, open_backend: Callable[[], Backend]) -> None:
    backends = [backend, *(open_backend() for _ in range(3))]
    for turn in range(10):
        name = NoteName(FINGERPRINT, "lease", f"{turn:x}")
        start = threading.Barrier(8)

        def race(number: int, name: NoteName = name, start: threading.Barrier = start) -> bool:
            start.wait()
            return backends[number % 4].create_note(name, bytes([number]))

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(race, range(8)))
        assert won.count(True) == 1
        note = backend.read_note(name)
        assert note is not None
        assert note.body == bytes([won.index(True)])


def test_a_store_emptied_while_in_use_is_filled_again(backend: Backend, place: Place) -> None:
    backend.write(NAME, HEADER, PAYLOAD)
    place.clear()
    assert backend.exists([NAME]) == [False]
    assert read(backend, NAME)[0] is Outcome.MISS
    assert list(backend.objects(FINGERPRINT)) == []
    assert backend.list_notes(FINGERPRINT, "lease") in ([], ())
    assert backend.write(NAME, HEADER, PAYLOAD)
    assert backend.create_note(LEASE, b"x")
    assert read(backend, NAME) == (Outcome.HIT, HEADER, PAYLOAD)


def test_many_threads_write_read_and_delete_the_same_names(
    backend: Backend, open_backend: Callable[[], Backend], place: Place
) -> None:
    backends = [backend, open_backend()]
    names = [ObjectName(FINGERPRINT, Half.TARGET, "ab" * 32, f"{number:064x}", "5e" * 8) for number in range(4)]
    bodies = {name: bytes([number]) * 50_000 for number, name in enumerate(names)}
    # versitygw removes a folder with its last object, and may fail a put that comes at that moment; S3 has no folders.
    neighbour = ObjectName(FINGERPRINT, Half.TARGET, "ab" * 32, "00" + "ff" * 31, "5e" * 8)
    backend.write(neighbour, HEADER, PAYLOAD)
    seen: set[Outcome] = set()

    def work(number: int) -> None:
        mine = backends[number % 2]
        for turn in range(60):
            name = names[(number + turn) % len(names)]
            mine.write(name, HEADER, bodies[name])
            outcome, header, payload = read(mine, name, 50_000)
            seen.add(outcome)
            if outcome is Outcome.HIT:
                assert (header, payload) == (HEADER, bodies[name])
            if turn % 7 == 0:
                mine.delete([name])
            if turn % 11 == 0:
                mine.touch(name)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert Outcome.HIT in seen
    assert seen <= {Outcome.HIT, Outcome.MISS}
    assert set(place.paths()) <= {name.path for name in (*names, neighbour)}


def test_the_stores_clock_is_about_ours(backend: Backend) -> None:
    assert abs(backend.now() - time.time()) < 5.0
    assert isinstance(backend.read(NAME, bytearray(HEADER_SIZE), memoryview(bytearray(1))), Read)
