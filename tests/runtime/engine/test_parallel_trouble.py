"""A replica of two ranks when one of them dies, hangs, cannot start or is left alone: all are answered, nothing stays.

In: services and servers of two real processes. Out: what they compute (test_parallel.py).
"""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from speccache_runtime.core import Finish, Output, Request, SamplingParams
from speccache_runtime.engine.parallel import leader
from speccache_runtime.engine.service import EngineService
from speccache_runtime.errors import RankError

pytestmark = pytest.mark.program

PATIENCE_S = 60.0


def until(condition: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process computes: neither gone nor a dead one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def service(pair: Any, tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineService]:
    monkeypatch.setattr(leader, "COLLECTIVE_TIMEOUT_S", 5.0)
    monkeypatch.setattr(leader, "END_TIMEOUT_S", 2.0)
    made = EngineService(tools.settings(pair, None, tensor=2), CollectorRegistry())
    made.start()
    yield made
    made.stop()
    assert tools.follower_pids() == []


class Client:
    """One request's outputs."""

    def __init__(self, service: EngineService, name: str, new: int) -> None:
        self.ended = threading.Event()
        self.begun = threading.Event()
        self.last: Output | None = None
        service.submit(Request(name, (1, 2, 3), SamplingParams(max_tokens=new)), self._take)

    def _take(self, output: Output) -> None:
        self.last = output
        self.begun.set()
        if output.finish is not None:
            self.ended.set()


def test_when_a_rank_hangs_every_request_ends_with_an_error(service: EngineService, tools: SimpleNamespace) -> None:
    """One that dies: `test_a_server_whose_rank_dies_answers_everybody_and_ends_with_an_error`."""
    clients = [Client(service, f"r{number}", 400) for number in range(3)]
    assert clients[0].begun.wait(PATIENCE_S)
    (pid,) = tools.follower_pids()
    os.kill(pid, signal.SIGSTOP)
    for client in clients:
        assert client.ended.wait(PATIENCE_S), "a request has no end"
        assert client.last is not None
        assert client.last.finish is Finish.ERROR
    assert service.failed is not None
    assert not service.ready


def test_a_rank_that_dies_while_nobody_asks_anything_is_noticed(service: EngineService, tools: SimpleNamespace) -> None:
    (pid,) = tools.follower_pids()
    os.kill(pid, signal.SIGKILL)
    until(lambda: service.failed is not None, "nobody noticed")
    assert "rank 1" in str(service.failed)


def test_a_rank_that_cannot_start_stops_the_start_with_its_words(
    pair: Any, tools: SimpleNamespace, tmp_path: Path
) -> None:
    config = tools.settings(pair, tmp_path, tensor=2)
    ranks = leader.Ranks(dataclasses.replace(config, target_path=tmp_path / "not there"), lambda: None)
    ranks.join(config)
    with pytest.raises(RankError, match=r"rank 1 failed.*not there"):
        ranks.wait_for("loaded")
    ranks.close()
    assert tools.follower_pids() == []


RANK_ZERO = """
import sys, time
from speccache_runtime.config import EngineConfig
from speccache_runtime.engine.build import build_engine
from speccache_runtime.metrics import Metrics
from prometheus_client import CollectorRegistry
built = build_engine(EngineConfig.from_json(sys.stdin.read()), Metrics(CollectorRegistry()), print, lambda: None)
print("built", flush=True)
time.sleep(600)
"""


def test_other_ranks_do_not_outlive_the_first(pair: Any, tools: SimpleNamespace) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK_ZERO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(tools.settings(pair, None, tensor=2).to_json())
    process.stdin.close()
    assert process.stdout.readline() == "built\n"
    (follower,) = tools.follower_pids(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not runs(follower), "a rank computes for nobody")


SAMPLE = Path(__file__).parents[3] / "samples" / "tiny-two-ranks.yaml"


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of two ranks in a process of its own, and its address."""
    command = [sys.executable, "-m", "speccache_runtime", "serve", "-f", str(SAMPLE), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = ""
    while "curl " not in seen:
        line = process.stdout.readline()
        assert line, f"the server has ended: {seen}"
        seen += line
    yield process, seen.partition("curl ")[2].partition("/v1")[0]
    process.kill()
    process.communicate()


def ask(url: str, prompt: str, **more: Any) -> httpx.Response:
    body = {"model": "tiny-two-ranks", "prompt": prompt, "max_tokens": 24, "temperature": 0} | more
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def test_a_server_whose_rank_dies_answers_everybody_and_ends_with_an_error(
    served: tuple[subprocess.Popen[str], str], tools: SimpleNamespace
) -> None:
    process, url = served
    answer = ask(url, "def read_lines(path):")
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 24
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, url, prompt, max_tokens=2000) for prompt in ("class A:", "import os")]
        until(lambda: "speccache_requests_running 2" in httpx.get(f"{url}/metrics").text, "nobody is served")
        (follower,) = tools.follower_pids(process.pid)
        os.kill(follower, signal.SIGKILL)
        for each in asked:
            assert each.result().status_code == 500
    assert process.wait(PATIENCE_S) == 1


def test_a_server_of_two_ranks_drains_and_leaves_nobody_behind(
    served: tuple[subprocess.Popen[str], str], tools: SimpleNamespace
) -> None:
    process, url = served
    (follower,) = tools.follower_pids(process.pid)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, url, "class A:", max_tokens=200)
        until(lambda: "speccache_requests_running 1" in httpx.get(f"{url}/metrics").text, "nobody is served")
        process.send_signal(signal.SIGTERM)
        assert asked.result().json()["usage"]["completion_tokens"] == 200
    assert process.wait(PATIENCE_S) == 0
    assert not runs(follower)
