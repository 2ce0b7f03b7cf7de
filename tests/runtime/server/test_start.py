"""The first seconds of a real `serve`, as a pod sees them: the port, the probes, and signals at every moment.

The process is the first of a PID namespace of its own, as in a container: there, a signal without a handler is lost.
Moments are told by what the process has done, not by time.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

pytestmark = pytest.mark.program

SAMPLE = Path(__file__).parents[3] / "samples" / "tiny.yaml"
WAIT_SECONDS = 120
END_SECONDS = 10
"""A signal is seen between two steps of Python; one library takes a second or two to be loaded, on a busy machine."""


class Starting(NamedTuple):
    """A process that starts: `pid` is its number here; `said` is what it has printed so far, line by line."""

    process: subprocess.Popen[str]
    pid: int
    port: int
    said: list[str]

    def has_said(self, words: str) -> bool:
        return words in "".join(self.said)

    def maps(self, name: str) -> bool:
        return name in Path(f"/proc/{self.pid}/maps").read_text()

    def handles_sigterm(self) -> bool:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{self.pid}/status").read_text())
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)

    def status(self, path: str) -> int | None:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=10, verify=False).status_code
        except httpx.ConnectError:
            return None

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.said}"
            assert time.monotonic() < deadline, f"did not come so far: {self.said}"
            threading.Event().wait(0.002)


MOMENTS: dict[str, Callable[[Starting], bool]] = {
    "it has a handler": lambda it: it.handles_sigterm(),
    "the port answers": lambda it: it.status("/health") == 200,
    "torch is being imported": lambda it: it.maps("libtorch"),
    "loading begins": lambda it: it.has_said("loading builtin://tiny"),
    "weights are being read": lambda it: it.maps("tiny/target/model.safetensors"),
}


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Starting]:
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("a PID namespace cannot be made here: run the tests as root")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "speccache_runtime", "serve", "-f", SAMPLE, "--storage-dir", tmp_path / "kv"]
    command = [*namespace, *map(str, serve), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        said: list[str] = []
        reader = threading.Thread(target=read, args=(process, said), daemon=True)
        reader.start()
        try:
            yield Starting(process, first_of(process), port, said)
        finally:
            process.kill()
            reader.join()


def read(process: subprocess.Popen[str], said: list[str]) -> None:
    assert process.stdout is not None
    while text := os.read(process.stdout.fileno(), 4096).decode():
        said.append(text)


def first_of(process: subprocess.Popen[str]) -> int:
    """The number that the namespace's first process has outside."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 10
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline
    return int(found[0])


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_at_any_moment(starting: Starting, moment: str) -> None:
    """The process ends with 0, at once: the kubelet need not wait for its grace period and kill."""
    starting.wait_for(lambda: MOMENTS[moment](starting))
    os.kill(starting.pid, signal.SIGTERM)
    try:
        code = starting.process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"goes on after SIGTERM: {starting.said}")
    assert code == 0, starting.said
    assert "Traceback" not in "".join(starting.said)


def test_handler_comes_first(starting: Starting) -> None:
    """Before anything that takes time is imported."""
    starting.wait_for(starting.handles_sigterm)
    assert not any(map(starting.maps, ("pydantic", "yaml", "torch", "numpy")))


def test_probes_from_the_first_moment(starting: Starting) -> None:
    """Alive and not ready while the libraries are imported; then ready, on the same port. No probe is refused."""
    starting.wait_for(lambda: starting.status("/health") == 200)
    begun = time.monotonic()
    assert not starting.has_said("loading builtin")
    assert starting.status("/ready") == 503
    refused = httpx.post(f"http://127.0.0.1:{starting.port}/v1/completions", json={"prompt": "x" * 10**6}, verify=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
    assert int(refused.headers["retry-after"]) > 0
    seen: set[tuple[int | None, int | None]] = set()
    while not starting.has_said("is ready"):
        seen.add((starting.status("/health"), starting.status("/ready")))
    assert seen <= {(200, 503), (200, 200)}
    assert starting.status("/ready") == 200
    check_words("".join(starting.said), time.monotonic() - begun)
    os.kill(starting.pid, signal.SIGTERM)
    assert starting.process.wait(END_SECONDS) == 0


def check_words(said: str, seconds: float) -> None:
    """What took the time was said."""
    named = re.findall(r"^(.+) … ([0-9.]+) s$", said, re.MULTILINE)
    assert [what.split()[0] for what, _ in named] == ["importing", "reading", "loading"]
    assert sum(float(took) for _, took in named) > 0.8 * seconds - 1


def test_port_in_use_is_told_before_anything_is_imported(tmp_path: Path) -> None:
    """Nobody waits for the libraries to hear it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-X", "importtime", "-m", "speccache_runtime", "serve", "-f", SAMPLE, "--port", port]
        answer = subprocess.run(
            [*map(str, command), "--storage-dir", str(tmp_path)], check=False, capture_output=True, text=True
        )
    assert answer.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in answer.stderr.splitlines()[-1]
    assert "pydantic" in answer.stderr
    assert not re.search(r"\b(torch|transformers|fastapi)$", answer.stderr, re.MULTILINE)
