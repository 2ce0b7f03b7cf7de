"""What the ranks of a replica say to each other, and what rank 0 makes of many answers.

In: messages over real sockets, answers in every order. Out: the ranks themselves (test_parallel.py).
"""

import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairRead, PairWrite, Run
from speccache_runtime.cache.transfer import Move
from speccache_runtime.cache.transfer_cpu import DoneJob
from speccache_runtime.cache.workers import MOST
from speccache_runtime.core import Sampling
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
from speccache_runtime.errors import RankError
from speccache_runtime.steps import Chosen, DraftRows, Group, StepPlan, StepResult, Table

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
        def begin(self) -> None:
            return

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
