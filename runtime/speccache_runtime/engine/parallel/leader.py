"""The other ranks of a replica, as rank 0 sees them: processes that it starts, tells what to do, and ends.

    messages out   in the order of the engine thread's calls, to every rank alike
    answers in     read by a thread per rank, handed to the engine thread by `poll`

When a rank ends or says that it failed, the next call here raises RankError: the engine then ends every request with
an error. A rank that hangs shows in the collective operations, which have a time limit.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from speccache_runtime.cache.pool import PoolShape, shared_bytes
from speccache_runtime.cache.shared_memory import SharedMemory
from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.cache.storage_io import Storage
from speccache_runtime.cache.transfer import Transfer
from speccache_runtime.config import EngineConfig
from speccache_runtime.engine.parallel.channel import Channel
from speccache_runtime.engine.parallel.meeting import leave, meet
from speccache_runtime.engine.parallel.messages import (
    Answer,
    Failed,
    Message,
    Order,
    Pages,
    Propose,
    Ready,
    Start,
    Step,
    Stop,
)
from speccache_runtime.engine.parallel.spread import SpreadStorage, SpreadTransfer
from speccache_runtime.engine.runner import Runner
from speccache_runtime.errors import RankError
from speccache_runtime.model.collective import ProcessGroup
from speccache_runtime.steps import StepPlan, StepResult

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
"""How long a rank that was told to stop may take before it is killed."""

COLLECTIVE_TIMEOUT_S = 60.0
"""How long one rank waits for another inside a pass. They compute the same, so they arrive within milliseconds."""


@dataclass(slots=True)
class _Asked:
    """A question to all ranks: the answers so far, and who gets them when all have come."""

    then: Callable[[list[Answer]], None]
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    channel: Channel


class LeadRunner:
    """The runner of rank 0: has every rank run what it runs."""

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    def submit(self, plan: StepPlan) -> None:
        """Starts the target's part of a step on all ranks."""
        self._ranks.tell(Step(plan))
        self._runner.submit(plan)

    def result(self) -> StepResult:
        """What this rank chose for all."""
        return self._runner.result()

    def propose(self, ended: frozenset[int]) -> tuple[int, ...]:
        """Runs the draft's part of the step on all ranks, behind what was chosen here."""
        self._ranks.tell(Propose(self._runner.result(), tuple(sorted(ended))))
        return self._runner.propose(ended)


class Ranks:
    """Ranks 1 to `size` - 1 of a replica. Made and used by one thread; `wake` is called from others."""

    def __init__(self, config: EngineConfig, wake: Callable[[], None]) -> None:
        """Starts the processes; `join` and `wait_for` bring them to where they can be used."""
        self._wake = wake
        self._meet = Path(tempfile.mkdtemp(prefix="speccache-ranks-")) / "store"
        self._heard: queue.SimpleQueue[tuple[int, Message | RankError]] = queue.SimpleQueue()
        self._asked: dict[int, _Asked] = {}
        self._last = 0
        self._stopping = False
        self._ready: dict[str, list[Ready]] = {"here": [], "loaded": []}
        geometries = {Half.TARGET: config.target_geometry, Half.DRAFT: config.draft_geometry}
        self._apart = frozenset(half for half, kept in geometries.items() if kept and not kept.shared)
        self.memory = _shared_memory(config)
        self._ranks: list[_Rank] = []
        for rank in range(1, config.tensor):
            self._ranks.append(self._start(rank, config))

    def _start(self, rank: int, config: EngineConfig) -> _Rank:
        ours, theirs = socket.socketpair()
        memory = None if self.memory is None else self.memory.fd
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "speccache_runtime.engine.parallel", str(theirs.fileno())],
                pass_fds=[theirs.fileno()] if memory is None else [theirs.fileno(), memory],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"SPECCACHE_RANK": str(rank)},
                # The terminal's Ctrl-C is for rank 0, which ends the others when it has answered everybody.
                start_new_session=True,
            )
        made = _Rank(rank, process, Channel(ours))
        threading.Thread(target=self._listen, args=(made,), name=f"rank-{rank}", daemon=True).start()
        start = Start(rank, config.tensor, str(self._meet), COLLECTIVE_TIMEOUT_S, config.to_json(), memory)
        made.channel.send(start)
        return made

    def _listen(self, rank: _Rank) -> None:
        try:
            while (message := rank.channel.receive()) is not None:
                self._heard.put((rank.number, message))
                self._wake()
            code = rank.process.wait()
            self._heard.put((rank.number, RankError(f"rank {rank.number} has ended (exit code {code})")))
        except (RankError, OSError) as error:
            self._heard.put((rank.number, RankError(f"rank {rank.number}: {error}")))
        self._wake()

    # ---- talking

    def tell(self, order: Order) -> None:
        """Sends an order to all ranks. Raises RankError when one is gone."""
        for rank in self._ranks:
            rank.channel.send(order)

    def ask(self, order: Callable[[int], Order], then: Callable[[list[Answer]], None]) -> int:
        """Sends the order made with a new number to all ranks; `poll` calls `then` with all their answers. Returns the
        number."""
        self._last += 1
        self._asked[self._last] = _Asked(then)
        self.tell(order(self._last))
        return self._last

    def poll(self) -> bool:
        """Takes the answers that have come; True if there were any. Raises RankError when a rank has failed."""
        any_heard = False
        while True:
            try:
                rank, message = self._heard.get_nowait()
            except queue.Empty:
                return any_heard
            any_heard = True
            self._take(rank, message)

    def _take(self, rank: int, message: Message | RankError) -> None:
        if isinstance(message, RankError):
            raise message
        if isinstance(message, Failed):
            raise RankError(f"rank {rank} failed: {message.text}")
        if isinstance(message, Ready):
            self._ready[message.stage].append(message)
            return
        assert isinstance(message, Answer)
        asked = self._asked[message.number]
        asked.answers.append(message)
        if len(asked.answers) == len(self._ranks):
            del self._asked[message.number]
            asked.then(asked.answers)

    def join(self, config: EngineConfig) -> ProcessGroup:
        """Blocks until all ranks can talk to each other. Raises RankError when one cannot."""
        self.wait_for("here")
        return meet(config, 0, self._meet, COLLECTIVE_TIMEOUT_S)

    def wait_for(self, stage: Literal["here", "loaded"]) -> None:
        """Blocks until all ranks have come as far. Raises RankError when one cannot."""
        while len(self._ready[stage]) < len(self._ranks):
            self._take(*self._heard.get())

    def agree_on_pages(self, most: int) -> int:
        """Blocks until all ranks have loaded; how many device pages every one of them has room for, which they are
        told. Raises RankError when one cannot load."""
        self.wait_for("loaded")
        self._forget_meeting()  # not before: a rank that has just met the others may still be reading it
        pages = min([most, *(ready.most_pages for ready in self._ready["loaded"])])
        self.tell(Pages(pages))
        return pages

    # ---- what the cache needs

    def transfer(self, local: Transfer) -> Transfer:
        """Moves pages here and on all other ranks."""
        return SpreadTransfer(local, self, self._apart)

    def storage(self, local: Storage) -> Storage:
        """Reads and writes pages here and on all other ranks."""
        return SpreadStorage(local, self, self._apart)

    # ---- the end

    def _forget_meeting(self) -> None:
        shutil.rmtree(self._meet.parent, ignore_errors=True)

    def close(self) -> None:
        """Ends the processes, by force those that do not end by themselves; may be called again."""
        if self._stopping:
            return
        self._stopping = True
        for rank in self._ranks:
            try:
                rank.channel.send(Stop())
            except RankError:
                rank.process.kill()  # it is gone already, or hangs
        # All leave together: NCCL's end waits for the others, and for ever for one that is dead.
        leaving = threading.Thread(target=leave, name="leaving", daemon=True)
        leaving.start()
        for rank in self._ranks:
            try:
                rank.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.warning("a rank does not end and is killed", extra={"rank": rank.number})
                rank.process.kill()
                rank.process.wait()
            rank.channel.close()
        leaving.join(END_TIMEOUT_S)
        self._forget_meeting()
        if self.memory is not None:
            self.memory.close()


def _shared_memory(config: EngineConfig) -> SharedMemory | None:
    """Memory for the host halves that ranks share, as much as was sized for them; None when they share none."""
    kept = [geometry for geometry in (config.target_geometry, config.draft_geometry) if geometry]
    shapes = [PoolShape(geometry, config.page_size, config.kv_dtype) for geometry in kept]
    nbytes = shared_bytes(shapes, config.host_pages)
    return SharedMemory.create(nbytes) if nbytes else None
