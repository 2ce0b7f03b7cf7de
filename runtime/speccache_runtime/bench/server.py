"""A `speccache-runtime serve` process of the benchmark's own, on a free port of this machine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

from speccache_runtime.errors import SpecCacheError

START_SECONDS = 180
"""A large model is read from disk in this time; the built-in one needs a few seconds."""

END_SECONDS = 180
"""More than the longest default drain: 30 s for requests, 60 s for the flush."""

_ANNOUNCED = re.compile(r"curl (http://[^/\s]+)/v1/")


class BenchError(SpecCacheError):
    """The measurement could not be made."""


class Server:
    """Runs while the `with` block does; ends by SIGTERM, as a pod ends. `url` is known once it is ready.

    `arguments` are those of `speccache-runtime serve`, without a port.
    """

    def __init__(self, *arguments: str | Path) -> None:
        self.url = ""
        self._command = [sys.executable, "-m", "speccache_runtime", "serve", *map(str, arguments), "--port", "0"]
        self._last_lines: deque[str] = deque(maxlen=20)
        self._ready = threading.Event()

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(START_SECONDS) or not self.url:
            self._kill()
            raise BenchError(f"the server did not start: {self._said()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._kill()
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            raise BenchError(f"the server did not end within {END_SECONDS} s of SIGTERM: {self._said()}") from None
        self._close()
        if code != 0:
            raise BenchError(f"the server ended with code {code}: {self._said()}")

    def _read(self) -> None:
        """Empties the pipe, so that the server never waits for us; ends when the server has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_lines.append(line.strip())
            found = _ANNOUNCED.search(line)
            if found:
                self.url = found.group(1)
                self._ready.set()
        self._ready.set()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _said(self) -> str:
        return " | ".join(line for line in self._last_lines if line) or "it said nothing"
