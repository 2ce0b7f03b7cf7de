"""Tests of the storage tier (L3): objects, backends, pairs.

In: bytes on real directories, small real file systems and a real S3 server, real killed processes, and test backends
that lie or keep all in memory. Out: who asks for which page when (cache/), slow storage (deadlines belong to the
caller). Tests that mount something need root; elsewhere they are skipped and say so.
"""

import contextlib
import errno
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from speccache_runtime.cache.storage.breaker import BreakerState
from speccache_runtime.cache.storage.codec import CorruptReason, Half
from speccache_runtime.cache.storage.observer import Operation
from speccache_runtime.cache.storage.outcome import Outcome

NOBODY = 65532


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A StorageObserver that counts what it is told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.operations: Counter[tuple[Operation, Half, Outcome]] = Counter()
        self.nbytes: Counter[tuple[Operation, Half]] = Counter()
        self.errors: Counter[tuple[Operation, Half, str]] = Counter()
        self.corrupt: Counter[tuple[Half, CorruptReason]] = Counter()
        self.breaker: list[tuple[Operation, BreakerState]] = []

    def on_operation(self, operation: Operation, half: Half, outcome: Outcome, seconds: float, nbytes: int) -> None:
        with self._lock:
            assert seconds >= 0
            assert nbytes == 0 or outcome in (Outcome.HIT, Outcome.WRITTEN)
            self.operations[operation, half, outcome] += 1
            self.nbytes[operation, half] += nbytes

    def on_error(self, operation: Operation, half: Half, code: str) -> None:
        with self._lock:
            self.errors[operation, half, code] += 1

    def on_corrupt(self, half: Half, reason: CorruptReason) -> None:
        with self._lock:
            self.corrupt[half, reason] += 1

    def on_breaker(self, direction: Operation, state: BreakerState) -> None:
        with self._lock:
            self.breaker.append((direction, state))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def mount_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with the given options and return its path; unmounted afterwards."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"volume{len(mounted)}"
        path.mkdir()
        _system("mount", "-t", "tmpfs", "-o", options, "speccache-test", str(path))
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        _system("umount", str(path))


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """A volume that never answers: a FUSE file system whose server does not read its requests."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse to mount a volume that hangs")
    path = tmp_path / "hung"
    path.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
        _system("mount", "-i", "-t", "fuse", "-o", options, "speccache-test", str(path), keep=server)
        try:
            yield path
        finally:
            _system("umount", "--lazy", str(path))
    finally:
        os.close(server)  # ends whoever still waits


@pytest.fixture
def remount() -> Callable[[Path, str], None]:
    """Change the options of a file system that `mount_tmpfs` made."""
    return lambda path, options: _system("mount", "-o", f"remount,{options}", str(path))


@pytest.fixture
def fill_up() -> Callable[[Path], Path]:
    """Write a file that takes all the space there is; remove the returned path to free it."""

    def fill(root: Path) -> Path:
        path = root / "filler"
        with path.open("wb", buffering=0) as filler:
            full = False
            while not full:
                try:
                    filler.write(bytes(4096))
                except OSError as error:
                    full = error.errno == errno.ENOSPC
                    if not full:
                        raise
        return path

    return fill


@pytest.fixture
def as_nobody() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Run a block without root's power to ignore permissions."""
    if os.geteuid() != 0:
        return contextlib.nullcontext

    @contextlib.contextmanager
    def drop() -> Iterator[None]:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)

    return drop


def _system(*command: str, keep: int | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=[] if keep is None else [keep])
    assert done.returncode == 0, f"{command}: {done.stderr}"
