"""More than the server can do: told so before any work is done for it, and one long text does not stall the others."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from speccache_runtime.core import Finish
from speccache_runtime.errors import Overloaded
from speccache_runtime.server import admission
from speccache_runtime.server.admission import Room


class Held:
    """A tokenizer's `encode` that waits to be let go, and what came in."""

    def __init__(self) -> None:
        self.inside: queue.Queue[str] = queue.Queue()
        self._go = threading.Semaphore(0)

    def __call__(self, text: str) -> list[int]:
        self.inside.put(text)
        assert self._go.acquire(timeout=10)
        return list(text.encode())

    def let_go(self, texts: int = 1) -> None:
        self._go.release(texts)


@pytest.fixture
def held(wire, monkeypatch) -> Iterator[Held]:
    encode = Held()
    monkeypatch.setattr(wire.app.state.server.tokenizer, "encode", encode)
    yield encode
    encode.let_go(100)


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_no_place_left(wire, monkeypatch, clients, until):
    """503 before the text is tokenised, until a request ends."""
    server = wire.app.state.server
    server.room = Room(1)
    wire.engine.gate = threading.Semaphore(0)
    running = clients.submit(wire.complete)
    until(lambda: len(wire.engine.requests) == 1)
    with monkeypatch.context() as patch:
        patch.setattr(server.tokenizer, "encode", None)
        refused = wire.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert int(refused.headers["retry-after"]) > 0
    wire.engine.gate.release(10)
    assert running.result().status_code == 200
    assert wire.complete().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_places_come_back(wire, stream):
    """However a request ends: done, failed, cut off, or never taken."""
    wire.app.state.server.room = Room(1)
    for script in ([b"a", Finish.LENGTH], [b"a", RuntimeError("page 7 is gone")], [b"a", Finish.ABORT]):
        wire.engine.script = script
        assert wire.complete(stream=stream).status_code in (200, 500, 503)
    assert wire.complete(prompt="", stream=stream).status_code == 400
    wire.engine.refuse = Overloaded("288 requests wait", 5)
    assert "288" in wire.complete(stream=stream).text
    wire.engine.refuse, wire.engine.script = None, [b"a", Finish.LENGTH]
    assert wire.complete(stream=stream).status_code == 200


def test_one_text_at_a_time(wire, held, clients):
    """The second waits for the first; probes and prompts of token ids do not."""
    answers = [clients.submit(wire.complete, prompt="one"), clients.submit(wire.complete, prompt="two")]
    held.inside.get(timeout=5)
    assert wire.http.get("/health").status_code == 200
    assert wire.complete(prompt=[1, 2]).status_code == 200
    assert held.inside.empty()
    held.let_go(2)
    assert [answer.result().status_code for answer in answers] == [200, 200]


def test_too_much_text_waits(wire, held, clients, monkeypatch):
    """503 for what would wait too long; a text of any length is taken when none waits."""
    monkeypatch.setattr(admission, "MAX_WAITING_CHARACTERS", 5)
    first = clients.submit(wire.complete, prompt="x" * 6)
    held.inside.get(timeout=5)
    refused = wire.complete(prompt="x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    held.let_go(2)
    assert first.result().status_code == 200
    assert wire.complete(prompt="x").status_code == 200


def test_client_that_leaves_before_its_turn(wire, held, clients, until):
    """Its text is not tokenised."""
    first = clients.submit(wire.complete, prompt="first")
    held.inside.get(timeout=5)
    body = json.dumps(wire.completion | {"prompt": "second"}).encode()
    turns = wire.app.state.server.prompts._turns
    with socket.create_connection(("127.0.0.1", wire.port), timeout=5) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: turns._waiting == len("first") + len("second"))
    # Answered behind the client's end on the same loop, which thus has seen it.
    assert wire.http.get("/health").status_code == 200
    held.let_go(1)
    assert first.result().status_code == 200
    until(lambda: turns._waiting == 0)
    assert held.inside.empty()
