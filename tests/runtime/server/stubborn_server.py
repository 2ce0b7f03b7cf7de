"""Run as a program: a server whose engine loads or drains for ever, as its argument says. For tests of signals."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from speccache_api.geometry import KVGeometry
from speccache_runtime.config import EngineConfig
from speccache_runtime.core import Finish, Limits, Output, Request
from speccache_runtime.server.early import listen
from speccache_runtime.server.run import serve
from speccache_runtime.server.words import say


class StubbornEngine:
    def __init__(self, where: str) -> None:
        self.where = where
        self.ready = False
        self.failed: str | None = None
        self.stalled: str | None = None
        self.limits = Limits(max_context=10, vocab_size=10, eos_token_ids=frozenset())

    def start(self) -> None:
        self._hang_at("load")
        self.ready = True

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        raise NotImplementedError

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> None:
        raise NotImplementedError

    def drain(self, request_timeout: float, flush_timeout: float) -> None:
        self._hang_at("drain")

    def wait_over(self) -> str | None:
        threading.Event().wait()
        return None

    def stop(self) -> None:
        sys.stdout.write("engine stopped\n")

    def _hang_at(self, where: str) -> None:
        if self.where == where:
            threading.Event().wait()


if __name__ == "__main__":
    config = EngineConfig(
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
        device_pages=1,
        device_memory_fraction=None,
        host_pages=1,
        storage=None,
        target_geometry=KVGeometry.heads(1, 1, 1),
        draft_geometry=None,
        request_timeout=1.0,
        flush_timeout=1.0,
        port=0,
        host="127.0.0.1",
    )
    with listen(config.host, config.port) as listener:
        serve(listener, StubbornEngine(sys.argv[1]), None, config, CollectorRegistry(), say)  # type: ignore[arg-type]
