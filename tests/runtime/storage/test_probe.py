"""Opening a place: every way in which it can be unusable is one line with the path and the remedy."""

import errno
import os
import resource
import stat
from pathlib import Path

import pytest

from speccache_api.storage_target import VolumeTarget
from speccache_runtime.cache.storage import registry
from speccache_runtime.cache.storage.base import BackendError, ObjectName
from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.cache.storage.file import LEFTOVER_AGE_S, FileBackend
from speccache_runtime.cache.storage.registry import open_backend
from speccache_runtime.errors import StorageError


def refusal(path: Path) -> BackendError:
    with pytest.raises(StorageError) as caught:
        FileBackend(path).probe()
    assert isinstance(caught.value, BackendError)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_usable_directory_is_left_as_it_was(tmp_path: Path) -> None:
    FileBackend(tmp_path).probe()
    FileBackend(tmp_path).probe()
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_missing(tmp_path: Path) -> None:
    error = refusal(tmp_path / "none")
    assert error.code == "ENOENT"
    assert str(error) == f"storage path {tmp_path}/none does not exist: mount the volume there or create the directory"


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        error = refusal(path)
        assert error.code == "ENOTDIR"
        assert str(error).startswith(f"storage path {path} is not a directory: name the directory")


def test_a_file_where_our_folder_belongs(tmp_path: Path) -> None:
    (tmp_path / "v2").write_text("")
    error = refusal(tmp_path)
    assert str(error) == f"storage path {tmp_path}/v2 is not a directory: remove the file there"


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    error = refusal(tmp_path / ("x" * 300))
    assert error.code == "ENAMETOOLONG"
    assert "storage path" in str(error)


def test_read_only(mount_tmpfs, remount) -> None:
    root = mount_tmpfs("size=1m")
    remount(root, "ro")
    error = refusal(root)
    assert error.code == "EROFS"
    assert str(error) == f"storage path {root} is read-only: mount the volume for writing"


@pytest.mark.parametrize("mode", [0o555, 0o333, 0o000])
def test_no_permission(tmp_path: Path, as_nobody, mode: int) -> None:
    """pytest's folders are open to their owner only, so the way there is opened too."""
    root = tmp_path / "volume"
    root.mkdir()
    parents = [tmp_path, *list(tmp_path.parents)[:2]]
    before = {path: path.stat().st_mode for path in parents}
    try:
        for path in parents:
            path.chmod(0o755)
        root.chmod(mode)
        with as_nobody():
            error = refusal(root)
            uid = os.geteuid()
    finally:
        for path, old in before.items():
            path.chmod(stat.S_IMODE(old))
        root.chmod(0o755)
    assert error.code == "EACCES"
    assert f"storage path {root} may not be listed, read and written by uid {uid}" in str(error)
    assert "grant access" in str(error)


def test_full(mount_tmpfs, fill_up) -> None:
    root = mount_tmpfs("size=64k")
    fill_up(root)
    error = refusal(root)
    assert error.code == "ENOSPC"
    assert str(error) == f"storage path {root} is full: free space on the volume or enlarge it"


def test_no_inodes_left_is_full_too(mount_tmpfs) -> None:
    assert refusal(mount_tmpfs("size=1m,nr_inodes=2")).code == "ENOSPC"


def test_anything_else_is_named_by_its_errno(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, limits[1]))
        error = refusal(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(taken[0])
    assert error.code == errno.errorcode[errno.EMFILE]
    assert f"cannot use storage path {tmp_path}: EMFILE" in str(error)


def test_leftovers_of_dead_writers_go_when_they_are_old(tmp_path: Path) -> None:
    backend = FileBackend(tmp_path)
    backend.probe()
    name = ObjectName("99" * 32, Half.TARGET, "ab" * 32, "cd" * 32, "0" * 16)
    backend.write(name, b"h" * 4096, b"p")
    folder = tmp_path / "v2" / "tmp"
    old, young, foreign = folder / f"w-{'0' * 32}", folder / f"w-{'1' * 32}", folder / "notes.txt"
    for path in (old, young, foreign):
        path.write_bytes(b"half")
    for path, age in ((old, LEFTOVER_AGE_S + 60), (young, LEFTOVER_AGE_S - 60), (foreign, 1e6)):
        changed = path.stat().st_mtime - age
        os.utime(path, (changed, changed))
    object_path = tmp_path / name.path
    os.utime(object_path, (0, 0))
    FileBackend(tmp_path).probe()
    assert sorted(folder.iterdir()) == sorted([young, foreign])
    assert object_path.exists()


def volume(path: Path) -> VolumeTarget:
    return VolumeTarget(claim=None, path=str(path))


def test_open_backend(tmp_path: Path) -> None:
    opened = open_backend(volume(tmp_path))
    assert (tmp_path / "v2").is_dir()
    opened.close()
    with pytest.raises(StorageError, match="does not exist"):
        open_backend(volume(tmp_path / "none"))


def test_what_dead_writers_left_goes_also_when_it_fills_the_volume(mount_tmpfs, fill_up) -> None:
    """The probe writes something: on a volume that they have filled it could not, and they would stay for ever."""
    root = mount_tmpfs("size=64k")
    FileBackend(root).probe()
    leftover = root / "v2" / "tmp" / f"w-{'0' * 32}"
    fill_up(root).rename(leftover)
    changed = leftover.stat().st_mtime - LEFTOVER_AGE_S - 60
    os.utime(leftover, (changed, changed))
    FileBackend(root).probe()
    assert not leftover.exists()


def test_a_full_volume_is_opened_for_its_pages(mount_tmpfs, fill_up, caplog: pytest.LogCaptureFixture) -> None:
    root = mount_tmpfs("size=64k")
    name = ObjectName("99" * 32, Half.TARGET, "ab" * 32, "cd" * 32, "0" * 16)
    backend = open_backend(volume(root))
    backend.write(name, b"h" * 4096, b"p" * 100)
    fill_up(root)
    again = open_backend(volume(root))
    assert again.exists([name]) == [True]
    assert f"storage path {root} is full" in caplog.text


def test_a_volume_that_hangs(hung: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Named while it is waited for, and given up after a while: a start must not hang without a word."""
    monkeypatch.setattr(registry, "PATIENCE_S", 0.2)
    monkeypatch.setattr(registry, "PROBE_S", 1.0)
    with pytest.raises(StorageError) as caught:
        open_backend(volume(hung))
    assert f"storage path {hung} does not answer" in caplog.text
    assert str(caught.value).startswith(f"storage path {hung} has not answered for 1 s: ")
    assert "\n" not in str(caught.value)
