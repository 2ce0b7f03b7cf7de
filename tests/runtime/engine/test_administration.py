"""The storage tier of a serving engine looked at, changed, taken away and flushed, from other threads."""

import dataclasses
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from speccache_api.storage_target import BucketTarget, VolumeTarget
from speccache_runtime.cache.storage import registry
from speccache_runtime.cache.storage.base import BackendError
from speccache_runtime.cache.storage.breaker import BreakerState
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.config import StorageConfig
from speccache_runtime.core import Finish, Output, Request, SamplingParams, Tier, Usage
from speccache_runtime.engine import administration
from speccache_runtime.engine.service import EngineService
from speccache_runtime.errors import BadRequest, Conflict, Draining, Overloaded, StorageError

PATIENCE_S = 60.0
Start = Callable[..., EngineService]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    made = {name: tmp_path / name for name in ("one", "other")}
    for folder in made.values():
        folder.mkdir()
    return made


@pytest.fixture
def start(pair: Any, tools: SimpleNamespace, folders: dict[str, Path]) -> Iterator[Start]:
    """Starts services over the first folder, or with changed settings; all are stopped at the end."""
    made: list[EngineService] = []

    def begin(**changes: Any) -> EngineService:
        config = tools.settings(pair, folders["one"])
        service = EngineService(dataclasses.replace(config, **changes), CollectorRegistry())
        service.start()
        made.append(service)
        return service

    yield begin
    for service in made:
        service.stop()
        assert service._built is not None
        service._built.engine.cache.check_integrity()


def in_folder(folder: Path, capacity: int | None = None) -> StorageConfig:
    return StorageConfig(VolumeTarget(claim=None, path=str(folder)), "Recompute", capacity)


def ask(service: EngineService, text: list[int], name: str = "r") -> Usage:
    """A whole request."""
    ended = threading.Event()
    outputs: list[Output] = []

    def collect(output: Output) -> None:
        outputs.append(output)
        if output.finish is not None:
            ended.set()

    service.submit(Request(name, tuple(text), SamplingParams(max_tokens=4)), collect)
    assert ended.wait(PATIENCE_S)
    assert outputs[-1].finish is Finish.LENGTH
    assert outputs[-1].usage is not None
    return outputs[-1].usage


def test_the_report_says_what_is_attached_and_how_it_is(start: Start, folders: dict[str, Path]) -> None:
    service = start()
    ask(service, list(range(40)))
    assert service.storage.flush(PATIENCE_S).left == 0
    report = service.storage.report()
    assert report.config == in_folder(folders["one"])
    assert report.state is not None
    assert (report.state.read, report.state.write) == (BreakerState.CLOSED, BreakerState.CLOSED)
    assert (report.unstored, report.ending) == (0, 0)


def test_changed_storage_serves_the_next_pod(start: Start, folders: dict[str, Path], tools: SimpleNamespace) -> None:
    text = tools.random_tokens(41, seed=3)
    first = start()
    ask(first, text)
    first.storage.attach(in_folder(folders["other"], 2**30))
    assert first.storage.report().config == in_folder(folders["other"], 2**30)
    flushed = first.storage.flush(PATIENCE_S)
    assert (flushed.written, flushed.left) == (5, 0)
    first.stop()
    shutil.rmtree(folders["one"])
    second = start(storage=in_folder(folders["other"]))
    assert ask(second, text).cached_tokens[Tier.STORAGE] == 40


@pytest.mark.usefixtures("s3_environment")
def test_a_bucket_takes_the_place_of_a_volume(
    start: Start, folders: dict[str, Path], tools: SimpleNamespace, s3_server: Any
) -> None:
    """One that is not there changes nothing."""
    s3_server.make_bucket("admin")
    bucket = BucketTarget(
        bucket="admin",
        prefix="a",
        endpoint=s3_server.endpoint,
        region=None,
        force_path_style=True,
        credentials_secret=None,
        ca_bundle_config_map=None,
        service_account=None,
    )
    text = tools.random_tokens(41, seed=9)
    first = start()
    ask(first, text)
    with pytest.raises(BackendError) as refused:
        first.storage.attach(StorageConfig(bucket.model_copy(update={"bucket": "not-there"}), "Recompute"))
    assert refused.value.code == "BucketNotFound"
    first.storage.attach(StorageConfig(bucket, "Recompute"))
    assert first.storage.flush(PATIENCE_S).left == 0
    first.storage.detach()
    first.stop()
    second = start(storage=None)
    second.storage.attach(StorageConfig(bucket, "Recompute"))
    assert ask(second, text).cached_tokens[Tier.STORAGE] == 40


def test_without_storage_serving_goes_on(start: Start, folders: dict[str, Path], tools: SimpleNamespace) -> None:
    text = tools.random_tokens(41, seed=4)
    service = start()
    service.storage.detach()
    assert service.storage.report().config is None
    service.storage.detach()  # once more is harmless
    ask(service, text)
    assert ask(service, text).cached_tokens[Tier.DEVICE] == 40
    with pytest.raises(Conflict, match="no storage is attached"):
        service.storage.flush(PATIENCE_S)
    assert tools.stored(folders["one"], "t") == []
    service.storage.attach(in_folder(folders["one"]))
    assert service.storage.flush(PATIENCE_S).written == 5
    service.drain(PATIENCE_S, PATIENCE_S)


def test_storage_that_cannot_be_used_changes_nothing(
    start: Start, folders: dict[str, Path], tools: SimpleNamespace
) -> None:
    service = start()
    with pytest.raises(BackendError) as refused:
        service.storage.attach(in_folder(folders["one"] / "missing"))
    assert refused.value.code == "ENOENT"
    with pytest.raises(BadRequest) as small:
        service.storage.attach(in_folder(folders["other"], 4097))
    assert small.value.field == "capacityBytes"
    assert service.storage.report().config == in_folder(folders["one"])
    ask(service, tools.random_tokens(41, seed=5))
    assert service.storage.flush(PATIENCE_S).left == 0
    assert len(tools.stored(folders["one"], "t")) == 5


def test_storage_that_does_not_answer_is_given_up(
    start: Start, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, answers = start(), threading.Event()
    monkeypatch.setattr(registry, "PROBE_S", 0.2)
    monkeypatch.setattr(registry, "PATIENCE_S", 0.1)
    monkeypatch.setattr(FileBackend, "probe", lambda self: answers.wait(PATIENCE_S))
    with pytest.raises(StorageError, match="has not answered"):
        service.storage.attach(in_folder(folders["other"]))
    answers.set()
    assert service.storage.report().config == in_folder(folders["one"])


def test_a_flush_fills_a_volume_that_was_emptied(
    start: Start, folders: dict[str, Path], tools: SimpleNamespace
) -> None:
    service = start()
    ask(service, tools.random_tokens(41, seed=6))
    assert service.storage.flush(PATIENCE_S).left == 0
    for path in tools.stored(folders["one"], "t") + tools.stored(folders["one"], "d"):
        path.unlink()
    flushed = service.storage.flush(PATIENCE_S)
    assert (flushed.written, flushed.left) == (5, 0)
    assert [len(tools.stored(folders["one"], half)) for half in "td"] == [5, 5]
    again = service.storage.flush(PATIENCE_S)
    assert (again.written, again.left) == (0, 0)


def test_a_flush_ends_in_time_and_says_what_is_left(
    start: Start, folders: dict[str, Path], tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    ask(service, tools.random_tokens(41, seed=7))
    assert service.storage.flush(PATIENCE_S).left == 0
    for path in tools.stored(folders["one"], "t"):
        path.unlink()

    def full(*_: object) -> bool:
        raise BackendError("ENOSPC", "full")

    with monkeypatch.context() as patch:
        patch.setattr(FileBackend, "write", full)
        flushed = service.storage.flush(0.5)
    assert (flushed.written, flushed.left) == (0, 5)
    assert service.storage.report().unstored == 5
    assert service.storage.flush(PATIENCE_S).left == 0


def test_an_engine_that_is_busy_for_too_long_changes_nothing(
    start: Start, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not later either, when the caller has long been told that it was not done."""
    service, begun, go_on = start(), threading.Event(), threading.Event()
    monkeypatch.setattr(administration, "TURN_S", 0.05)

    def hold(_cache: object) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    held = service.between_steps(hold)
    assert begun.wait(PATIENCE_S)
    with pytest.raises(Overloaded):
        service.storage.attach(in_folder(folders["other"]))
    go_on.set()
    held.result(PATIENCE_S)
    monkeypatch.setattr(administration, "TURN_S", PATIENCE_S)
    assert service.storage.report().config == in_folder(folders["one"])


def test_changes_while_many_requests_run(start: Start, folders: dict[str, Path], tools: SimpleNamespace) -> None:
    """Every request is answered, whatever it waited for."""
    service, over = start(device_pages=40, host_pages=20), threading.Event()
    failures: list[BaseException] = []

    def change() -> None:
        try:
            while not over.is_set():
                service.storage.attach(in_folder(folders["other"]))
                service.storage.flush(PATIENCE_S)
                service.storage.detach()
                service.storage.attach(in_folder(folders["one"], 2**20))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    changing = threading.Thread(target=change)
    changing.start()
    texts = [tools.random_tokens(41 + n % 3, seed=n % 4) for n in range(24)]
    asking = [
        threading.Thread(target=lambda n=n: [ask(service, texts[n + step], f"{n}-{step}") for step in range(0, 24, 4)])  # type: ignore[misc]
        for n in range(4)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    over.set()
    changing.join(PATIENCE_S)
    assert failures == []
    assert service.failed is None
    service.between_steps(lambda cache: cache.check_integrity()).result(PATIENCE_S)


def test_a_drain_ends_a_flush(
    start: Start, folders: dict[str, Path], tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain writes the same pages, and what is told to end must not wait for somebody's hour."""
    service, tried = start(flush_timeout=0.5), threading.Event()

    def full(*_: object) -> bool:
        tried.set()
        raise BackendError("ENOSPC", "full")

    monkeypatch.setattr(FileBackend, "write", full)
    ask(service, tools.random_tokens(41, seed=7))
    ended: list[BaseException] = []

    def flush() -> None:
        try:
            service.storage.flush(PATIENCE_S * 10)
        except Draining as error:
            ended.append(error)

    flushing = threading.Thread(target=flush)
    flushing.start()
    assert tried.wait(PATIENCE_S)
    service.drain(PATIENCE_S, 0.5)
    flushing.join(PATIENCE_S)
    assert not flushing.is_alive()
    assert len(ended) == 1


def test_nothing_is_changed_once_a_drain_has_begun(start: Start, folders: dict[str, Path]) -> None:
    service = start()
    service.drain(PATIENCE_S, PATIENCE_S)
    for ask_for in (service.storage.report, service.storage.detach, lambda: service.storage.flush(1)):
        with pytest.raises(Draining):
            ask_for()
    with pytest.raises(Draining):
        service.storage.attach(in_folder(folders["other"]))


def test_two_ranks_flush_and_refuse_a_change(start: Start, folders: dict[str, Path], tools: SimpleNamespace) -> None:
    service = start(tensor=2)
    ask(service, tools.random_tokens(41, seed=8))
    assert service.storage.flush(PATIENCE_S).left == 0
    for change in (service.storage.detach, lambda: service.storage.attach(in_folder(folders["other"]))):
        with pytest.raises(Conflict, match=r"2 ranks .* change kvCache.storage in the resource"):
            change()
    lost = tools.stored(folders["one"], "t")
    assert len(lost) == 10
    for path in lost[:4]:
        path.unlink()
    assert service.storage.flush(PATIENCE_S).left == 0
    assert tools.stored(folders["one"], "t") == lost
