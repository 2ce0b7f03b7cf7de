"""The server process: when it listens, how it ends, what it says. Signals go to a real process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from speccache_runtime.config import EngineConfig
from speccache_runtime.core import Finish
from speccache_runtime.errors import ConfigError, EngineFailed, ModelError
from speccache_runtime.server.early import listen
from speccache_runtime.server.run import SAME_SIGNAL_SECONDS, serve

pytestmark = pytest.mark.program

STUBBORN = Path(__file__).parent / "stubborn_server.py"


class Said:
    """Collects what the process says and waits for a word in it."""

    def __init__(self) -> None:
        self.text = ""
        self._changed = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._changed:
            self.text += text
            self._changed.notify_all()

    def wait_for(self, word: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: word in self.text, 10), f"{word!r} was not said, but {self.text!r}"


def url_of(said: Said) -> str:
    said.wait_for("/v1/completions")
    return said.text.partition("curl ")[2].partition("/v1")[0]


@pytest.fixture
def said() -> Said:
    return Said()


def in_background(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def serve_on(config: EngineConfig, engine, tokenizer, said: Said) -> None:
    with listen(config.host, config.port) as listener:
        serve(listener, engine, tokenizer, config, CollectorRegistry(), said)


def test_an_engine_that_fails_ends_the_process_after_its_requests(engine_config, make_engine, make_tokenizer, said):
    engine, seen = make_engine(), []
    engine.gate = threading.Semaphore(1)
    engine.script = [b"a", RuntimeError("the device is gone")]

    def client() -> None:
        with httpx.stream("POST", f"{url_of(said)}/v1/completions", json=body, timeout=10) as answer:
            for chunk in answer.iter_text():
                seen.append(chunk)
                if len(seen) == 1:
                    engine.failed = "engine failed: the device is gone"
                    engine.gate.release()
                    engine.over.set()

    body = {"model": engine_config.served_name, "prompt": "x", "stream": True}
    asking = in_background(client)
    with pytest.raises(EngineFailed, match="the device is gone"):
        serve_on(engine_config, engine, make_tokenizer(), said)
    asking.join(10)
    assert "the device is gone" in seen[-1]


def test_drains_on_sigterm(engine_config, make_engine, make_tokenizer, said):
    """The running request gets its whole answer, new ones are refused meanwhile, the engine drains, then stops."""
    engine, calls, answers = make_engine(), [], []
    engine.gate = threading.Semaphore(1)
    engine.script = [b"a", b"b", Finish.LENGTH]
    draining = threading.Event()

    def drain(request_timeout: float, flush_timeout: float) -> None:
        calls.append(("drain", request_timeout, flush_timeout))
        draining.set()
        engine.ready = False
        running.join(10)

    engine.drain, engine.stop = drain, lambda: calls.append(("stop",))

    def client() -> None:
        url = url_of(said)
        with (
            httpx.Client(base_url=url, timeout=10) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            for chunk in answer.iter_text():
                answers.append(chunk)
                if len(answers) == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                    assert draining.wait(5)
                    refused.append(httpx.post(f"{url}/v1/completions", json=body).status_code)
                    refused.append(httpx.get(f"{url}/ready").status_code)
                    refused.append(httpx.get(f"{url}/health").status_code)
                    engine.gate.release(10)

    body, refused = {"model": "m", "prompt": "hi", "stream": True}, []
    running = in_background(client)
    serve_on(engine_config, engine, make_tokenizer(), said)
    assert "".join(answers).endswith("data: [DONE]\n\n")
    assert refused == [503, 503, 200]
    assert calls == [("drain", 1.0, 1.0), ("stop",)]
    assert said.text.startswith("loading builtin://tiny … 0.")
    assert "draining" in said.text


def test_answers_probes_while_loading(engine_config, make_engine, make_tokenizer, said):
    """Alive and not ready, from the first moment on."""
    engine, loaded, probes = make_engine(), threading.Event(), []
    engine.ready = False

    def start() -> None:
        assert loaded.wait(10)
        engine.ready = True

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def client() -> None:
        said.wait_for("loading")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            transport_ready(http)
            probes.extend(http.get(path).status_code for path in ("/health", "/ready", "/v1/models"))
            loaded.set()
            said.wait_for("is ready")
            probes.append(http.get("/ready").status_code)
        os.kill(os.getpid(), signal.SIGTERM)

    engine.start = start
    in_background(client)
    serve_on(replace(engine_config, port=port), engine, make_tokenizer(), said)
    assert probes == [200, 503, 200, 200]


def transport_ready(http: httpx.Client) -> None:
    for _ in range(500):
        try:
            http.get("/health")
        except httpx.ConnectError:
            threading.Event().wait(0.01)
        else:
            return
    raise AssertionError("the port was not opened")


def test_model_that_cannot_be_loaded(engine_config, make_engine, make_tokenizer, said):
    """The start ends with the error, and the engine is freed."""
    engine, stopped = make_engine(), threading.Event()

    def start() -> None:
        raise ModelError("the weights are cut off")

    engine.start, engine.stop = start, stopped.set
    with pytest.raises(ModelError, match="cut off"):
        serve_on(engine_config, engine, make_tokenizer(), said)
    assert stopped.is_set()
    assert said.text.endswith("failed\n")


def test_port_in_use():
    """Told with the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: .*--port"):
            listen("127.0.0.1", port)


def test_address_that_is_not_ours():
    """A wrong --host is a wrong configuration, not a traceback."""
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        listen("203.0.113.1", 0)
    with pytest.raises(ConfigError, match="cannot listen on no such host"):
        listen("no such host", 0)


def stubborn(where: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(STUBBORN), where], stdout=subprocess.PIPE, text=True)


def read_until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    text = ""
    while word not in text:
        read = os.read(process.stdout.fileno(), 4096).decode()
        assert read, f"ended after {text!r}"
        text += read
    return text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_at_once(number):
    """Whoever does not want to wait for a drain sends the signal again; twice within a moment is still once."""
    with stubborn("drain") as process:
        read_until(process, "is ready")
        process.send_signal(number)
        process.send_signal(number)
        read_until(process, "draining")
        assert process.poll() is None
        threading.Event().wait(SAME_SIGNAL_SECONDS)
        process.send_signal(number)
        assert "at once" in read_until(process, "lost\n")
        assert process.wait(10) == 130


def test_signal_while_loading():
    """There is nothing to drain yet: the process ends without waiting for the model."""
    with stubborn("load") as process:
        read_until(process, "loading")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert "engine stopped" in process.communicate()[0]
