"""A rank that decides nothing: it does to its own pages and its part of the models what rank 0 says, in that order."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from speccache_runtime.cache.loads import Loads
from speccache_runtime.cache.pool import HostArena
from speccache_runtime.cache.shared_memory import SharedMemory
from speccache_runtime.cache.storage.store import PairRead, PairStore
from speccache_runtime.cache.storage_io import StorageIO, Ticket
from speccache_runtime.cache.transfer import Job, Move
from speccache_runtime.cache.transfers import make_transfer
from speccache_runtime.cache.workers import Workers
from speccache_runtime.config import EngineConfig
from speccache_runtime.engine.parallel.channel import Channel
from speccache_runtime.engine.parallel.meeting import leave, meet
from speccache_runtime.engine.parallel.messages import (
    Backup,
    Cancel,
    Failed,
    Found,
    Hurry,
    Load,
    Lookup,
    Message,
    Moved,
    Moves,
    Pages,
    Propose,
    Read,
    Ready,
    Start,
    Step,
    Stop,
    Touch,
    Touched,
    WasRead,
    WasWritten,
    Write,
)
from speccache_runtime.engine.parts import load
from speccache_runtime.engine.runner import Runner
from speccache_runtime.errors import RankError
from speccache_runtime.metrics import Metrics

logger = logging.getLogger(__name__)

_COPY_POLL_S = 0.0005
"""How often a thread looks whether a copy on a GPU has ended."""


def follow(channel: Channel) -> None:
    """Serves until rank 0 says stop. Raises RankError when rank 0 is gone, and what else goes wrong; rank 0 is told."""
    start = channel.receive()
    if not isinstance(start, Start):
        raise RankError("rank 0 did not say how to start")
    try:
        channel.send(Ready("here"))
        config = EngineConfig.from_json(start.config)
        ranks = meet(config, start.rank, Path(start.meet), start.timeout)
        loaded = load(config, ranks, Metrics(CollectorRegistry()))
        channel.send(Ready("loaded", loaded.most_pages))
        agreed = channel.receive()
        if not isinstance(agreed, Pages):
            raise RankError("rank 0 has ended, or did not say how many pages there are")
        parts = loaded.with_pools(agreed.count)
        memory = None if start.memory is None else SharedMemory(start.memory, owner=False)
        arena = HostArena.of(parts.pool, parts.draft_pool, config.host_pages, memory)
        loads = Loads(make_transfer(arena, parts.pool, parts.draft_pool))
        runner = parts.runner(loads, rows=config.max_running, num_steps=config.num_steps)
        _Follower(channel, runner, loads, arena, parts.store).serve()
    except Exception as error:
        tell_failure(channel, error)
        raise
    finally:
        leave()


class _Follower:
    """Carries out messages. Steps and copies run here, in order; storage runs on threads, as on rank 0."""

    def __init__(
        self, channel: Channel, runner: Runner, loads: Loads, arena: HostArena, store: PairStore | None
    ) -> None:
        self._channel = channel
        self._runner = runner
        self._loads = loads
        self._storage: StorageIO | None = None
        if store is not None:
            store.begin()
            self._storage = StorageIO(store, arena, self._deliver)
        self._copies = Workers("copies", 1)
        self._reads: dict[int, Ticket] = {}
        self._reads_lock = threading.Lock()

    def serve(self) -> None:
        """Until a stop."""
        while not isinstance(message := self._channel.receive(), Stop):
            if message is None:
                raise RankError("rank 0 has ended without saying so")
            self._loads.finished()
            self._do(message)

    def _do(self, message: Message) -> None:
        match message:
            case Step(plan):
                self._runner.submit(plan)
            case Propose(result, ended):
                self._runner.adopt(result)
                self._runner.propose(frozenset(ended))
            case Load(number, moves):
                self._report(number, self._loads.job(self._loads.start(_moves(moves))))
            case Backup(number, moves):
                self._report(number, self._loads.transfer.backup(_moves(moves)))
            case Lookup() | Read() | Write() | Touch() | Cancel() | Hurry():
                self._ask_storage(message)
            case _:
                raise RankError(f"rank 0 sent {message.kind}, which is nothing to do")

    def _report(self, number: int, job: Job) -> None:
        """Tells rank 0 when a copy has ended."""
        if job.done():
            self._channel.send(Moved(number))
            return

        def wait() -> bool:
            while not job.done():
                time.sleep(_COPY_POLL_S)
            self._channel.send(Moved(number))
            return True

        self._copies.submit(wait)

    def _ask_storage(self, message: Lookup | Read | Write | Touch | Cancel | Hurry) -> None:
        storage, send = self._storage, self._channel.send
        if storage is None:
            raise RankError("rank 0 asks for what this rank keeps in storage, and it keeps nothing there")
        match message:
            case Lookup(number, keys, parent):
                found = [bytes.fromhex(key) for key in keys]
                storage.lookup(found, bytes.fromhex(parent), lambda run: send(Found(number, run.target, run.draft)))
            case Read(number, key, parent, host, draft):

                def answer(read: PairRead) -> None:
                    with self._reads_lock:
                        del self._reads[number]
                    send(WasRead(number, read.target, read.draft))

                with self._reads_lock:  # or the answer might be there before the ticket
                    page = bytes.fromhex(key), bytes.fromhex(parent)
                    self._reads[number] = storage.read(*page, host, draft, answer)
            case Write(number, key, parent, host, draft, successors):
                storage.write(
                    bytes.fromhex(key),
                    bytes.fromhex(parent),
                    host,
                    draft,
                    successors,
                    lambda written: send(WasWritten(number, written.target, written.draft)),
                )
            case Touch(number, key, parent, draft):
                page = bytes.fromhex(key), bytes.fromhex(parent)
                storage.touch(*page, draft, lambda outcome: send(Touched(number, outcome)))
            case Cancel(number):
                with self._reads_lock:
                    if number in self._reads:
                        self._reads[number].cancel()
            case Hurry():
                storage.hurry()

    def _deliver(self) -> None:
        """Sends finished answers, on the storage thread that has one: the thread that follows waits for messages."""
        assert self._storage is not None
        try:
            self._storage.poll()
        except BaseException as error:  # noqa: BLE001 - a bug in the store must stop the replica, not a thread
            tell_failure(self._channel, error)


def tell_failure(channel: Channel, error: BaseException) -> None:
    """Tells rank 0, if it is there, that this rank cannot go on."""
    with contextlib.suppress(RankError):
        channel.send(Failed(f"{type(error).__name__}: {error}"))


def _moves(moves: Moves) -> list[Move]:
    return [Move(*move) for move in moves]
