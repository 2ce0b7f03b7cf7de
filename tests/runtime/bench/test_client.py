"""The measuring client against a real socket: what it times, and what it refuses to take for an answer."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest

from speccache_runtime.bench.client import ClientError, complete

USAGE = {"completion_tokens": 3}


class Canned(http.server.BaseHTTPRequestHandler):
    """Answers every request with what the test has put there."""

    status: ClassVar[int]
    events: ClassVar[list[bytes]]
    bodies: ClassVar[list[dict]]
    paths: ClassVar[list[str]]

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.paths.append(self.path)
        self.send_response(self.status)
        self.end_headers()
        for event in self.events:
            self.wfile.write(event)
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """No lines on standard error."""


def event(text: str | None = None, **more: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@pytest.fixture
def url() -> Iterator[str]:
    Canned.status, Canned.bodies, Canned.paths = 200, [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canned) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_whole_answer(url):
    """Text, usage and times; the request is greedy and asks for usage."""
    Canned.events = [event("ä"), event(""), event("b", usage=None), event(usage=USAGE), DONE]
    answer = complete(url + "/proxy/", "m", "hi", 5)
    assert (answer.text, answer.usage) == ("äb", USAGE)
    assert 0 < answer.first_token <= answer.total
    assert answer.time_per_token == (answer.total - answer.first_token) / 2
    assert Canned.paths == ["/proxy/v1/completions"]
    body = Canned.bodies[0]
    assert (body["temperature"], body["stream"], body["max_tokens"]) == (0, True, 5)


def test_answer_without_text(url):
    """A model may end its text at once."""
    Canned.events = [event("", usage={"completion_tokens": 1}), DONE]
    answer = complete(url, "m", "hi", 5)
    assert (answer.text, answer.time_per_token) == ("", None)
    assert answer.first_token == answer.total


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([event("a")], "ended early"),
        ([event("a"), DONE], "without usage"),
        ([DONE], "without usage"),
        ([event("a"), b'data: {"error": {"message": "page 7 is gone"}}\n\n'], "page 7 is gone"),
    ],
)
def test_broken_stream(url, events, words):
    """Half an answer is none."""
    Canned.events = events
    with pytest.raises(ClientError, match=words):
        complete(url, "m", "hi", 5)


def test_refusal(url):
    """Status and reason."""
    Canned.status, Canned.events = 503, [b'{"error": "busy"}']
    with pytest.raises(ClientError, match=r"503.*busy"):
        complete(url, "m", "hi", 5)


def test_nobody_there():
    """A connection that cannot be made names where."""
    with pytest.raises(ClientError, match=r"http://127\.0\.0\.1:1"):
        complete("http://127.0.0.1:1", "m", "hi", 5)
