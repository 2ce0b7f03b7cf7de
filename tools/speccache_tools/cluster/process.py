"""Background programs known by pid file, so that a later command finds, checks and stops exactly those.

A pid alone may have been given to a stranger since; the file therefore also holds the process's start time, and
only a process with both is ours. Nothing is ever found or stopped by its name.
"""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from speccache_tools.cluster.settings import environment

# The child notes itself and then becomes the program: whenever we are killed, no program runs that is not noted.
_NOTE_AND_RUN = """
echo "$$ $(cut --delimiter=' ' --fields=22 /proc/$$/stat)" >"$0.part" && mv "$0.part" "$0" && exec "$@"
"""


class StartError(Exception):
    """A program ended, or was not ready in time; the message holds the end of its log."""


class Processes:
    """The programs whose pid files and logs lie in one folder."""

    def __init__(self, folder: Path) -> None:
        self.pids = folder / "pids"
        self.logs = folder / "logs"
        self.pids.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Starts `command` in a session of its own unless `name` runs already; its output goes to `logs/NAME.log`."""
        if self.alive(name):
            return
        file = self.pids / name
        file.unlink(missing_ok=True)
        with (self.logs / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                ["sh", "-c", _NOTE_AND_RUN, str(file), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment(), **(variables or {})},
                start_new_session=True,
            )
        until(lambda: file.exists() or child.poll() is not None, seconds=10.0, pause=0.005)

    def pid(self, name: str) -> int | None:
        """Pid of the running program, None when it does not run (any more)."""
        file = self.pids / name
        if not file.exists():
            return None
        pid, started = (int(word) for word in file.read_text().split())
        return pid if start_time(pid) == started else None

    def alive(self, name: str) -> bool:
        return self.pid(name) is not None

    def stop(self, name: str, *, grace: float = 5.0) -> None:
        """Asks the program to end, kills it after `grace` seconds (0: at once), and forgets it."""
        pid = self.pid(name)
        if pid is not None:
            _signal(pid, signal.SIGTERM if grace else signal.SIGKILL)
            if not until(lambda: not self.alive(name), seconds=grace or 10.0):
                _signal(pid, signal.SIGKILL)
                until(lambda: not self.alive(name), seconds=10.0)
        (self.pids / name).unlink(missing_ok=True)

    def wait(self, name: str, test: Callable[[], bool], *, seconds: float) -> None:
        """Returns when `test` holds; raises `StartError` when the program ends before, or after `seconds`."""
        if until(lambda: test() or not self.alive(name), seconds=seconds) and self.alive(name):
            return
        log = (self.logs / f"{name}.log").read_text(errors="replace").splitlines()
        reason = "is not ready in time" if self.alive(name) else "ended"
        raise StartError(f"{name} {reason}; the end of {self.logs / name}.log:\n" + "\n".join(log[-15:]))


def start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of `pid`; None when there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the program's own name, in front, may hold blanks and brackets
    return None if fields[0] == "Z" else int(fields[19])


def until(test: Callable[[], bool], *, seconds: float, pause: float = 0.05) -> bool:
    """Asks `test` again and again; True as soon as it holds, False when it never did."""
    deadline = time.monotonic() + seconds
    while not test():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def free_ports(count: int) -> list[int]:
    """Ports of the loopback device that nobody listens on now, each another one."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports


def told_to_end() -> threading.Event:
    """For a command in the foreground: set on SIGINT, on SIGTERM, or when the pipe that is standard input closes."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    threading.Thread(target=_watch_input, args=(stopping,), daemon=True).start()
    return stopping


def _watch_input(stopping: threading.Event) -> None:
    if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        return  # a terminal, or nothing at all: only a pipe's end says that the caller is gone
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stopping.set()


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
