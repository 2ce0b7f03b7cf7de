"""The port before the server: taken at once, and answered while the libraries are imported, which takes seconds.

A port that is in use is thus told at once, and probes see a process that lives and is not ready. Light imports only.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from speccache_runtime.errors import ConfigError
from speccache_runtime.server.errors import loading

BACKLOG = 128
"""Connections that may wait until the server takes over."""

MAX_READ_BYTES = 2**20
"""Of a body that is not used: a client whose body is left unread may not see its answer."""


def listen(host: str, port: int, remedy: str = "choose another --port") -> socket.socket:
    """A listening socket that never blocks; port 0 takes a free one. Raises ConfigError with the `remedy`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"cannot listen on {host} port {port}: {reason or error}; {remedy}") from error
    return listener


@contextmanager
def early_answers(listener: socket.socket) -> Iterator[None]:
    """Answers as the server does before its model is loaded. Connections that come later wait for the server."""
    server = ThreadingHTTPServer(("", 0), _Answers, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="early-answers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


class _Answers(BaseHTTPRequestHandler):
    timeout = 5

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        elif self.path == "/ready":
            self._answer(503, {"status": "not ready", "reason": loading().message})
        else:
            self._refuse()

    def do_POST(self) -> None:
        declared = self.headers.get("Content-Length", "")
        self.rfile.read(min(int(declared), MAX_READ_BYTES) if declared.isdecimal() else 0)
        self._refuse()

    def _refuse(self) -> None:
        self._answer(503, loading().body(), {"Retry-After": str(loading().retry_after)})

    def _answer(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        fixed = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        for name, value in (fixed | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Probes are not worth a line each."""
