"""Small servers that do what a real S3 server cannot be made to do."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


def error(status: int, code: str, more: str = "", headers: dict[str, str] | None = None) -> Answer:
    """An S3 error; without its text in the answer to HEAD, as S3 does it."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        if "Expect" not in request.headers:
            request.rfile.read(int(request.headers.get("Content-Length", 0)))
        body = f"<Error><Code>{code}</Code><Message>{request.headers}</Message>{more}</Error>".encode()
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    return answer


def found(nbytes: int, sent: int | None = None, then: Callable[[], object] = lambda: None) -> Answer:
    """An object of zeros; only `sent` bytes of it, then `then` and the end of the connection."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(nbytes))
        request.send_header("Last-Modified", "Sun, 22 Nov 2026 01:00:00 GMT")
        request.end_headers()
        request.wfile.write(bytes(nbytes if sent is None else sent))
        if sent is not None:
            request.wfile.flush()
            then()
            request.close_connection = True

    return answer


def done(request: BaseHTTPRequestHandler) -> None:
    """A put that worked."""
    request.rfile.read(int(request.headers.get("Content-Length", 0)))
    request.send_response(200)
    request.send_header("Content-Length", "0")
    request.end_headers()


class ScriptedServer:
    """Answers every request by the next of `script`, and by its last one for ever after. `requests` is what it was
    asked."""

    def __init__(self, *script: Answer) -> None:
        self.script = list(script)
        self.requests: list[str] = []
        self.stopped = threading.Event()
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20.0

            def handle_expect_100(self) -> bool:
                with lock:
                    goes_on = outer.script[0] is done
                return super().handle_expect_100() if goes_on else True

            def _answer(self) -> None:
                with lock:
                    outer.requests.append(f"{self.command} {self.path}")
                    answer = outer.script.pop(0) if len(outer.script) > 1 else outer.script[0]
                with contextlib.suppress(OSError):
                    answer(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name is given
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and never says a word; yields its URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def closed_port() -> str:
    """A URL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return f"http://127.0.0.1:{held.getsockname()[1]}"
