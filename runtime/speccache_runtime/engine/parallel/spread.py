"""Operations on pages that every rank does with its own: they have ended when all have ended, as badly as the worst.

`apart` are the halves of which each rank keeps its own share on the host and in storage. What ranks share there is
written and read by rank 0 alone: the others are not asked about it, and what they say of it does not count. To the
device every rank loads all halves itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar, cast

from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairRead, PairWrite, Run
from speccache_runtime.cache.storage_io import Storage, Ticket
from speccache_runtime.cache.transfer import Job, Move, Transfer
from speccache_runtime.engine.parallel.messages import (
    Answer,
    Backup,
    Cancel,
    Found,
    Hurry,
    Load,
    Lookup,
    Moves,
    Order,
    Read,
    Touch,
    Touched,
    WasRead,
    WasWritten,
    Write,
)

_T = TypeVar("_T")

BOTH = frozenset(Half)

_WORST_FIRST = (
    *(Outcome.ERROR, Outcome.FULL, Outcome.DROPPED, Outcome.CORRUPT, Outcome.MISS, Outcome.NOT_ASKED),
    *(Outcome.WRITTEN, Outcome.EXISTS, Outcome.DONE, Outcome.HIT),
)


class Others(Protocol):
    """The other ranks (`leader.Ranks`)."""

    def ask(self, order: Callable[[int], Order], then: Callable[[list[Answer]], None]) -> int: ...

    def tell(self, order: Order) -> None: ...


class SpreadJob:
    """A transfer on every rank. Layers are waited for here; each rank waits for its own."""

    def __init__(self) -> None:
        self.local: Job
        """This rank's job; set before anybody asks."""
        self._elsewhere = False

    def others_done(self, answers: list[Answer]) -> None:
        """Called when all other ranks have done it."""
        self._elsewhere = True

    @property
    def nbytes(self) -> int:
        """Bytes that this rank moved."""
        return self.local.nbytes

    @property
    def seconds(self) -> float:
        return self.local.seconds

    def done(self) -> bool:
        return self._elsewhere and self.local.done()

    def wait_target_layer(self, layer: int) -> None:
        self.local.wait_target_layer(layer)

    def wait_draft(self) -> None:
        self.local.wait_draft()


class SpreadTransfer:
    """Moves the same page numbers on every rank."""

    def __init__(self, local: Transfer, others: Others, apart: Collection[Half] = BOTH) -> None:
        self._local = local
        self._others = others
        self._apart = apart

    def backup(self, moves: Sequence[Move]) -> Job:
        asked = [move for move in moves if _concerns_others(self._apart, move.draft)]
        if not asked:
            return self._local.backup(moves)
        job = SpreadJob()
        self._others.ask(lambda number: Backup(number, _numbers(asked)), job.others_done)
        job.local = self._local.backup(moves)
        return job

    def load(self, moves: Sequence[Move]) -> Job:
        job = SpreadJob()
        self._others.ask(lambda number: Load(number, _numbers(moves)), job.others_done)
        job.local = self._local.load(moves)
        return job


class SpreadStorage:
    """The same objects of every rank's own shard. Half a page that one rank lacks is one that all lack."""

    def __init__(self, local: Storage, others: Others, apart: Collection[Half] = BOTH) -> None:
        self._local = local
        self._others = others
        self._apart = apart

    def lookup(self, keys: Sequence[bytes], parent: bytes, then: Callable[[Run], None]) -> None:
        if not self._apart:
            self._local.lookup(keys, parent, then)
            return
        both: _Both[Run] = _Both(lambda here, there: then(_common_run(here, there, self._apart)))
        self._local.lookup(keys, parent, both.here)
        self._others.ask(lambda number: Lookup(number, tuple(key.hex() for key in keys), parent.hex()), both.there)

    def read(self, key: bytes, parent: bytes, host: int, draft: bool, then: Callable[[PairRead], None]) -> Ticket:
        if not _concerns_others(self._apart, draft):
            return self._local.read(key, parent, host, draft, then)
        both: _Both[PairRead] = _Both(lambda here, there: then(_worst_read(here, there, self._apart)))
        local = self._local.read(key, parent, host, draft, both.here)
        number = self._others.ask(lambda number: Read(number, key.hex(), parent.hex(), host, draft), both.there)
        return _SpreadRead(local, self._others, number)

    def write(
        self,
        key: bytes,
        parent: bytes,
        host: int,
        draft: bool,
        successors: tuple[int, ...],
        then: Callable[[PairWrite], None],
    ) -> None:
        if not _concerns_others(self._apart, draft):
            self._local.write(key, parent, host, draft, successors, then)
            return
        both: _Both[PairWrite] = _Both(lambda here, there: then(_worst_write(here, there, self._apart)))
        self._local.write(key, parent, host, draft, successors, both.here)
        self._others.ask(lambda number: Write(number, key.hex(), parent.hex(), host, draft, successors), both.there)

    def touch(self, key: bytes, parent: bytes, draft: bool, then: Callable[[Outcome], None]) -> None:
        if not _concerns_others(self._apart, draft):
            self._local.touch(key, parent, draft, then)
            return
        both: _Both[Outcome] = _Both(lambda here, there: then(_worst(here, *(cast(Touched, a).outcome for a in there))))
        self._local.touch(key, parent, draft, both.here)
        self._others.ask(lambda number: Touch(number, key.hex(), parent.hex(), draft), both.there)

    def hurry(self) -> None:
        self._local.hurry()
        if self._apart:
            self._others.tell(Hurry())

    def poll(self) -> bool:
        return self._local.poll()

    def close(self) -> None:
        self._local.close()


class _SpreadRead:
    """A read on every rank."""

    def __init__(self, local: Ticket, others: Others, number: int) -> None:
        self._local = local
        self._others = others
        self._number = number

    def cancel(self) -> None:
        self._local.cancel()
        self._others.tell(Cancel(self._number))


class _Both(Generic[_T]):
    """Waits for this rank's result and all the others'."""

    def __init__(self, then: Callable[[_T, list[Answer]], None]) -> None:
        self._then = then
        self._here: list[_T] = []
        self._there: list[Answer] | None = None

    def here(self, result: _T) -> None:
        self._here.append(result)
        self._end()

    def there(self, answers: list[Answer]) -> None:
        self._there = answers
        self._end()

    def _end(self) -> None:
        if self._here and self._there is not None:
            self._then(self._here[0], self._there)


def _concerns_others(apart: Collection[Half], draft: bool) -> bool:
    """Whether other ranks have something to do with a page on the host, its draft half included or not."""
    return Half.TARGET in apart or (draft and Half.DRAFT in apart)


def _numbers(moves: Sequence[Move]) -> Moves:
    return tuple((move.device, move.host, move.draft) for move in moves)


def _common_run(here: Run, answers: list[Answer], apart: Collection[Half]) -> Run:
    """The pages that all ranks have in a row; a draft half counts where all have it."""
    others = [cast(Found, answer) for answer in answers]
    target = min([here.target, *(other.target for other in others if Half.TARGET in apart)])
    return Run(target, min([here.draft, target, *(other.draft for other in others if Half.DRAFT in apart)]))


def _worst(*outcomes: Outcome) -> Outcome:
    return min(outcomes, key=_WORST_FIRST.index)


def _worst_read(here: PairRead, answers: list[Answer], apart: Collection[Half]) -> PairRead:
    others = [cast(WasRead, answer) for answer in answers]
    if Half.TARGET in apart:
        target = _worst(here.target, *(other.target for other in others))
    else:  # the others read a draft half only, unless they were told in time that nobody wants it
        cancelled = any(other.draft is Outcome.NOT_ASKED for other in others)
        target = _worst(here.target, Outcome.NOT_ASKED) if cancelled else here.target
    draft = _worst(here.draft, *(other.draft for other in others if Half.DRAFT in apart))
    return PairRead(target, draft, here.successors, here.age)


def _worst_write(here: PairWrite, answers: list[Answer], apart: Collection[Half]) -> PairWrite:
    others = [cast(WasWritten, answer) for answer in answers]
    target = _worst(here.target, *(other.target for other in others if Half.TARGET in apart))
    return PairWrite(target, _worst(here.draft, *(other.draft for other in others if Half.DRAFT in apart)))
