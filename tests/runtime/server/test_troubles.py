"""When things go wrong: every request still ends with an answer, and nothing is computed for a client that has gone."""

from __future__ import annotations

import json
import queue
import socket
import threading

import pytest

from speccache_runtime.core import Finish
from speccache_runtime.errors import BadRequest, Draining, Overloaded


@pytest.mark.parametrize(
    ("error", "code"), [(Overloaded("288 requests wait", 5), "overloaded"), (Draining("ending", 5), "draining")]
)
def test_refused_for_now(wire, error, code):
    """503 with Retry-After; the next try may succeed. Also when a stream was asked for: no header has left yet."""
    wire.engine.refuse = error
    for answer in (wire.complete(), wire.say(stream=True)):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert answer.json()["error"]["code"] == code
        assert answer.json()["error"]["type"] == "server_error"


def test_refused_by_the_engine(wire):
    """What only the engine can see is a 400 too, and a chat client gets the name of its own field."""
    wire.engine.refuse = BadRequest("prompt", "too long for the device tier")
    assert wire.complete().json()["error"]["param"] == "prompt"
    assert wire.say().json()["error"]["param"] == "messages"
    assert wire.say().status_code == 400


def test_engine_error(wire):
    """A 500 with the reason; without it no client could report the fault."""
    wire.engine.script = [b"hel", RuntimeError("page 7 is gone")]
    answer = wire.complete()
    assert answer.status_code == 500
    assert "page 7 is gone" in answer.json()["error"]["message"]


def test_engine_error_in_a_stream(wire, events):
    """An error event, and no [DONE]: a broken text cannot be taken for a whole one."""
    wire.engine.script = [b"hel", RuntimeError("page 7 is gone")]
    first, last = events(wire.complete(stream=True))
    assert first["choices"][0]["text"] == "hel"
    assert "page 7 is gone" in last["error"]["message"]


def test_aborted_by_a_drain(wire, events):
    """A request that the drain cut off can be sent again elsewhere."""
    wire.engine.script = [b"hel", Finish.ABORT]
    answer = wire.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
    assert events(wire.complete(stream=True))[-1]["error"]["code"] == "aborted"


def test_engine_that_dies_without_a_word(wire):
    """Its requests end all the same."""
    wire.engine.gate = threading.Semaphore(0)
    answers = []
    client = threading.Thread(target=lambda: answers.append(wire.complete()))
    client.start()
    wire.engine.failed = "out of memory"
    client.join(5)
    assert answers[0].status_code == 500
    assert "out of memory" in answers[0].json()["error"]["message"]


def test_health_and_readiness(wire):
    """Alive is not ready; only a failed engine makes the process worth restarting."""

    def probes() -> tuple[int, int]:
        return wire.http.get("/health").status_code, wire.http.get("/ready").status_code

    assert probes() == (200, 200)
    wire.engine.ready = False
    assert probes() == (200, 503)
    wire.engine.ready = True
    wire.app.state.server.draining = True
    assert probes() == (200, 503)
    assert "draining" in wire.http.get("/ready").json()["reason"]
    wire.engine.failed = "out of memory"
    assert probes() == (500, 503)
    assert wire.http.get("/health").json()["reason"] == "out of memory"


def test_not_ready(wire):
    """Before the model is loaded and while draining: 503, and after a failure: 500. Wrong bodies are told first."""
    wire.engine.ready = False
    loading = wire.complete()
    assert (loading.status_code, loading.json()["error"]["code"]) == (503, "loading")
    assert int(loading.headers["retry-after"]) > 0
    assert wire.complete(n=2).status_code == 400
    wire.app.state.server.draining = True
    assert wire.complete().json()["error"]["code"] == "draining"
    wire.engine.failed = "out of memory"
    assert wire.complete().status_code == 500


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves(wire, until, stream):
    """The engine is told at once, before and between tokens."""
    wire.engine.gate = threading.Semaphore(1 if stream else 0)
    wire.engine.script = [b"hel", b"lo", Finish.LENGTH]
    body = json.dumps(wire.completion | {"stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", wire.port), timeout=5) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        received = b""
        while stream and b"hel" not in received:
            received += client.recv(4096)
        until(lambda: len(wire.engine.requests) == 1)
    assert wire.engine.abort_seen.wait(5)
    assert wire.engine.aborted == {wire.engine.requests[0].request_id: Finish.ABORT}


def test_finished_requests_are_not_aborted(wire):
    """Closing is for those that still run."""
    wire.complete(), wire.complete(stream=True)
    assert wire.engine.aborted == {}


def test_bug_of_ours(wire, monkeypatch):
    """An answer in the usual shape, without internals."""
    monkeypatch.setattr(wire.app.state.server.tokenizer, "encode", None)
    answer = wire.complete()
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "internal server error")


def test_many_at_once(wire):
    """Requests do not wait for each other, and each gets its own answer."""
    wire.engine.gate = threading.Semaphore(0)
    answers: list[int] = []
    clients = [
        threading.Thread(target=lambda: answers.append(wire.complete().json()["usage"]["completion_tokens"]))
        for _ in range(20)
    ]
    for client in clients:
        client.start()
    deadline = threading.Event()
    while len(wire.engine.requests) < 20 and not deadline.wait(0.01):
        pass
    wire.engine.gate.release(20 * 3)
    for client in clients:
        client.join(10)
    assert answers == [11] * 20
    assert len({request.request_id for request in wire.engine.requests}) == 20


class Watch:
    """Middleware that tells how each request ended: with None, or with what went wrong."""

    def __init__(self, app, ended: queue.Queue[Exception | None]) -> None:
        self._app = app
        self._ended = ended

    async def __call__(self, scope, receive, send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            self._ended.put(error)
            raise
        self._ended.put(None)


def test_client_that_leaves_while_it_sends(wire):
    """Not worth a traceback in the log."""
    ended: queue.Queue[Exception | None] = queue.Queue()
    wire.app.add_middleware(Watch, ended=ended)
    with socket.create_connection(("127.0.0.1", wire.port), timeout=5) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Length: 100\r\n\r\n{")
    assert ended.get(timeout=5) is None
