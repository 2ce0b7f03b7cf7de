"""The engine on its own thread: submit, abort, drain and stop from other threads, and every request ends once."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from speccache_api.geometry import KVGeometry
from speccache_api.storage_target import VolumeTarget
from speccache_runtime.cache import paired
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.config import EngineConfig, StorageConfig
from speccache_runtime.core import Finish, Output, Request, SamplingParams, Tier
from speccache_runtime.engine.service import EngineService
from speccache_runtime.errors import BadRequest, ConfigError, Draining, ModelError, Overloaded, StorageError

PATIENCE_S = 60.0
PAGE = 8
OTHER, SAME_SIZE = KVGeometry.heads(1, 1, 1), KVGeometry.heads(3, 4, 4)
"""What memory might have been sized for by mistake: another size than the target's, and the same one."""


class Client:
    """Collects the outputs of one request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outputs: list[Output] = []
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        self.begun.set()
        if output.finish is not None:
            self.ended.set()

    def wait(self) -> Output:
        """The last output, which comes once."""
        assert self.ended.wait(PATIENCE_S), f"{self.name} was never answered"
        assert [o.finish is not None for o in self.outputs].count(True) == 1
        usage = self.outputs[-1].usage
        assert usage is not None
        assert usage.completion_tokens == len(self.tokens)
        return self.outputs[-1]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for output in self.outputs for token in output.tokens)


Start = Callable[..., EngineService]


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """The directory of the storage tier."""
    folder = tmp_path / "storage"
    folder.mkdir()
    return folder


@pytest.fixture
def config(pair: Any, tools: SimpleNamespace, storage: Path) -> EngineConfig:
    changes = {"page_size": PAGE, "device_pages": 40, "max_running": 4, "max_waiting": 8, "prefill_budget": 32}
    made: EngineConfig = tools.settings(pair, storage, **changes)
    return made


@pytest.fixture
def start(config: EngineConfig) -> Iterator[Start]:
    """Starts services with changed settings; all are stopped at the end and nobody may still wait then."""
    made: list[EngineService] = []

    def begin(**changes: Any) -> EngineService:
        service = EngineService(dataclasses.replace(config, **changes), CollectorRegistry())
        service.start()
        made.append(service)
        return service

    yield begin
    for service in made:
        service.stop()
        assert service._clients == {}


def submit(service: EngineService, name: str, prompt: list[int], new: int) -> Client:
    client = Client(name)
    service.submit(Request(name, tuple(prompt), SamplingParams(max_tokens=new)), client)
    return client


def until(condition: Callable[[], bool]) -> None:
    """Waits for something that another thread will do."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def hold(service: EngineService) -> threading.Event:
    """Keeps the engine thread in its next step until the event is set."""
    go_on = threading.Event()
    assert service._built is not None
    engine = service._built.engine
    step = engine.step

    def held() -> bool:
        if engine.num_requests:
            assert go_on.wait(PATIENCE_S)
        return step()

    engine.step = held  # type: ignore[method-assign]
    return go_on


def at_once(threads: list[threading.Thread]) -> None:
    """Runs them together, and waits for their ends."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)


def test_requests_from_many_threads_all_get_their_own_text(start: Start, pair: Any, tools: SimpleNamespace) -> None:
    service = start()
    texts = [tools.random_tokens(10 + n, seed=n) for n in range(12)]
    clients: list[Client] = []
    threads = [
        threading.Thread(target=lambda n=n: clients.append(submit(service, f"r{n}", texts[n], 10)))  # type: ignore[misc]
        for n in range(12)
    ]
    at_once(threads)
    assert len(clients) == 12
    for client in clients:
        assert client.wait().finish is Finish.LENGTH
        assert client.tokens == pair.greedy(texts[int(client.name[1:])], 10)


def test_a_restart_serves_from_storage_what_was_served_before(start: Start, pair: Any, tools: SimpleNamespace) -> None:
    text = tools.random_tokens(41, seed=1)
    first = start()
    cold = submit(first, "cold", text, 12).wait()
    first.drain(PATIENCE_S, PATIENCE_S)
    first.stop()
    second = start(prefill_budget=64)
    warm = submit(second, "warm", text, 12).wait()
    assert cold.usage is not None
    assert warm.usage is not None
    assert warm.usage.cached_tokens[Tier.STORAGE] == 40
    assert warm.usage.accepted_by_step == cold.usage.accepted_by_step


def test_what_can_never_fit_is_refused_with_the_field_at_fault(start: Start, tools: SimpleNamespace) -> None:
    service = start()
    assert service.limits.max_context == 40 * PAGE
    assert service.limits.vocab_size == tools.VOCAB
    for prompt, new, field in (
        ([1] * 310, 11, "max_tokens"),
        ([1] * 320, 1, "prompt"),
        ([1, tools.VOCAB], 1, "prompt"),
        ([1, -1], 1, "prompt"),
    ):
        with pytest.raises(BadRequest) as refused:
            submit(service, "wrong", prompt, new)
        assert refused.value.field == field
    assert submit(service, "right", [1] * 310, 10).wait().finish is Finish.LENGTH


def test_a_full_queue_is_told_at_once(start: Start) -> None:
    service = start()
    go_on = hold(service)
    clients = [submit(service, f"r{n}", [1, 2, 3], 2) for n in range(12)]
    with pytest.raises(Overloaded) as refused:
        submit(service, "late", [1], 1)
    assert refused.value.retry_after > 0
    go_on.set()
    for client in clients:
        assert client.wait().finish is Finish.LENGTH
    assert submit(service, "late", [1], 1).wait().finish is Finish.LENGTH


def test_an_id_in_use_is_refused(start: Start) -> None:
    service = start()
    go_on = hold(service)
    first = submit(service, "same", [1, 2, 3], 2)
    with pytest.raises(ValueError, match="same is in use"):
        submit(service, "same", [4], 2)
    go_on.set()
    assert first.wait().finish is Finish.LENGTH
    assert submit(service, "same", [4], 2).wait().finish is Finish.LENGTH


def test_an_abort_ends_a_request_with_what_it_has(start: Start, pair: Any, tools: SimpleNamespace) -> None:
    service = start()
    text = tools.random_tokens(12, seed=9)
    client = submit(service, "long", text, 250)
    assert client.begun.wait(PATIENCE_S)
    service.abort("long")
    service.abort("nobody")
    last = client.wait()
    assert last.finish in (Finish.ABORT, Finish.LENGTH)
    assert client.tokens[:20] == pair.greedy(text, 20)[: len(client.tokens)]
    assert submit(service, "next", text, 5).wait().finish is Finish.LENGTH


def test_an_abort_right_behind_its_submit_is_not_lost(start: Start) -> None:
    service = start()
    go_on = hold(service)
    client = submit(service, "brief", [1, 2, 3], 100)
    service.abort("brief")
    go_on.set()
    assert client.wait().finish is Finish.ABORT


def test_a_caller_that_has_all_it_wants_ends_its_request_as_stopped(start: Start) -> None:
    """The counter says so too: a text that ended at a stop string is no aborted one."""
    service = start()
    go_on = hold(service)
    client = submit(service, "enough", [1, 2, 3], 100)
    service.abort("enough", Finish.STOP)
    go_on.set()
    assert client.wait().finish is Finish.STOP
    ended = service._metrics.requests.labels
    until(lambda: ended(finish=Finish.STOP)._value.get() == 1)
    assert ended(finish=Finish.ABORT)._value.get() == 0


def test_a_callback_that_fails_ends_its_own_request_only(
    start: Start, pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service = start()
    go_on = hold(service)
    calls: list[Output] = []

    def failing(output: Output) -> None:
        calls.append(output)
        raise ConnectionError("the client went away")

    service.submit(Request("bad", (1, 2), SamplingParams(max_tokens=60)), failing)
    good = submit(service, "good", [5, 6, 7], 20)
    go_on.set()
    assert good.wait().finish is Finish.LENGTH
    assert good.tokens == pair.greedy([5, 6, 7], 20)
    assert service.failed is None
    assert submit(service, "next", [1], 2).wait().finish is Finish.LENGTH
    assert [o.finish for o in calls] == [None, Finish.ABORT], "it was computed for nobody"
    assert "the client went away" in caplog.text


@pytest.mark.parametrize("where", ["step", "add"])
def test_a_failure_ends_everybody_with_an_error_and_stays_visible(
    start: Start, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    service = start()
    go_on = hold(service)
    assert service._built is not None
    engine = service._built.engine
    running = submit(service, "running", [1, 2, 3], 50)
    until(lambda: engine.num_requests == 1)

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    if where == "step":
        engine._runner._target.forward = broken  # type: ignore[method-assign,assignment]
    else:
        engine.add = broken  # type: ignore[method-assign]
    waiting = [submit(service, f"waiting{n}", [1, 2, 3], 5) for n in range(5)]
    go_on.set()
    try:
        for client in [running, *waiting]:
            last = client.wait()
            if last.finish is not Finish.LENGTH:
                assert last.finish is Finish.ERROR
                assert last.error == "engine failed: RuntimeError: the device is gone"
        assert waiting[-1].wait().finish is Finish.ERROR
        assert service.failed == "engine failed: RuntimeError: the device is gone"
        assert not service.ready
        with pytest.raises(Draining, match="the device is gone"):
            submit(service, "late", [1], 1)
        assert "engine failed" in caplog.text
        begun = threading.Thread(target=lambda: service.drain(PATIENCE_S * 10, PATIENCE_S * 10))
        begun.start()
        begun.join(PATIENCE_S)
        assert not begun.is_alive(), "a drain waits for an engine that is dead"
    finally:
        engine._runner._target.__dict__.pop("forward", None)


def test_a_drain_refuses_new_requests_and_finishes_and_stores_the_running_ones(
    start: Start, storage: Path, pair: Any, tools: SimpleNamespace
) -> None:
    service = start()
    go_on = hold(service)
    text = tools.random_tokens(41, seed=2)
    clients = [submit(service, f"r{n}", text[n:], 20) for n in range(6)]
    drained = threading.Thread(target=lambda: service.drain(PATIENCE_S, PATIENCE_S))
    drained.start()
    until(lambda: not service.ready)
    with pytest.raises(Draining) as refused:
        submit(service, "late", [1], 1)
    assert refused.value.retry_after > 0
    go_on.set()
    drained.join(PATIENCE_S)
    assert not drained.is_alive()
    for n, client in enumerate(clients):
        assert client.wait().finish is Finish.LENGTH
        assert client.tokens == pair.greedy(text[n:], 20)
    targets, drafts = (tools.stored(storage, half) for half in "td")
    assert len(targets) == len(drafts) >= 6 * 5
    service.drain(PATIENCE_S, PATIENCE_S)  # once more is harmless


def test_a_drain_aborts_what_does_not_finish_in_time(
    start: Start, caplog: pytest.LogCaptureFixture, tools: SimpleNamespace
) -> None:
    service = start()
    engine = service._built.engine  # type: ignore[union-attr]
    engine.scheduler.schedule = list  # type: ignore[method-assign]  # nothing is ever computed
    client = submit(service, "stuck", [1, 2, 3], 5)
    with caplog.at_level(logging.WARNING):
        service.drain(0.05, PATIENCE_S)
    assert client.wait().finish is Finish.ABORT
    assert "aborted" in caplog.text


def test_a_flush_that_takes_too_long_is_given_up(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tools: SimpleNamespace
) -> None:
    go_on = threading.Event()
    write = FileBackend.write

    def slow(*args: Any) -> bool:
        assert go_on.wait(PATIENCE_S)
        return write(*args)

    monkeypatch.setattr(FileBackend, "write", slow)
    service = start()
    submit(service, "r", tools.random_tokens(41, seed=3), 2).wait()
    service.drain(PATIENCE_S, 0.05)
    assert "not written" in caplog.text
    assert service._metrics.dropped_pages.labels(reason="drain")._value.get() == 5
    service.stop()  # while the write hangs
    go_on.set()


def test_a_drain_tries_again_while_storage_fails(
    start: Start, storage: Path, caplog: pytest.LogCaptureFixture, tools: SimpleNamespace
) -> None:
    """The breaker is open when the drain begins, and the volume is well again a moment later."""
    root = storage
    service = start()
    gone = root.rename(root.with_name("gone"))
    submit(service, "r", tools.random_tokens(41, seed=3), 2).wait()
    until(lambda: "storage breaker for write operations is now open" in caplog.text)
    drained = threading.Thread(target=lambda: service.drain(PATIENCE_S, PATIENCE_S))
    drained.start()
    until(lambda: service._flushing)
    gone.rename(root)
    drained.join(PATIENCE_S)
    assert not drained.is_alive()
    assert len(tools.stored(root, "t")) == len(tools.stored(root, "d")) == 5
    assert "not written" not in caplog.text


def test_reads_that_hang_hold_up_neither_requests_nor_the_flush(
    start: Start,
    storage: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tools: SimpleNamespace,
) -> None:
    text = tools.random_tokens(41, seed=3)
    first = start()
    submit(first, "r", text, 2).wait()
    first.drain(PATIENCE_S, PATIENCE_S)
    go_on = threading.Event()
    monkeypatch.setattr(FileBackend, "read", lambda *_: go_on.wait(PATIENCE_S))
    monkeypatch.setattr(paired, "PREFETCH_DEADLINE_S", 0.01)
    second = start()
    for n in range(3):
        last = submit(second, f"r{n}", [*text[:24], n, *text[25:]], 2).wait()
        assert last.finish is Finish.LENGTH
    second.drain(PATIENCE_S, PATIENCE_S)
    assert len(tools.stored(storage, "t")) == 5 + 3 * 2
    assert "not written" not in caplog.text
    go_on.set()


def test_stop_answers_whoever_still_waits(start: Start) -> None:
    service = start()
    go_on = hold(service)
    clients = [submit(service, f"r{n}", [1, 2, 3], 200) for n in range(8)]
    stopper = threading.Thread(target=service.stop)
    stopper.start()
    go_on.set()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()
    for client in clients:
        assert client.wait().finish in (Finish.ERROR, Finish.LENGTH)
    assert not service.ready
    with pytest.raises(Draining):
        submit(service, "late", [1], 1)
    service.stop()
    service.drain(PATIENCE_S * 10, PATIENCE_S * 10)  # returns at once


def test_a_service_that_never_started_can_be_drained_and_stopped(config: EngineConfig) -> None:
    service = EngineService(config, CollectorRegistry())
    assert not service.ready
    service.drain(PATIENCE_S * 10, PATIENCE_S * 10)
    service.stop()


def test_a_storm_of_submits_and_aborts_leaves_nothing_behind(start: Start, tools: SimpleNamespace) -> None:
    service = start(device_pages=12, max_waiting=200)
    texts = [tools.random_tokens(8 + 5 * n, seed=n) for n in range(8)]
    clients: list[Client] = []

    def storm(thread: int) -> None:
        for n in range(12):
            client = submit(service, f"t{thread}-{n}", texts[(thread + n) % 8], 12)
            clients.append(client)
            if n % 3 == thread % 3:
                service.abort(client.name)

    threads = [threading.Thread(target=storm, args=(n,)) for n in range(4)]
    at_once(threads)
    assert len(clients) == 48
    for client in clients:
        assert client.wait().finish in (Finish.LENGTH, Finish.ABORT)
    service.drain(PATIENCE_S, PATIENCE_S)
    cache = service._built.engine.cache  # type: ignore[union-attr]
    cache.check_integrity()
    assert all((e.device_pins, e.host_pins) == (0, 0) for e in cache.index.entries())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target_path": Path("/nowhere")}, ModelError, "/nowhere"),
        ({"draft_path": Path("/nowhere")}, ModelError, "/nowhere"),
        (
            {"target_geometry": OTHER},
            ModelError,
            "the target model's pages take 3072 bytes but memory was sized for 64",
        ),
        ({"target_geometry": SAME_SIZE}, ModelError, r"3 layers of k 2x8 \+ v 2x8, not 3 layers of k 4x4 \+ v 4x4"),
        ({"draft_geometry": OTHER}, ModelError, "the draft model's pages take"),
        (
            {"storage": StorageConfig(VolumeTarget(claim=None, path="/nowhere"), "Recompute")},
            StorageError,
            "/nowhere does not exist",
        ),
        ({"device": "cuda", "kv_dtype": "bfloat16"}, ConfigError, "nvidia.com/gpu"),
    ],
)
def test_what_is_wrong_with_the_parts_stops_the_start_in_one_line(
    config: EngineConfig, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        return
    service = EngineService(dataclasses.replace(config, **changes), CollectorRegistry())
    with pytest.raises(error, match=message) as refused:
        service.start()
    assert "\n" not in str(refused.value)
    assert not service.ready
    service.stop()


def test_a_start_without_speculation_and_without_storage(start: Start, pair: Any) -> None:
    service = start(algorithm="None", draft_uri=None, draft_path=None, num_steps=0, draft_geometry=None, storage=None)
    client = submit(service, "plain", [3, 1, 4], 10)
    last = client.wait()
    assert client.tokens == pair.greedy([3, 1, 4], 10)
    assert last.usage is not None
    assert last.usage.accept_length == 10 / 9
    service.drain(PATIENCE_S, PATIENCE_S)
