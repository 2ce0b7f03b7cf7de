"""What rank 0 asks of the other ranks about a page: only about halves of which each rank keeps its own share.

In: the operations by themselves. Out: processes (test_mla_ranks.py), a rank that is behind (cache/test_lying_tiers.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairRead, PairWrite, Run
from speccache_runtime.cache.transfer import Move
from speccache_runtime.cache.transfer_cpu import DoneJob
from speccache_runtime.engine.parallel.messages import (
    Backup,
    Found,
    Load,
    Moved,
    Read,
    Touch,
    Touched,
    WasRead,
    WasWritten,
    Write,
)
from speccache_runtime.engine.parallel.spread import SpreadStorage, SpreadTransfer

TARGET_SHARED, DRAFT_SHARED, BOTH_SHARED = frozenset({Half.DRAFT}), frozenset({Half.TARGET}), frozenset[Half]()
KEYS = [bytes([number]) * 32 for number in range(5)]
PAGE_NAME = KEYS[1], KEYS[0]


class Other:
    """Another rank, which answers at once, and what it was asked."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.asked: list[Any] = []
        self.told: list[Any] = []
        self._answer = answer

    def ask(self, order: Callable[[int], Any], then: Callable[[list[Any]], None]) -> int:
        self.asked.append(order(len(self.asked)))
        then([self._answer(self.asked[-1])])
        return len(self.asked) - 1

    def tell(self, order: Any) -> None:
        self.told.append(order)


class Local:
    """Storage and transfer of rank 0, done at once."""

    def __init__(self) -> None:
        self.moved: list[Move] = []

    def lookup(self, keys: object, parent: bytes, then: Callable[[Any], None]) -> None:
        then(Run(3, 2))

    def read(self, key: bytes, parent: bytes, host: int, draft: bool, then: Callable[[Any], None]) -> None:
        then(PairRead(Outcome.HIT, Outcome.HIT if draft else Outcome.NOT_ASKED, (5,)))

    def write(
        self, key: bytes, parent: bytes, host: int, draft: bool, successors: object, then: Callable[[Any], None]
    ) -> None:
        then(PairWrite(Outcome.WRITTEN, Outcome.WRITTEN if draft else Outcome.NOT_ASKED))

    def touch(self, key: bytes, parent: bytes, draft: bool, then: Callable[[Any], None]) -> None:
        then(Outcome.DONE)

    def hurry(self) -> None:
        return

    def load(self, moves: Sequence[Move]) -> DoneJob:
        self.moved += moves
        return DoneJob(7, 0.5)

    backup = load


@pytest.mark.parametrize(
    ("apart", "found"),
    [(TARGET_SHARED, Run(3, 1)), (DRAFT_SHARED, Run(2, 2)), (BOTH_SHARED, Run(3, 2))],
    ids=["target", "draft", "both"],
)
def test_a_run_ends_where_a_rank_lacks_a_half_of_its_own(apart: frozenset[Half], found: Run) -> None:
    """The other rank has one draft half and two targets; whatever it says of what it shares does not count."""
    other, got = Other(lambda order: Found(0, 2 if Half.TARGET in apart else 5, 1 if Half.DRAFT in apart else 0)), []
    storage = SpreadStorage(Local(), other, apart)  # type: ignore[arg-type]
    storage.lookup(KEYS[1:], KEYS[0], got.append)
    storage.hurry()
    assert got == [found]
    assert bool(other.asked) == bool(other.told) == bool(apart), "a rank that keeps nothing in storage is not asked"


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("apart", [TARGET_SHARED, DRAFT_SHARED, BOTH_SHARED], ids=["target", "draft", "both"])
def test_the_other_rank_s_word_counts_for_its_own_halves_only(apart: frozenset[Half], draft: bool) -> None:
    answers = {
        Read: WasRead(0, Outcome.CORRUPT, Outcome.CORRUPT),
        Write: WasWritten(0, Outcome.ERROR, Outcome.ERROR),
        Touch: Touched(0, Outcome.MISS),
    }
    other, got = Other(lambda order: answers[type(order)]), list[Any]()
    storage = SpreadStorage(Local(), other, apart)  # type: ignore[arg-type]
    storage.read(*PAGE_NAME, 3, draft, got.append)
    storage.write(*PAGE_NAME, 3, draft, (5,), got.append)
    storage.touch(*PAGE_NAME, draft, got.append)
    read, write, touched = got
    own_target, own_draft = Half.TARGET in apart, Half.DRAFT in apart
    concerned = own_target or (own_draft and draft)
    assert len(other.asked) == (3 if concerned else 0)
    assert (read.target is Outcome.HIT, write.target is Outcome.WRITTEN) == (not own_target,) * 2
    assert (read.draft is Outcome.HIT) == (write.draft is Outcome.WRITTEN) == (draft and not own_draft)
    assert (touched is Outcome.DONE) == (not concerned)
    assert read.successors == (5,)


def test_a_read_that_the_other_rank_has_not_begun_when_it_was_cancelled_was_not_asked_for() -> None:
    """Else the page would be kept without its draft half, though somebody may want it again by now."""
    other, got = Other(lambda order: WasRead(0, Outcome.NOT_ASKED, Outcome.NOT_ASKED)), list[Any]()
    SpreadStorage(Local(), other, TARGET_SHARED).read(*PAGE_NAME, 3, True, got.append)  # type: ignore[arg-type]
    assert got[0].target is Outcome.NOT_ASKED


@pytest.mark.parametrize(
    ("apart", "copied"),
    [(TARGET_SHARED, ((1, 2, True),)), (DRAFT_SHARED, ((1, 2, True), (3, 4, False))), (BOTH_SHARED, None)],
    ids=["target", "draft", "both"],
)
def test_every_rank_loads_every_page_and_copies_back_its_own_halves(apart: frozenset[Half], copied: Any) -> None:
    local, other = Local(), Other(lambda order: Moved(0))
    transfer = SpreadTransfer(local, other, apart)  # type: ignore[arg-type]
    moves = [Move(1, 2, True), Move(3, 4, False)]
    assert transfer.load(moves).done()
    assert transfer.backup(moves).done()
    loads = [order.moves for order in other.asked if isinstance(order, Load)]
    backups = [order.moves for order in other.asked if isinstance(order, Backup)]
    assert loads == [((1, 2, True), (3, 4, False))]
    assert backups == ([copied] if copied else [])
    assert local.moved == moves * 2, "rank 0 moves all"
