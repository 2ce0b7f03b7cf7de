"""The server process: load, serve, and on SIGTERM end without losing a request or a page.

load       /ready says 503; a model that cannot be loaded ends the process with one line; a signal ends it at once
serve      until SIGTERM or SIGINT, or until the engine fails: then all requests get an error and the process ends
drain      /ready says 503 and new requests get 503; running ones finish; host pages go to storage
stop       open connections close; exit code 0. A second signal at any time: exit code 130, at once
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from speccache_runtime.config import AdminConfig, EngineConfig
from speccache_runtime.errors import EngineFailed
from speccache_runtime.server.admin import create_admin_app
from speccache_runtime.server.app import create_app
from speccache_runtime.server.lengths import ASSUMED_CHARACTERS
from speccache_runtime.server.protocol import Engine, StorageAdmin, Tokenizer
from speccache_runtime.server.state import ServerState
from speccache_runtime.server.threads import in_thread
from speccache_runtime.server.words import Say, timed

EXIT_INTERRUPTED = 130

SAME_SIGNAL_SECONDS = 0.3
"""Signals that come so soon after the first are the first: Ctrl-C reaches a whole process group, and a wrapper such as
`uv run` passes its own on to us."""

CLOSE_SECONDS = 5
"""What slow readers get to take the rest of their answer after the engine has finished."""

LIFE = "engine-life"
"""Name of the threads that wait for the engine."""


def serve(
    listener: socket.socket,
    engine: Engine,
    tokenizer: Tokenizer,
    config: EngineConfig,
    registry: CollectorRegistry,
    say: Say,
    per_token: int = ASSUMED_CHARACTERS,
    admin: AdminPort | None = None,
) -> None:
    """Serve on `listener` until told to end. Owns `engine`: starts it, drains it and stops it.

    `per_token` is the most characters that one token of `tokenizer` stands for; longer text is refused unseen. `admin`
    is served beside it, on its own port.

    Raises what `engine.start` raises, and EngineFailed. Told to end before the model is loaded, it ends the process
    with code 0: the thread that loads is in the middle of compiled code, which an orderly end of the interpreter would
    tear down.
    """
    app = create_app(engine, tokenizer, config, registry, per_token)
    ports = [(listener, app)]
    if admin is not None:
        ports.append((admin.listener, create_admin_app(app.state.server, admin.storage, admin.config, config.storage)))
    try:
        loaded = asyncio.run(_Process(engine, app.state.server, config, say).run(ports))
    finally:
        engine.stop()
    if not loaded:
        sys.stdout.flush()
        os._exit(0)


@dataclass(frozen=True, slots=True)
class AdminPort:
    """Where the admin port listens, and what it administrates."""

    listener: socket.socket
    config: AdminConfig
    storage: Callable[[], StorageAdmin]


class _UvicornServer(uvicorn.Server):
    """Leaves signals to us: uvicorn would close the port before the engine has drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    def __init__(self, engine: Engine, state: ServerState, config: EngineConfig, say: Say) -> None:
        self._engine = engine
        self._config = config
        self._say = say
        self._state = state
        self._ending = asyncio.Event()
        self._first_signal: float | None = None

    async def run(self, ports: Sequence[tuple[socket.socket, FastAPI]]) -> bool:
        """Serves the applications, each on its port; the first is the one that is announced. False when the process was
        told to end before the model was loaded."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        servers = [(_server(app), listener) for listener, app in ports]
        serving = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in servers]
        ending = asyncio.create_task(self._ending.wait())
        try:
            loaded = await self._load(ending)
            if loaded:
                self._announce(ports[0][0])
                await self._until_told_or_failed(ending)
                await self._drain()
        finally:
            ending.cancel()
            for server, _ in servers:
                server.should_exit = True
            await asyncio.gather(*serving)
        return loaded

    async def _until_told_or_failed(self, ending: asyncio.Task[bool]) -> None:
        """Raises EngineFailed; a process without an engine serves nobody, and a new one may."""
        over = in_thread(self._engine.wait_over, LIFE)
        either: set[asyncio.Future[Any]] = {over, ending}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            raise EngineFailed(over.result() or "the engine has ended")
        over.cancel()

    def _on_signal(self) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
            self._ending.set()
        elif now - self._first_signal > SAME_SIGNAL_SECONDS:
            self._say("stopped at once by a second signal; pages not yet in storage are lost\n")
            os._exit(EXIT_INTERRUPTED)

    async def _load(self, ending: asyncio.Task[bool]) -> bool:
        """True when the model is loaded, False when the process was told to end before that."""
        names = dict.fromkeys([self._config.target_uri, *filter(None, [self._config.draft_uri])])
        self._say(f"loading {' and '.join(names)} … ")
        begun = time.monotonic()
        loading = in_thread(self._engine.start, LIFE)
        either: set[asyncio.Future[Any]] = {loading, ending}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            self._say("stopped\n")
            return False
        failure = loading.exception()
        if failure is not None:
            self._say("failed\n")
            raise failure
        self._say(f"{time.monotonic() - begun:.1f} s\n")
        return True

    def _announce(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        self._say(f"\n{self._config.served_name} is ready. Talk to it:\n\n{curl_line(shown, port, self._config)}\n\n")

    async def _drain(self) -> None:
        self._state.draining = True
        with timed(self._say, "draining: finishing running requests, then writing pages to storage"):
            await in_thread(lambda: self._engine.drain(self._config.request_timeout, self._config.flush_timeout), LIFE)


def _server(app: FastAPI) -> _UvicornServer:
    return _UvicornServer(
        uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
    )


def curl_line(host: str, port: int, config: EngineConfig) -> str:
    """A request to copy into a shell."""
    salt = ', "cache_salt": "a secret of yours"' if config.require_cache_salt else ""
    body = f'{{"model": "{config.served_name}", "prompt": "def main():", "max_tokens": 64{salt}}}'
    return f"  curl http://{host}:{port}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
