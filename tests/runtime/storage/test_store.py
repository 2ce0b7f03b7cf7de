"""PairStore on real directories: half a pair is a known state, damage is a counted miss, errors stay inside."""

import dataclasses
import os
import random
import resource
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from speccache_runtime.cache.storage.base import ObjectName
from speccache_runtime.cache.storage.breaker import BreakerSettings, BreakerState
from speccache_runtime.cache.storage.codec import HEADER_SIZE, CorruptReason, Half
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.cache.storage.observer import Operation
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairRead, PairStore, PairWrite, Run

FINGERPRINT = "99" * 32
ROOT = bytes(32)
TARGET_SPACE, DRAFT_SPACE = b"\x11" * 32, b"\x22" * 32
TARGET_BYTES, DRAFT_BYTES = 24_000, 3_000
KEYS = [bytes([number]) * 32 for number in range(1, 61)]
NOTHING = PairRead(Outcome.MISS, Outcome.NOT_ASKED)


def parent_of(key: bytes) -> bytes:
    """KEYS are one prompt's."""
    return bytes(32) if key == KEYS[0] else KEYS[KEYS.index(key) - 1]


def body(key: bytes, half: Half) -> bytes:
    return random.Random(key + half.encode()).randbytes(TARGET_BYTES if half is Half.TARGET else DRAFT_BYTES)


def path_of(root: Path, key: bytes, half: Half) -> Path:
    space = TARGET_SPACE if half is Half.TARGET else DRAFT_SPACE
    return root / ObjectName(FINGERPRINT, half, space.hex(), key.hex(), parent_of(key).hex()[:16]).path


@pytest.fixture
def open_store(recorder, clock) -> Callable[[Path], PairStore]:
    def opened(root: Path) -> PairStore:
        backend = FileBackend(root)
        backend.probe()
        settings = BreakerSettings(threshold=3, backoff_s=10.0, cap_s=40.0)
        return PairStore(
            backend,
            FINGERPRINT,
            TARGET_SPACE,
            DRAFT_SPACE,
            TARGET_BYTES,
            DRAFT_BYTES,
            recorder,
            clock=clock,
            breaker=settings,
        )

    return opened


@pytest.fixture
def store(open_store, tmp_path: Path) -> PairStore:
    return open_store(tmp_path)


def write(store: PairStore, key: bytes, *, draft: bool = True, successors: tuple[int, ...] = (7,)) -> PairWrite:
    return store.write_pair(
        key, parent_of(key), body(key, Half.TARGET), body(key, Half.DRAFT) if draft else None, successors
    )


def read(store: PairStore, key: bytes) -> PairRead:
    """Read a pair and compare every half that is said to be there; without the time of its last use."""
    target, draft = bytearray(TARGET_BYTES), bytearray(DRAFT_BYTES)
    result = store.read_pair(key, parent_of(key), memoryview(target), memoryview(draft))
    if result.target is Outcome.HIT:
        assert target == body(key, Half.TARGET)
    if result.draft is Outcome.HIT:
        assert draft == body(key, Half.DRAFT)
    return dataclasses.replace(result, age=0.0)


def test_a_pair_comes_back_with_its_successors(store: PairStore, recorder) -> None:
    assert write(store, KEYS[0], successors=(5, 99)) == PairWrite(Outcome.WRITTEN, Outcome.WRITTEN)
    assert read(store, KEYS[0]) == PairRead(Outcome.HIT, Outcome.HIT, (5, 99))
    assert recorder.nbytes[Operation.WRITE, Half.TARGET] == recorder.nbytes[Operation.READ, Half.TARGET] == TARGET_BYTES
    assert recorder.nbytes[Operation.WRITE, Half.DRAFT] == recorder.nbytes[Operation.READ, Half.DRAFT] == DRAFT_BYTES


def test_a_page_never_written_is_absent(store: PairStore, recorder) -> None:
    assert read(store, KEYS[0]) == NOTHING
    assert recorder.operations == {(Operation.READ, Half.TARGET, Outcome.MISS): 1}


def test_another_process_with_another_model_sees_nothing(store: PairStore, tmp_path: Path) -> None:
    write(store, KEYS[0])
    same_target = PairStore(FileBackend(tmp_path), FINGERPRINT, TARGET_SPACE, b"\x33" * 32, TARGET_BYTES, DRAFT_BYTES)
    other_target = PairStore(FileBackend(tmp_path), FINGERPRINT, b"\x33" * 32, DRAFT_SPACE, TARGET_BYTES, DRAFT_BYTES)
    assert read(same_target, KEYS[0]) == PairRead(Outcome.HIT, Outcome.MISS)
    assert read(other_target, KEYS[0]) == NOTHING
    assert other_target.lookup(KEYS, ROOT) == Run(0, 0)


def test_target_alone_then_backfilled(store: PairStore) -> None:
    assert write(store, KEYS[0], draft=False) == PairWrite(Outcome.WRITTEN, Outcome.NOT_ASKED)
    assert read(store, KEYS[0]) == PairRead(Outcome.HIT, Outcome.MISS)
    assert write(store, KEYS[0]) == PairWrite(Outcome.EXISTS, Outcome.WRITTEN)
    assert read(store, KEYS[0]) == PairRead(Outcome.HIT, Outcome.HIT, (7,))


def test_what_exists_is_left_alone(store: PairStore, recorder, tmp_path: Path) -> None:
    write(store, KEYS[0])
    before = [path_of(tmp_path, KEYS[0], half).stat().st_ino for half in Half]
    assert write(store, KEYS[0]) == PairWrite(Outcome.EXISTS, Outcome.EXISTS)
    assert [path_of(tmp_path, KEYS[0], half).stat().st_ino for half in Half] == before
    assert recorder.operations[Operation.WRITE, Half.TARGET, Outcome.EXISTS] == 1


def test_a_draft_without_its_target_is_a_miss(store: PairStore, tmp_path: Path) -> None:
    write(store, KEYS[0])
    path_of(tmp_path, KEYS[0], Half.TARGET).unlink()
    assert store.lookup(KEYS, ROOT) == Run(0, 0)
    assert read(store, KEYS[0]) == NOTHING


@pytest.mark.parametrize("stored", [0, 1, 15, 16, 17, 48, 60])
def test_lookup_is_the_run_of_targets_and_how_far_drafts_go(store: PairStore, tmp_path: Path, stored: int) -> None:
    for key in KEYS[:stored]:
        write(store, key, draft=KEYS.index(key) < 20)
    assert store.lookup(KEYS, ROOT) == Run(stored, min(stored, 20))
    assert store.lookup(KEYS[7:], KEYS[6]) == Run(max(0, stored - 7), max(0, min(stored, 20) - 7))
    assert store.lookup(KEYS[1:], ROOT) == Run(0, 0), "a page is named by its parent too"
    assert store.lookup([], ROOT) == Run(0, 0)


def test_lookup_asks_few_questions(store: PairStore, recorder) -> None:
    """A prompt of 2,000 pages: rounds of 16, not a question for each page."""
    long = [number.to_bytes(32) for number in range(2000)]
    for stored in (0, 1, 700, 2000):
        for parent, key in pairwise([ROOT, *long[:stored]]):
            store.write_pair(key, parent, bytes(TARGET_BYTES), None)
        before = recorder.operations.total()
        assert store.lookup(long, ROOT) == Run(stored, 0)
        assert recorder.operations.total() - before <= 6


def test_the_draft_is_not_read_when_not_wanted(store: PairStore, recorder) -> None:
    write(store, KEYS[0])
    found = store.read_pair(KEYS[0], ROOT, memoryview(bytearray(TARGET_BYTES)), None)
    assert (found.target, found.draft) == (Outcome.HIT, Outcome.NOT_ASKED)
    assert not any(half is Half.DRAFT for operation, half, _ in recorder.operations if operation is Operation.READ)


@pytest.mark.parametrize("half", Half)
@pytest.mark.parametrize("position", [0, 50, 2000, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 2500])
def test_a_flipped_byte_is_a_counted_miss_and_heals(
    store: PairStore, recorder, tmp_path: Path, half: Half, position: int
) -> None:
    write(store, KEYS[0])
    path = path_of(tmp_path, KEYS[0], half)
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)

    damaged = read(store, KEYS[0])
    if half is Half.TARGET:
        assert damaged == PairRead(Outcome.CORRUPT, Outcome.NOT_ASKED)
    else:
        assert damaged == PairRead(Outcome.HIT, Outcome.CORRUPT)
    assert not path.exists()
    assert recorder.operations[Operation.READ, half, Outcome.CORRUPT] == 1
    assert recorder.operations[Operation.DELETE, half, Outcome.DONE] == 1
    assert sum(recorder.corrupt.values()) == 1

    write(store, KEYS[0])
    assert read(store, KEYS[0]) == PairRead(Outcome.HIT, Outcome.HIT, (7,))


@pytest.mark.parametrize("length", [0, 100, HEADER_SIZE, HEADER_SIZE + 10, HEADER_SIZE + TARGET_BYTES + 1])
def test_a_cut_or_longer_object_is_corrupt(store: PairStore, recorder, tmp_path: Path, length: int) -> None:
    write(store, KEYS[0])
    os.truncate(path_of(tmp_path, KEYS[0], Half.TARGET), length)
    assert read(store, KEYS[0]) == PairRead(Outcome.CORRUPT, Outcome.NOT_ASKED)
    assert recorder.corrupt == {(Half.TARGET, CorruptReason.LENGTH): 1}


def test_an_object_under_another_pages_name_is_corrupt(store: PairStore, recorder, tmp_path: Path) -> None:
    write(store, KEYS[0])
    write(store, KEYS[1])
    path_of(tmp_path, KEYS[1], Half.TARGET).replace(path_of(tmp_path, KEYS[0], Half.TARGET))
    assert read(store, KEYS[0]) == PairRead(Outcome.CORRUPT, Outcome.NOT_ASKED)
    assert recorder.corrupt == {(Half.TARGET, CorruptReason.KEY): 1}


def test_a_draft_that_cannot_be_written_does_not_stop_the_target(store: PairStore, recorder, tmp_path: Path) -> None:
    (tmp_path / "v2" / FINGERPRINT).mkdir()
    (tmp_path / "v2" / FINGERPRINT / "d").symlink_to("/nonexistent/x")
    assert write(store, KEYS[0]) == PairWrite(Outcome.WRITTEN, Outcome.ERROR)
    assert store.lookup(KEYS, ROOT) == Run(1, 0)
    assert read(store, KEYS[0]) == PairRead(Outcome.HIT, Outcome.MISS)
    assert recorder.errors == {(Operation.WRITE, Half.DRAFT, "ENOENT"): 1}


def test_a_target_that_cannot_be_written_leaves_a_lone_draft(store: PairStore, recorder) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_SIZE + DRAFT_BYTES, limits[1]))
    try:
        assert write(store, KEYS[0]) == PairWrite(Outcome.ERROR, Outcome.WRITTEN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert recorder.errors == {(Operation.WRITE, Half.TARGET, "EFBIG"): 1}
    assert read(store, KEYS[0]) == NOTHING
    assert write(store, KEYS[0]) == PairWrite(Outcome.WRITTEN, Outcome.EXISTS)


def test_a_full_volume_stops_writes_but_not_reads(open_store, mount_tmpfs, fill_up, recorder, clock, caplog) -> None:
    root = mount_tmpfs("size=256k")
    store = open_store(root)
    write(store, KEYS[0])
    filler = fill_up(root)
    assert write(store, KEYS[1]) == PairWrite(Outcome.ERROR, Outcome.ERROR)
    assert write(store, KEYS[2]) == PairWrite(Outcome.DROPPED, Outcome.ERROR)
    assert write(store, KEYS[3]) == PairWrite(Outcome.DROPPED, Outcome.DROPPED)
    assert recorder.breaker == [(Operation.WRITE, BreakerState.OPEN)]
    assert caplog.messages == [
        f"storage breaker for write operations is now open: storage path {root} is full: "
        "free space on the volume or enlarge it (ENOSPC)"
    ]
    assert recorder.errors.total() == 3
    assert {code for _, _, code in recorder.errors} == {"ENOSPC"}
    assert read(store, KEYS[0]) == PairRead(Outcome.HIT, Outcome.HIT, (7,))
    assert store.lookup(KEYS, ROOT) == Run(1, 1)
    assert list((root / "v2" / "tmp").iterdir()) == []

    filler.unlink()
    assert write(store, KEYS[3]) == PairWrite(Outcome.DROPPED, Outcome.DROPPED)
    clock.now += 10.0
    assert write(store, KEYS[3]) == PairWrite(Outcome.WRITTEN, Outcome.WRITTEN)
    states = [state for _, state in recorder.breaker]
    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]
    assert read(store, KEYS[3]) == PairRead(Outcome.HIT, Outcome.HIT, (7,))


def test_a_volume_that_vanished_is_named_when_writes_stop(open_store, tmp_path: Path, caplog) -> None:
    """Pages that are gone are misses, so only writes fail."""
    root = tmp_path / "volume"
    root.mkdir()
    store = open_store(root)
    root.rename(tmp_path / "elsewhere")
    for key in KEYS[:2]:
        write(store, key)
    (message,) = caplog.messages
    assert message.startswith(f"storage breaker for write operations is now open: storage path {root} does not exist: ")
    assert message.endswith("(ENOENT)")
    assert KEYS[0].hex() not in message


def test_a_volume_that_turns_read_only(open_store, mount_tmpfs, remount, recorder) -> None:
    """Pages are still served; a corrupt one cannot be deleted, which is counted and costs a miss each time."""
    root = mount_tmpfs("size=1m")
    store = open_store(root)
    write(store, KEYS[0])
    write(store, KEYS[1])
    os.truncate(path_of(root, KEYS[1], Half.TARGET), 5)
    remount(root, "ro")
    assert read(store, KEYS[0]) == PairRead(Outcome.HIT, Outcome.HIT, (7,))
    for _ in range(5):
        assert read(store, KEYS[1]) == PairRead(Outcome.CORRUPT, Outcome.NOT_ASKED)
    assert write(store, KEYS[2]) == PairWrite(Outcome.ERROR, Outcome.ERROR)
    assert recorder.errors[Operation.DELETE, Half.TARGET, "EROFS"] == 5
    assert recorder.errors[Operation.WRITE, Half.TARGET, "EROFS"] == 1
    assert recorder.breaker == []


def test_a_volume_that_cannot_be_read_any_more(open_store, tmp_path: Path, recorder, clock, caplog) -> None:
    """Errors of reads and lookups open their breaker; then nothing is asked until the back-off is over."""
    store = open_store(tmp_path)
    write(store, KEYS[0])
    objects = tmp_path / "v2"
    hidden = objects.rename(tmp_path / "hidden")
    objects.write_text("a file in the folder's place")
    assert read(store, KEYS[0]) == PairRead(Outcome.ERROR, Outcome.NOT_ASKED)
    assert store.lookup(KEYS, ROOT) == Run(0, 0)
    assert read(store, KEYS[0]) == PairRead(Outcome.ERROR, Outcome.NOT_ASKED)
    assert {code for _, _, code in recorder.errors} == {"ENOTDIR"}
    assert "storage breaker for read operations is now open: cannot open" in caplog.text
    assert recorder.breaker[0] == (Operation.READ, BreakerState.OPEN)
    errors = recorder.errors.total()
    assert read(store, KEYS[0]) == PairRead(Outcome.DROPPED, Outcome.NOT_ASKED)
    assert store.lookup(KEYS, ROOT) == Run(0, 0)
    assert recorder.errors.total() == errors
    assert recorder.operations[Operation.READ, Half.TARGET, Outcome.DROPPED] == 1

    objects.unlink()
    hidden.rename(objects)
    clock.now += 10.0
    assert store.lookup(KEYS, ROOT) == Run(1, 1)
    assert read(store, KEYS[0]).target is Outcome.HIT


def test_misses_and_corruption_do_not_open_the_breaker(store: PairStore, recorder, tmp_path: Path) -> None:
    for key in KEYS[:20]:
        assert read(store, key).target is Outcome.MISS
        write(store, key)
        os.truncate(path_of(tmp_path, key, Half.TARGET), 1)
        assert read(store, key).target is Outcome.CORRUPT
    assert recorder.breaker == []


def test_without_a_draft(tmp_path: Path) -> None:
    backend = FileBackend(tmp_path)
    backend.probe()
    store = PairStore(backend, FINGERPRINT, TARGET_SPACE, None, TARGET_BYTES, 0)
    assert write(store, KEYS[0], draft=False) == PairWrite(Outcome.WRITTEN, Outcome.NOT_ASKED)
    assert store.lookup(KEYS, ROOT) == Run(1, 0)
    into = bytearray(TARGET_BYTES)
    found = store.read_pair(KEYS[0], ROOT, memoryview(into), None)
    assert (found.target, found.draft) == (Outcome.HIT, Outcome.NOT_ASKED)
    with pytest.raises(ValueError, match="without a draft"):
        read(store, KEYS[0])
    with pytest.raises(ValueError, match="without a draft"):
        write(store, KEYS[0])
    store.close()


def test_without_targets_which_another_rank_keeps(tmp_path: Path) -> None:
    backend = FileBackend(tmp_path)
    backend.probe()
    store = PairStore(backend, FINGERPRINT, None, DRAFT_SPACE, 0, DRAFT_BYTES)
    draft = body(KEYS[0], Half.DRAFT)
    assert store.write_pair(KEYS[0], ROOT, None, draft, (7,)) == PairWrite(Outcome.NOT_ASKED, Outcome.WRITTEN)
    assert store.lookup(KEYS, ROOT) == Run(len(KEYS), 1), "where the targets end, the other rank says"
    into = bytearray(DRAFT_BYTES)
    found = store.read_pair(KEYS[0], ROOT, None, memoryview(into))
    assert (found.target, found.draft, found.successors) == (Outcome.NOT_ASKED, Outcome.HIT, (7,))
    assert into == draft
    assert store.touch(KEYS[0], ROOT, True) is Outcome.DONE
    assert store.touch(KEYS[1], KEYS[0], True) is Outcome.MISS
    with pytest.raises(ValueError, match="without targets"):
        read(store, KEYS[0])
    with pytest.raises(ValueError, match="without targets"):
        write(store, KEYS[0])
    store.close()


def test_buffers_of_any_item_type_but_only_whole_ones(store: PairStore) -> None:
    write(store, KEYS[0])
    words = memoryview(bytearray(TARGET_BYTES)).cast("I")
    assert store.read_pair(KEYS[0], ROOT, words, None).target is Outcome.HIT
    assert words.tobytes() == body(KEYS[0], Half.TARGET)
    short, strided = memoryview(bytearray(TARGET_BYTES - 1)), memoryview(bytearray(2 * TARGET_BYTES))[::2]
    for wrong in (short, strided):
        with pytest.raises(ValueError, match="contiguous bytes"):
            store.read_pair(KEYS[0], ROOT, wrong, None)
        with pytest.raises(ValueError, match="contiguous bytes"):
            store.write_pair(KEYS[1], KEYS[0], wrong, None)
    with pytest.raises(ValueError, match="digests"):
        store.lookup([b"short"], ROOT)
    with pytest.raises(ValueError, match="successors"):
        write(store, KEYS[1], successors=(1, 2, 3, 4, 5))
    assert store.lookup(KEYS, ROOT) == Run(1, 1)


@pytest.mark.parametrize(
    ("target_space", "draft_space", "target_bytes", "draft_bytes"),
    [
        (b"short", DRAFT_SPACE, 1, 1),
        (TARGET_SPACE, b"short", 1, 1),
        (TARGET_SPACE, DRAFT_SPACE, 0, 1),
        (TARGET_SPACE, DRAFT_SPACE, 1, 0),
        (TARGET_SPACE, None, 1, 1),
        (None, DRAFT_SPACE, 1, 1),
    ],
)
def test_wrong_construction(
    target_space: bytes | None, draft_space: bytes | None, target_bytes: int, draft_bytes: int, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"draft_bytes|namespace of 32 bytes"):
        PairStore(FileBackend(tmp_path), FINGERPRINT, target_space, draft_space, target_bytes, draft_bytes)
