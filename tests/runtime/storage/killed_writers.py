"""A program: forks writers, kills each with SIGKILL at a random moment, and reads what they have left.

Arguments: a directory, or the fields of a `BucketTarget` in JSON; how many writers to kill; a seed. Prints one line of
JSON, what was seen; ends with a traceback when something is wrong. Imports no torch, so a fork costs milliseconds.

A writer has several threads, as a pod has, and says which pages storage has taken, once it has been told so itself.
The survivor then reads every page that any writer may have begun: what it is given must be the page's own bytes, and
each page that was taken must be there, with its draft half.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from speccache_api.storage_target import BucketTarget
from speccache_runtime.cache.storage.base import Backend
from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairStore

FINGERPRINT = "99" * 32
TARGET_SPACE, DRAFT_SPACE = b"\x11" * 32, b"\x22" * 32
TARGET_BYTES, DRAFT_BYTES = 1 << 18, 1 << 15
THREADS, PAGES = 4, 64
ROOT = bytes(32)
CLEAR_EVERY = 10


def content(key: bytes, half: Half) -> bytes:
    """What a page's half holds: a function of its key."""
    start = hashlib.shake_128(key + half.encode()).digest(4096)
    return start * ((TARGET_BYTES if half is Half.TARGET else DRAFT_BYTES) // len(start))


def chain(life: int, thread: int) -> list[bytes]:
    """Keys of the prompt that a thread of a writer stores. Writers of other lives store the same ones now and then."""
    keys, key = [], ROOT
    for page in range(PAGES):
        key = hashlib.sha256(key + bytes([life % CLEAR_EVERY // 2, thread, page])).digest()
        keys.append(key)
    return keys


def open_store(backend: Backend) -> PairStore:
    return PairStore(backend, FINGERPRINT, TARGET_SPACE, DRAFT_SPACE, TARGET_BYTES, DRAFT_BYTES)


def write(store: PairStore, life: int, told: int) -> None:
    """The writer's whole life. One byte for a thread and one for a page go to `told` for what is stored."""

    def work(thread: int) -> None:
        parent = ROOT
        for page, key in enumerate(chain(life, thread)):
            result = store.write_pair(key, parent, content(key, Half.TARGET), content(key, Half.DRAFT), (page,))
            if not (result.target.stored and result.draft.stored):
                os._exit(3)
            os.write(told, bytes([thread, page]))
            parent = key

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    time.sleep(600)  # until it is killed


def killed_writer(make: Callable[[], Backend], life: int, after_s: float) -> list[tuple[int, int]]:
    """A writer that was killed so long after it had stored its first page; the pages that it said were stored."""
    reading, telling = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            write(open_store(make()), life, telling)
        finally:
            os._exit(4)
    os.close(telling)
    first = os.read(reading, 2)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"
    said = bytearray(first)
    while more := os.read(reading, 65536):
        said += more
    os.close(reading)
    return list(zip(said[::2], said[1::2], strict=True))


def survive(store: PairStore, life: int, said: list[tuple[int, int]], seen: Counter[str]) -> None:
    """Reads what the writer may have written."""
    target, draft = bytearray(TARGET_BYTES), bytearray(DRAFT_BYTES)
    for thread in range(THREADS):
        parent = ROOT
        for page, key in enumerate(chain(life, thread)):
            result = store.read_pair(key, parent, memoryview(target), memoryview(draft))
            if (thread, page) in said:
                assert (result.target, result.draft) == (Outcome.HIT, Outcome.HIT), f"a stored page is lost: {result}"
            if result.target is Outcome.HIT:
                assert target == content(key, Half.TARGET), "a target half is not its own"
                assert result.draft is Outcome.HIT, "a target half is visible before its draft half"
                assert draft == content(key, Half.DRAFT), "a draft half is not its own"
                assert result.successors == (page,)
            assert Outcome.CORRUPT not in (result.target, result.draft), "half an object is visible"
            seen[result.target] += 1
            parent = key
            if result.target is Outcome.MISS and (thread, page + 1) not in said:
                break


def main() -> None:
    place, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    make: Callable[[], Backend]
    if place.startswith("{"):
        from speccache_runtime.cache.storage.s3 import S3Backend

        make, longest = lambda: S3Backend(BucketTarget(**json.loads(place))), 0.08
    else:
        make, longest = lambda: FileBackend(Path(place)), 0.02
    backend = make()
    backend.probe()
    store, chance = open_store(backend), random.Random(seed)
    seen: Counter[str] = Counter()
    for life in range(kills):
        said = killed_writer(make, life, chance.uniform(0.0, longest))
        survive(store, life, said, seen)
        seen["reported"] += len(said)
        if life % CLEAR_EVERY == CLEAR_EVERY - 1 or life == kills - 1:
            found = [each.name for each in backend.objects(FINGERPRINT)]
            halves = Counter(name.half for name in found)
            seen["lone drafts"] += halves[Half.DRAFT] - halves[Half.TARGET]
            for start in range(0, len(found), 500):
                backend.delete(found[start : start + 500])
    sys.stdout.write(json.dumps({"kills": kills, **seen}) + "\n")
    store.close()


if __name__ == "__main__":
    main()
