"""A replica of two ranks: real processes, real storage, the same text; and what happens when one of them goes wrong.

In: engines and services over two ranks of the small pair. Out: how tensors are split (model/test_split.py).
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from speccache_api.storage_target import VolumeTarget
from speccache_runtime.cache.keys import KeyChain
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairRead, PairWrite, Run
from speccache_runtime.cache.transfer import Move
from speccache_runtime.cache.transfer_cpu import DoneJob
from speccache_runtime.cache.workers import MOST
from speccache_runtime.config import EngineConfig, StorageConfig
from speccache_runtime.core import Finish, Output, Request, Sampling, SamplingParams, Tier
from speccache_runtime.engine.build import Built, build_engine
from speccache_runtime.engine.parallel import leader
from speccache_runtime.engine.parallel.channel import MAX_BYTES, Channel
from speccache_runtime.engine.parallel.follower import _Follower
from speccache_runtime.engine.parallel.messages import (
    Cancel,
    Failed,
    Found,
    Hurry,
    Load,
    Lookup,
    Message,
    Moved,
    Propose,
    Read,
    Step,
    Stop,
    WasRead,
    WasWritten,
    Write,
    decode,
    encode,
)
from speccache_runtime.engine.parallel.spread import SpreadStorage, SpreadTransfer
from speccache_runtime.engine.service import EngineService
from speccache_runtime.errors import RankError
from speccache_runtime.metrics import Metrics
from speccache_runtime.steps import Chosen, DraftRows, Group, StepPlan, StepResult, Table

NEW = 24
PATIENCE_S = 60.0


def settings(pair: Any, folder: Path | None, tensor: int = 2, **changes: Any) -> EngineConfig:
    config = EngineConfig(
        name="pair",
        namespace="default",
        served_name="pair",
        device="cpu",
        kv_dtype="float32",
        target_uri="made-up",
        target_path=pair.target_path,
        algorithm="EAGLE3",
        draft_uri="made-up",
        draft_path=pair.draft_path,
        num_steps=3,
        page_size=8,
        device_pages=64,
        device_memory_fraction=None,
        host_pages=64,
        storage=StorageConfig(VolumeTarget(claim=None, path=str(folder)), "Recompute") if folder else None,
        target_geometry=pair.target.facts.geometry,
        draft_geometry=pair.head.facts.geometry,
        request_timeout=PATIENCE_S,
        flush_timeout=PATIENCE_S,
        prefill_budget=64,
        tensor=tensor,
    )
    return dataclasses.replace(config, **changes)


class Replica:
    """An engine over all its ranks, stepped by the test."""

    def __init__(self, config: EngineConfig) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.outputs: dict[str, list[Output]] = {}
        self.woken = threading.Event()
        self.built: Built = build_engine(config, self.metrics, self._keep, self.woken.set)
        self.engine = self.built.engine

    def _keep(self, output: Output) -> None:
        self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, prompts: Sequence[Sequence[int]], new: int = NEW) -> list[list[Output]]:
        for number, prompt in enumerate(prompts):
            self.outputs.pop(f"r{number}", None)
            self.engine.add(Request(f"r{number}", tuple(prompt), SamplingParams(max_tokens=new)))
        while self.engine.num_requests:
            self.woken.clear()
            if not self.engine.step():
                assert self.woken.wait(PATIENCE_S), "nothing can be computed and nothing arrives"
        return [self.outputs[f"r{number}"] for number in range(len(prompts))]

    def settle(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.engine.cache.busy:
            self.woken.clear()
            if not self.engine.cache.poll():
                self.woken.wait(0.05)
            assert time.monotonic() < deadline, "nothing more happens"
        self.engine.cache.check_integrity()

    def lose_the_device(self) -> None:
        self.settle()
        index = self.engine.cache.index
        index.give_device(index.take_device(index.device.total) or [])

    def end(self) -> None:
        self.settle()
        self.engine.cache.store_all()
        self.settle()
        self.built.close()


def text(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.tokens)


def counts(answers: list[list[Output]]) -> list[tuple[int, ...]]:
    return [answer[-1].usage.accepted_by_step for answer in answers if answer[-1].usage]


def cached(answers: list[list[Output]]) -> list[dict[Tier, int]]:
    return [{t: n for t, n in a[-1].usage.cached_tokens.items() if n} for a in answers if a[-1].usage]


@pytest.fixture(scope="module")
def prompts(tools: SimpleNamespace) -> list[list[int]]:
    return [tools.random_tokens(41 + n, seed=10 + n) for n in range(4)]


def page_key(prompt: Sequence[int], page: int) -> bytes:
    chain = KeyChain(8)
    chain.extend(prompt, page + 1)
    return chain.keys[page]


def stored(folder: Path, half: str, key: bytes) -> list[Path]:
    """The objects of one half of a page, one for each rank."""
    return sorted(folder.glob(f"v2/*/{half}/*/*/{key.hex()}-*"))


def follower_pids(parent: int | str = "self") -> list[int]:
    """Processes of other ranks that this one, or `parent`, has started and that run."""
    found = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in children.read_text().split():
            if "speccache_runtime.engine.parallel" in (Path("/proc") / pid / "cmdline").read_text():
                found.append(int(pid))
    return found


def until(condition: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process computes: neither gone nor a dead one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- the same text, from every tier


def test_two_ranks_say_what_one_says_and_find_everything_again_after_a_restart(
    pair: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    one = Replica(settings(pair, tmp_path, tensor=1))
    alone = one.run(prompts)
    one.end()
    first = Replica(settings(pair, tmp_path))
    cold = first.run(prompts)
    assert cached(cold) == [{}] * 4, "two ranks took what one rank had stored"
    assert [text(answer) for answer in cold] == [pair.greedy(prompt, NEW) for prompt in prompts]
    assert counts(cold) == counts(alone), "two ranks accept other proposals than one"
    assert counts(first.run(prompts)) == counts(cold)
    first.lose_the_device()
    from_host = first.run(prompts)
    assert {tier for answer in cached(from_host) for tier in answer} == {Tier.HOST}
    assert counts(from_host) == counts(cold)
    first.end()
    assert follower_pids() == []
    namespaces = sorted((tmp_path / "v2").glob("*/[td]/*"))
    assert len(namespaces) == 6, "for one rank and each of two a target's and a draft's"
    second = Replica(settings(pair, tmp_path))
    restored = second.run(prompts)
    assert cached(restored) == [{Tier.STORAGE: (len(prompt) - 1) // 8 * 8} for prompt in prompts]
    assert [text(answer) for answer in restored] == [pair.greedy(prompt, NEW) for prompt in prompts]
    assert counts(restored) == counts(cold)
    second.end()


@pytest.mark.parametrize("algorithm", ["Standalone", "NGram"])
def test_two_ranks_accept_what_one_accepts_by_every_algorithm(
    pair: Any, prompts: list[list[int]], tmp_path: Path, algorithm: str
) -> None:
    has_model = algorithm == "Standalone"
    changes = {
        "algorithm": algorithm,
        "draft_path": pair.standalone_path if has_model else None,
        "draft_geometry": pair.standalone.facts.geometry if has_model else None,
    }
    one = Replica(settings(pair, tmp_path, tensor=1, **changes))
    alone = one.run(prompts)
    one.end()
    first = Replica(settings(pair, tmp_path, **changes))
    cold = first.run(prompts)
    assert [text(answer) for answer in cold] == [pair.greedy(prompt, NEW) for prompt in prompts]
    assert counts(cold) == counts(alone)
    first.end()
    second = Replica(settings(pair, tmp_path, **changes))
    restored = second.run(prompts)
    assert cached(restored) == [{Tier.STORAGE: (len(prompt) - 1) // 8 * 8} for prompt in prompts]
    assert counts(restored) == counts(cold)
    second.end()


def test_a_half_that_one_rank_lost_is_lost_for_all_and_made_again(
    pair: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    first = Replica(settings(pair, tmp_path))
    cold = first.run(prompts[:2])
    first.end()
    drafts = stored(tmp_path, "d", page_key(prompts[1], 2))
    targets = stored(tmp_path, "t", page_key(prompts[0], 1))
    assert (len(drafts), len(targets)) == (2, 2), "each rank has its own object of each half"
    drafts[0].unlink()
    data = bytearray(targets[1].read_bytes())
    data[5000] ^= 1
    targets[1].write_bytes(data)
    second = Replica(settings(pair, tmp_path))
    again = second.run(prompts[:2])
    assert [text(answer) for answer in again] == [pair.greedy(prompt, NEW) for prompt in prompts[:2]]
    assert counts(again) == counts(cold)
    assert cached(again) == [{Tier.STORAGE: 8}, {Tier.STORAGE: 16}]
    second.end()
    third = Replica(settings(pair, tmp_path))
    assert cached(third.run(prompts[:2])) == [{Tier.STORAGE: 40}] * 2
    third.end()


# ---- ranks that go wrong


@pytest.fixture
def service(pair: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineService]:
    monkeypatch.setattr(leader, "COLLECTIVE_TIMEOUT_S", 5.0)
    made = EngineService(settings(pair, None), CollectorRegistry())
    made.start()
    yield made
    made.stop()
    assert follower_pids() == []


class Client:
    """One request's outputs."""

    def __init__(self, service: EngineService, name: str, new: int) -> None:
        self.ended = threading.Event()
        self.begun = threading.Event()
        self.last: Output | None = None
        service.submit(Request(name, (1, 2, 3), SamplingParams(max_tokens=new)), self._take)

    def _take(self, output: Output) -> None:
        self.last = output
        self.begun.set()
        if output.finish is not None:
            self.ended.set()


def test_when_a_rank_hangs_every_request_ends_with_an_error(service: EngineService) -> None:
    """One that dies: `test_a_server_whose_rank_dies_answers_everybody_and_ends_with_an_error`."""
    clients = [Client(service, f"r{number}", 400) for number in range(3)]
    assert clients[0].begun.wait(PATIENCE_S)
    (pid,) = follower_pids()
    os.kill(pid, signal.SIGSTOP)
    for client in clients:
        assert client.ended.wait(PATIENCE_S), "a request has no end"
        assert client.last is not None
        assert client.last.finish is Finish.ERROR
    assert service.failed is not None
    assert not service.ready


def test_a_rank_that_dies_while_nobody_asks_anything_is_noticed(service: EngineService) -> None:
    (pid,) = follower_pids()
    os.kill(pid, signal.SIGKILL)
    until(lambda: service.failed is not None, "nobody noticed")
    assert "rank 1" in str(service.failed)


def test_a_rank_that_cannot_start_stops_the_start_with_its_words(pair: Any, tmp_path: Path) -> None:
    config = settings(pair, tmp_path)
    ranks = leader.Ranks(dataclasses.replace(config, target_path=tmp_path / "not there"), lambda: None)
    ranks.join(config)
    with pytest.raises(RankError, match=r"rank 1 failed.*not there"):
        ranks.wait_for("loaded")
    ranks.close()
    assert follower_pids() == []


RANK_ZERO = """
import sys, time
from speccache_api.storage_target import VolumeTarget
from speccache_runtime.config import EngineConfig
from speccache_runtime.engine.build import build_engine
from speccache_runtime.metrics import Metrics
from prometheus_client import CollectorRegistry
built = build_engine(EngineConfig.from_json(sys.stdin.read()), Metrics(CollectorRegistry()), print, lambda: None)
print("built", flush=True)
time.sleep(600)
"""


def test_other_ranks_do_not_outlive_the_first(pair: Any) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK_ZERO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(settings(pair, None).to_json())
    process.stdin.close()
    assert process.stdout.readline() == "built\n"
    (follower,) = follower_pids(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not runs(follower), "a rank computes for nobody")


SAMPLE = Path(__file__).parents[3] / "samples" / "tiny-two-ranks.yaml"


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of two ranks in a process of its own, and its address."""
    command = [sys.executable, "-m", "speccache_runtime", "serve", "-f", str(SAMPLE), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = ""
    while "curl " not in seen:
        line = process.stdout.readline()
        assert line, f"the server has ended: {seen}"
        seen += line
    yield process, seen.partition("curl ")[2].partition("/v1")[0]
    process.kill()
    process.communicate()


def ask(url: str, prompt: str, **more: Any) -> httpx.Response:
    body = {"model": "tiny-two-ranks", "prompt": prompt, "max_tokens": 24, "temperature": 0} | more
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def test_a_server_whose_rank_dies_answers_everybody_and_ends_with_an_error(
    served: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = served
    answer = ask(url, "def read_lines(path):")
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 24
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, url, prompt, max_tokens=2000) for prompt in ("class A:", "import os")]
        until(lambda: "speccache_requests_running 2" in httpx.get(f"{url}/metrics").text, "nobody is served")
        (follower,) = follower_pids(process.pid)
        os.kill(follower, signal.SIGKILL)
        for each in asked:
            assert each.result().status_code == 500
    assert process.wait(PATIENCE_S) == 1


def test_a_server_of_two_ranks_drains_and_leaves_nobody_behind(served: tuple[subprocess.Popen[str], str]) -> None:
    process, url = served
    (follower,) = follower_pids(process.pid)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, url, "class A:", max_tokens=200)
        until(lambda: "speccache_requests_running 1" in httpx.get(f"{url}/metrics").text, "nobody is served")
        process.send_signal(signal.SIGTERM)
        assert asked.result().json()["usage"]["completion_tokens"] == 200
    assert process.wait(PATIENCE_S) == 0
    assert not runs(follower)


# ---- messages


NUMBERS = st.integers(0, 2**40)
SMALL = st.lists(NUMBERS, max_size=4).map(tuple)
GROUPS = st.builds(
    Group,
    row=NUMBERS,
    start=NUMBERS,
    tokens=SMALL,
    held=NUMBERS,
    parents=SMALL,
    chooses=st.booleans(),
    sampling=st.builds(Sampling, st.floats(0, 5), st.floats(0.01, 1), NUMBERS),
    draft=st.builds(DraftRows, NUMBERS, SMALL, st.booleans()),
    propose=NUMBERS,
    left=NUMBERS,
    loads=SMALL,
)
PLANS = st.builds(
    StepPlan,
    tables=st.lists(st.builds(Table, NUMBERS, NUMBERS, SMALL, SMALL), max_size=2).map(tuple),
    decode=st.lists(GROUPS, max_size=2).map(tuple),
    extend=st.lists(GROUPS, max_size=2).map(tuple),
)
HEX = st.binary(max_size=32).map(bytes.hex)
READS = st.sampled_from([Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.ERROR, Outcome.DROPPED, Outcome.NOT_ASKED])
WRITES = st.sampled_from([Outcome.WRITTEN, Outcome.EXISTS, Outcome.ERROR, Outcome.DROPPED, Outcome.NOT_ASKED])
MESSAGES = st.one_of(
    st.builds(Step, PLANS),
    st.builds(
        Propose, st.builds(StepResult, st.lists(st.builds(Chosen, SMALL, NUMBERS), max_size=3).map(tuple)), SMALL
    ),
    st.builds(Load, NUMBERS, st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), max_size=3).map(tuple)),
    st.builds(Read, NUMBERS, HEX, HEX, NUMBERS, st.booleans()),
    st.builds(Write, NUMBERS, HEX, HEX, NUMBERS, st.booleans(), SMALL),
    st.builds(Cancel, NUMBERS),
    st.just(Hurry()),
    st.builds(Found, NUMBERS, NUMBERS, NUMBERS),
    st.builds(WasRead, NUMBERS, READS, READS),
    st.builds(WasWritten, NUMBERS, WRITES, WRITES),
    st.just(Stop()),
)


@given(st.lists(MESSAGES, max_size=5))
def test_messages_arrive_as_they_were_sent(messages: list[Message]) -> None:
    one, other = socket.socketpair()
    sender, receiver = Channel(one), Channel(other)
    for message in messages:
        sender.send(message)
    assert [receiver.receive() for _ in messages] == messages
    sender.close()
    assert receiver.receive() is None
    receiver.close()


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"{}", b'{"kind": "stop", "more": 1}', b'{"kind": "no such"}', b'{"kind": "moved"}', b"\xff"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(RankError, match="no message"):
        decode(data)


@pytest.mark.parametrize(
    "sent",
    [
        (MAX_BYTES + 1).to_bytes(4, "little"),
        b"\x05\x00",
        (50).to_bytes(4, "little") + b"{",
        (2).to_bytes(4, "little") + b"{}",
    ],
    ids=["endless", "half a length", "half a message", "empty"],
)
def test_a_torn_or_lying_connection_is_an_error(sent: bytes) -> None:
    one, other = socket.socketpair()
    receiver = Channel(other)
    one.sendall(sent)
    one.close()
    with pytest.raises(RankError):
        receiver.receive()
    receiver.close()


def test_messages_are_plain_json() -> None:
    """Nothing that a rank reads can run code."""
    assert json.loads(encode(Moved(3))) == {"number": 3, "kind": "moved"}


def test_a_bug_in_the_storage_of_a_rank_is_told_and_loses_no_answer() -> None:
    """It would otherwise end a thread, and rank 0 would wait for the answer."""

    class Store:
        def lookup(self, keys: object, parent: bytes) -> Run:
            raise ZeroDivisionError("a bug")

    here, there = (Channel(end) for end in socket.socketpair())
    follower = _Follower(here, None, None, None, Store())  # type: ignore[arg-type]
    for number in range(MOST + 1):
        follower._do(Lookup(number, ("00" * 32,), "00" * 32))
        assert there.receive() == Failed("ZeroDivisionError: a bug")
    here.close()
    there.close()


# ---- operations on all ranks


class Others:
    """Two other ranks that answer when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Callable[[list[Any]], None]]] = []
        self.told: list[Any] = []

    def ask(self, order: Callable[[int], Any], then: Callable[[list[Any]], None]) -> int:
        self.asked.append((order(len(self.asked)), then))
        return len(self.asked) - 1

    def tell(self, order: Any) -> None:
        self.told.append(order)

    def answer(self, *answers: Any) -> None:
        self.asked.pop(0)[1](list(answers))


class Local:
    """This rank's storage and transfer, which answer when the test says so."""

    def __init__(self) -> None:
        self.thens: list[Callable[[Any], None]] = []

    def lookup(self, keys: object, parent: bytes, then: Callable[[Any], None]) -> None:
        self.thens.append(then)

    def read(self, key: bytes, parent: bytes, host: int, draft: bool, then: Callable[[Any], None]) -> "Local":
        self.thens.append(then)
        return self

    def cancel(self) -> None:
        self.cancelled = True

    def write(
        self, key: bytes, parent: bytes, host: int, draft: bool, successors: object, then: Callable[[Any], None]
    ) -> None:
        self.thens.append(then)

    def load(self, moves: Sequence[Move]) -> DoneJob:
        return DoneJob(7, 0.5)

    backup = load


def both_orders(local: Local, others: Others, result: Any, answers: tuple[Any, ...], first: str) -> None:
    """Answers from here and from there, in either order."""
    for who in ("here", "there") if first == "here" else ("there", "here"):
        if who == "here":
            local.thens.pop(0)(result)
        else:
            others.answer(*answers)


RUNS = st.builds(lambda draft, more: Run(draft + more, draft), st.integers(0, 5), st.integers(0, 5))


@pytest.mark.parametrize("first", ["here", "there"])
@given(here=RUNS, there=st.lists(RUNS, min_size=2, max_size=2))
def test_a_run_is_as_long_as_on_the_rank_that_has_least(first: str, here: Run, there: list[Run]) -> None:
    local, others, got = Local(), Others(), []
    SpreadStorage(local, others).lookup([b"k"] * 5, b"p", got.append)  # type: ignore[arg-type]
    assert others.asked[0][0] == Lookup(0, (b"k".hex(),) * 5, b"p".hex())
    both_orders(local, others, here, tuple(Found(0, run.target, run.draft) for run in there), first)
    every = [here, *there]
    assert got == [Run(min(run.target for run in every), min(run.draft for run in every))]


@pytest.mark.parametrize("first", ["here", "there"])
@given(st.lists(st.tuples(READS, READS), min_size=3, max_size=3))
def test_a_half_is_there_only_if_every_rank_has_it(first: str, halves: list[tuple[Outcome, Outcome]]) -> None:
    local, others, got = Local(), Others(), []
    SpreadStorage(local, others).read(b"k", b"p", 3, True, got.append)  # type: ignore[arg-type]
    both_orders(local, others, PairRead(*halves[0], (5,)), tuple(WasRead(0, *pair) for pair in halves[1:]), first)
    (result,) = got
    assert (result.target is Outcome.HIT) == all(target is Outcome.HIT for target, _ in halves)
    assert (result.draft is Outcome.HIT) == all(draft is Outcome.HIT for _, draft in halves)
    assert result.target in [target for target, _ in halves]


@pytest.mark.parametrize("first", ["here", "there"])
@given(st.lists(st.tuples(WRITES, WRITES), min_size=3, max_size=3))
def test_a_half_is_stored_only_if_every_rank_has_stored_it(first: str, halves: list[tuple[Outcome, Outcome]]) -> None:
    local, others, got = Local(), Others(), []
    SpreadStorage(local, others).write(b"k", b"p", 3, True, (5,), got.append)  # type: ignore[arg-type]
    both_orders(local, others, PairWrite(*halves[0]), tuple(WasWritten(0, *pair) for pair in halves[1:]), first)
    (result,) = got
    assert result.target.stored == all(target.stored for target, _ in halves)
    assert result.draft.stored == all(draft.stored for _, draft in halves)


def test_a_read_that_nobody_wants_is_cancelled_on_every_rank() -> None:
    local, others = Local(), Others()
    ticket = SpreadStorage(local, others).read(b"k", b"p", 3, True, lambda read: None)  # type: ignore[arg-type]
    ticket.cancel()
    assert local.cancelled
    assert others.told == [Cancel(0)]


def test_a_copy_has_ended_when_it_has_ended_everywhere() -> None:
    others = Others()
    transfer = SpreadTransfer(Local(), others)  # type: ignore[arg-type]
    for job in (transfer.load([Move(1, 2, True)]), transfer.backup([Move(1, 2, False)])):
        assert not job.done()
        order, _ = others.asked[0]
        assert order.moves == ((1, 2, order.kind == "load"),)
        others.answer(Moved(0), Moved(0))
        assert job.done()
        assert job.nbytes == 7
