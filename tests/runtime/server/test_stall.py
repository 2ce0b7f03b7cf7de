"""An engine that hangs: the real one, on the built-in pair, behind the real routes. Its step is held on purpose."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from speccache_runtime.engine import service
from speccache_runtime.engine.service import EngineService
from speccache_runtime.local import LocalOptions, parse_resource, plan_locally, read_resource
from speccache_runtime.model.tokenizer import Tokenizer
from speccache_runtime.server.app import create_app

SAMPLE = Path(__file__).parents[3] / "samples" / "tiny.yaml"
STALL_S = 2.0


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineService]:
    monkeypatch.setattr(service, "STALL_S", STALL_S)
    plan = plan_locally(parse_resource(read_resource(SAMPLE), SAMPLE), LocalOptions(storage_dir=tmp_path))
    started = EngineService(replace(plan.config, storage=None), CollectorRegistry())
    started.start()
    yield started
    started.stop()


@pytest.fixture
def http(listening, engine: EngineService) -> Iterator[httpx.Client]:
    swappable, port = listening
    tokenizer = Tokenizer.from_dir(engine.config.target_path)
    swappable.app = create_app(engine, tokenizer, engine.config, CollectorRegistry())
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as client:
        yield client


def test_a_step_that_does_not_end(http: httpx.Client, engine: EngineService, until) -> None:
    """/health says so, so that the kubelet restarts the container; the request in it and new ones get an answer."""
    assert engine._built is not None
    real, entered, goes_on = engine._built.engine, threading.Event(), threading.Event()
    step = real.step

    def hang() -> bool:
        if real.num_requests:
            entered.set()
            goes_on.wait(60)
        return step()

    real.step = hang  # type: ignore[method-assign]
    body = {"model": "tiny", "prompt": "def main():", "max_tokens": 4}
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
    client.start()
    assert entered.wait(10)
    assert http.get("/health").status_code == 200
    until(lambda: http.get("/health").status_code == 500, seconds=30)
    assert "has not finished a step for" in http.get("/health").json()["reason"]
    assert http.get("/ready").status_code == 503
    assert http.post("/v1/completions", json=body).json()["error"]["code"] == "engine_error"
    client.join(30)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (500, "engine_error")
    goes_on.set()
    until(lambda: http.get("/ready").status_code == 200, seconds=30)
    assert http.post("/v1/completions", json=body).status_code == 200
    until(lambda: real.num_requests == 0, seconds=30)


def test_an_idle_engine_does_not_stall(http: httpx.Client) -> None:
    """It turns without work too."""
    done = threading.Event()
    threading.Timer(2 * STALL_S, done.set).start()
    seen = set()
    while not done.is_set():
        seen.add(http.get("/health").status_code)
    assert seen == {200}
