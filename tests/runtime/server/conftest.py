"""The HTTP server on a real socket, in front of a scripted engine.

In: requests as bytes on the wire. Out: answers as bytes on the wire, and what reached the engine. The scripted engine
replays tokens under the test's control, from its own thread as the real one does. A token is one byte, so text can be
cut anywhere, also inside a character. Left out: whether the tokens are right (engine), what the tokenizer does (model).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Counter

from speccache_api.geometry import KVGeometry
from speccache_runtime.config import EngineConfig
from speccache_runtime.core import Finish, Limits, Output, Request, Tier, Usage
from speccache_runtime.errors import BadRequest
from speccache_runtime.server.app import create_app

EOS = 256
VOCABULARY = 300


class ByteDetokenizer:
    def __init__(self) -> None:
        self._held = b""

    def push(self, ids: Sequence[int]) -> str:
        data = self._held + bytes(ids)
        for keep in range(4):
            try:
                text = data[: len(data) - keep].decode()
            except UnicodeDecodeError:
                continue
            self._held = data[len(data) - keep :]
            return text
        self._held = b""
        return data.decode(errors="replace")

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


class ByteTokenizer:
    def encode(self, text: str, *, rendered: bool = False) -> list[int]:
        return list(text.encode())

    def detokenizer(self, after: Sequence[int] = ()) -> ByteDetokenizer:
        return ByteDetokenizer()

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        if any(message["role"] == "system" for message in messages[1:]):
            raise BadRequest("messages", "the template wants the system message first")
        return "".join(f"{message['role']}:{message['content']}\n" for message in messages)


Step = Sequence[int] | Finish | Exception
"""New tokens; how the request ends; or the error that it ends with."""


def usage(prompt: int, completion: int) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens={Tier.DEVICE: 1, Tier.STORAGE: 2},
        draft_absent_tokens=1,
        verify_steps=2,
        tokens_first64=completion,
        verify_steps_first64=2,
        accepted_by_step=(3, 1),
    )


class ScriptedEngine:
    """Replays `script` for every request from a thread of its own; `gate` holds it back before each step."""

    def __init__(self) -> None:
        self.limits = Limits(max_context=1000, vocab_size=VOCABULARY, eos_token_ids=frozenset({EOS}))
        self.failed: str | None = None
        self.stalled: str | None = None
        self.ready = True
        self.script: Sequence[Step] = [b"hello", b" world", Finish.LENGTH]
        self.refuse: Exception | None = None
        self.gate = threading.Semaphore(10**6)
        self.requests: list[Request] = []
        self.aborted: dict[str, Finish] = {}
        self.abort_seen = threading.Event()
        self.over = threading.Event()

    def start(self) -> None:
        self.ready = True

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.limits.check(request)
        self.requests.append(request)
        threading.Thread(target=self._replay, args=(request, on_output), daemon=True).start()

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> None:
        self.aborted.setdefault(request_id, finish)
        self.abort_seen.set()
        self.gate.release()

    def drain(self, request_timeout: float, flush_timeout: float) -> None:
        self.ready = False

    def wait_over(self) -> str | None:
        self.over.wait()
        return self.failed

    def stop(self) -> None:
        self.ready = False
        self.over.set()

    def _replay(self, request: Request, on_output: Callable[[Output], None]) -> None:
        made = 0
        for step in self.script:
            self.gate.acquire()
            last = usage(len(request.prompt), made)
            if request.request_id in self.aborted:
                on_output(Output(request.request_id, (), self.aborted[request.request_id], last))
                return
            if isinstance(step, Finish):
                tokens = (EOS,) if step is Finish.STOP else ()
                on_output(Output(request.request_id, tokens, step, usage(len(request.prompt), made + len(tokens))))
                return
            if isinstance(step, Exception):
                on_output(Output(request.request_id, (), Finish.ERROR, last, str(step)))
                return
            made += len(step)
            on_output(Output(request.request_id, tuple(step)))


@dataclass
class Wire:
    """A running server: how to talk to it, and the engine behind it."""

    url: str
    port: int
    engine: ScriptedEngine
    http: httpx.Client
    app: Any
    counter: Counter
    chat: dict[str, Any] = field(
        default_factory=lambda: {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    )
    completion: dict[str, Any] = field(default_factory=lambda: {"model": "m", "prompt": "hi"})

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=self.completion | fields)

    def say(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=self.chat | fields)


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; the text [DONE] stays text."""
    parts = response.text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts[:-1]]


def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        threading.Event().wait(0.01)


@pytest.fixture(name="events")
def _events() -> Callable[[httpx.Response], list[Any]]:
    return events


@pytest.fixture(name="until")
def _until() -> Callable[[Callable[[], bool]], None]:
    return until


class Swappable:
    """One listening server for all tests (starting one takes longer than a test), with the application of each."""

    app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="session")
def listening() -> Iterator[tuple[Swappable, int]]:
    app = Swappable()
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", ws="none", log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield app, server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def wire(listening: tuple[Swappable, int], engine_config: EngineConfig) -> Iterator[Wire]:
    swappable, port = listening
    engine, registry = ScriptedEngine(), CollectorRegistry()
    counter = Counter("speccache_test", "A counter.", registry=registry)
    swappable.app = create_app(engine, ByteTokenizer(), engine_config, registry)
    url = f"http://127.0.0.1:{port}"
    # verify=False: nothing is encrypted here, and reading all root certificates takes longer than a test.
    with httpx.Client(base_url=url, timeout=10, verify=False) as http:
        yield Wire(url, port, engine, http, swappable.app, counter)


@pytest.fixture
def engine_config() -> EngineConfig:
    return EngineConfig(
        name="m",
        namespace="default",
        served_name="m",
        device="cpu",
        kv_dtype="float32",
        target_uri="builtin://tiny",
        target_path=Path("/nowhere"),
        algorithm="None",
        draft_uri=None,
        draft_path=None,
        num_steps=0,
        page_size=64,
        device_pages=16,
        device_memory_fraction=None,
        host_pages=16,
        storage=None,
        target_geometry=KVGeometry.heads(1, 1, 1),
        draft_geometry=None,
        request_timeout=1.0,
        flush_timeout=1.0,
        port=0,
        host="127.0.0.1",
    )


@pytest.fixture
def make_engine() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def make_tokenizer() -> type[ByteTokenizer]:
    return ByteTokenizer
