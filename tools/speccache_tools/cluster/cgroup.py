"""The control group under which all pods run: it says exactly which processes are the cluster's."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from speccache_tools.cluster.process import until

NAME = "/speccache-test"
_MOUNT = Path("/sys/fs/cgroup")


def create() -> None:
    """Makes the group in every hierarchy; the kubelet wants its root to exist."""
    for hierarchy in _hierarchies():
        group = hierarchy / NAME.removeprefix("/")
        group.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):  # empty in a new group of version 1: nothing could run there
            if hierarchy != _MOUNT and (hierarchy / file).exists():
                (group / file).write_text((hierarchy / file).read_text())


def kill_and_remove() -> None:
    """Kills what still runs in the group and removes it; nothing to do is no error."""
    until(_killed, seconds=10.0)
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / NAME.removeprefix("/"), topdown=False):
            os.rmdir(folder)


def _killed() -> bool:
    pids = set(_pids())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return not pids


def _pids() -> Iterator[int]:
    for hierarchy in _hierarchies():
        for file in (hierarchy / NAME.removeprefix("/")).rglob("cgroup.procs"):
            yield from (int(line) for line in file.read_text().split())


def _hierarchies() -> list[Path]:
    """One folder in version 2 of control groups; in version 1 one for each controller and often one of version 2."""
    if (_MOUNT / "cgroup.controllers").exists():
        return [_MOUNT]
    folders = [folder for folder in _MOUNT.iterdir() if not folder.is_symlink()]
    return [folder for folder in folders if (folder / "cgroup.procs").exists()]
