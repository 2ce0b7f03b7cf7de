"""Several processes on one directory, some of them killed in the middle of a write: what is visible is whole."""

import hashlib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairStore

WRITER = Path(__file__).with_name("writer_process.py")
FINGERPRINT = "99" * 32
TARGET_SPACE, DRAFT_SPACE = b"\x11" * 32, b"\x22" * 32
TARGET_BYTES, DRAFT_BYTES, PAGES = 2 << 20, 64 << 10, 4
KEYS = [bytes([number]) * 32 for number in range(PAGES)]
WHOLE = {
    (key, half): hashlib.shake_128(key + half.encode()).digest(TARGET_BYTES if half is Half.TARGET else DRAFT_BYTES)
    for key in KEYS
    for half in Half
}


@contextmanager
def writer(root: Path, seed: int) -> Iterator[subprocess.Popen[str]]:
    """A running writer that has stored its first pair; killed with SIGKILL at the end of the block."""
    numbers = [str(number) for number in (seed, TARGET_BYTES, DRAFT_BYTES, PAGES)]
    command = [sys.executable, str(WRITER), str(root), *numbers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "writing\n", process.stderr.read()
            yield process
            assert process.poll() is None, process.stderr.read()
        finally:
            process.kill()


def opened(root: Path) -> PairStore:
    return PairStore(FileBackend(root), FINGERPRINT, TARGET_SPACE, DRAFT_SPACE, TARGET_BYTES, DRAFT_BYTES)


def read_all(store: PairStore, seen: Counter[Outcome]) -> None:
    """Read every page, compare what is present with what it must be, count the answers."""
    target, draft = bytearray(TARGET_BYTES), bytearray(DRAFT_BYTES)
    for key in KEYS:
        result = store.read_pair(key, bytes(32), memoryview(target), memoryview(draft))
        seen.update([result.target, result.draft])
        if result.target is Outcome.HIT:
            assert target == WHOLE[key, Half.TARGET]
        if result.draft is Outcome.HIT:
            assert draft == WHOLE[key, Half.DRAFT]
            assert result.successors == (1,)


def test_killed_writers_leave_nothing_that_is_not_whole(tmp_path: Path) -> None:
    """Kills at random moments while we read. The leftovers prove that some came in the middle of a write."""
    store, seen = opened(tmp_path), Counter[Outcome]()
    unfinished = tmp_path / "v2" / "tmp"
    chance = random.Random(20)
    end = time.monotonic() + 6.0
    kills = 0
    while kills < 30 and (time.monotonic() < end or not any(unfinished.iterdir())):
        with writer(tmp_path, seed=kills):
            stop = time.monotonic() + chance.uniform(0.0, 0.05)
            while time.monotonic() < stop:
                read_all(store, seen)
        kills += 1
        read_all(store, seen)
    assert seen[Outcome.HIT] > 0
    assert seen.keys() <= {Outcome.HIT, Outcome.MISS, Outcome.NOT_ASKED}

    assert any(unfinished.iterdir()), "no kill came in the middle of a write, so this test has shown nothing"
    FileBackend(tmp_path, leftover_age_s=-1.0).probe()
    assert not any(unfinished.iterdir())
    read_all(store, seen)
    assert seen.keys() <= {Outcome.HIT, Outcome.MISS, Outcome.NOT_ASKED}


def test_two_writers_and_a_reader_share_a_directory(tmp_path: Path) -> None:
    store, seen = opened(tmp_path), Counter[Outcome]()
    with writer(tmp_path, seed=1), writer(tmp_path, seed=2):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            read_all(store, seen)
            store.lookup(KEYS, bytes(32))
    assert seen[Outcome.HIT] > 10
    assert seen.keys() <= {Outcome.HIT, Outcome.MISS, Outcome.NOT_ASKED}


def test_the_tier_imports_no_torch() -> None:
    """Storage runs in threads beside the engine and in tools without one; it must not cost an import of torch."""
    names = ["base", "breaker", "codec", "file", "gate", "halves", "observer", "outcome", "registry", "store"]
    imports = ", ".join(f"speccache_runtime.cache.storage.{name}" for name in names)
    program = f"import sys, {imports}; assert not sys.modules.keys() & {{'torch', 'numpy', 'boto3'}}"
    subprocess.run([sys.executable, "-c", program], check=True)
