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
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from speccache_runtime.cache.storage_io import Storage
from speccache_runtime.cache.transfer import Transfer
from speccache_runtime.engine.parallel.channel import Channel
from speccache_runtime.engine.parallel.messages import Answer, Failed, Message, Order, Ready, Start, Stop
from speccache_runtime.engine.parallel.spread import SpreadStorage, SpreadTransfer
from speccache_runtime.errors import RankError

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
"""How long a rank that was told to stop may take before it is killed."""


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


class Ranks:
    """Ranks 1 to `size` - 1 of a replica. Made and used by one thread; `wake` is called from others."""

    def __init__(self, size: int, meet: str, config: str, wake: Callable[[], None]) -> None:
        """Starts the processes; `wait_ready` says when they can be used."""
        self._wake = wake
        self._heard: queue.SimpleQueue[tuple[int, Message | RankError]] = queue.SimpleQueue()
        self._asked: dict[int, _Asked] = {}
        self._last = 0
        self._stopping = False
        self._ready = 0
        self._ranks = [self._start(rank, size, meet, config) for rank in range(1, size)]

    def _start(self, rank: int, size: int, meet: str, config: str) -> _Rank:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "speccache_runtime.engine.parallel", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"SPECCACHE_RANK": str(rank)},
                # The terminal's Ctrl-C is for rank 0, which ends the others when it has answered everybody.
                start_new_session=True,
            )
        made = _Rank(rank, process, Channel(ours))
        threading.Thread(target=self._listen, args=(made,), name=f"rank-{rank}", daemon=True).start()
        made.channel.send(Start(rank, size, meet, config))
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

    def ask(self, order: Callable[[int], Order], then: Callable[[list[Answer]], None]) -> None:
        """Sends the order made with a new number to all ranks; `poll` calls `then` with all their answers."""
        self._last += 1
        self._asked[self._last] = _Asked(then)
        self.tell(order(self._last))

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
            self._ready += 1
            return
        assert isinstance(message, Answer)
        asked = self._asked[message.number]
        asked.answers.append(message)
        if len(asked.answers) == len(self._ranks):
            del self._asked[message.number]
            asked.then(asked.answers)

    def wait_ready(self) -> None:
        """Blocks until all ranks have loaded their models. Raises RankError when one cannot."""
        while self._ready < len(self._ranks):
            self._take(*self._heard.get())

    # ---- what the cache needs

    def transfer(self, local: Transfer) -> Transfer:
        """Moves pages here and on all other ranks."""
        return SpreadTransfer(local, self)

    def storage(self, local: Storage) -> Storage:
        """Reads and writes pages here and on all other ranks."""
        return SpreadStorage(local, self)

    # ---- the end

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
        for rank in self._ranks:
            try:
                rank.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.warning("a rank does not end and is killed", extra={"rank": rank.number})
                rank.process.kill()
                rank.process.wait()
            rank.channel.close()
