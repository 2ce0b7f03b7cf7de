"""Draft halves that are made after their page was published: they follow the target's down the tiers, never before."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from speccache_api.drafts import DRAFTS
from speccache_runtime.cache import paired
from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.cache.transfer import Job, Move
from speccache_runtime.cache.transfer_cpu import CpuTransfer

PROMPT = list(range(100, 117))  # four whole pages of 4, and one more token

MakeRig = Callable[..., Any]


class Held:
    """A copy that is made at once, and has ended when the test says so."""

    def __init__(self, job: Job) -> None:
        self.nbytes, self.seconds, self.ended = job.nbytes, job.seconds, False

    def done(self) -> bool:
        return self.ended


class HeldTransfer(CpuTransfer):
    """Copies to the host are held."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.held: list[Held] = []
        self.moves: list[tuple[Move, ...]] = []

    def backup(self, moves: Sequence[Move]) -> Any:
        self.moves.append(tuple(moves))
        self.held.append(Held(super().backup(moves)))
        return self.held[-1]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[HeldTransfer]:
    made: list[HeldTransfer] = []

    def make(*parts: Any) -> HeldTransfer:
        made.append(HeldTransfer(*parts))
        return made[-1]

    monkeypatch.setattr(paired, "make_transfer", make)
    return made


def let_go(transfer: HeldTransfer) -> None:
    for job in transfer.held:
        job.ended = True


def compute(rig: Any, tools: SimpleNamespace, visit: Any, drafted: int) -> None:
    """The target's part of everything, the draft's of the first `drafted` slots."""
    lease = visit.lease
    rig.cache.grow(lease, len(visit.tokens))
    keys = rig.keys(visit.tokens)
    for page, key in enumerate(keys):
        tools.put_page(rig.target, lease.pages[page], key, "target")
        if (page + 1) * tools.PAGE <= drafted:
            tools.put_page(rig.draft, lease.pages[page], key, "draft")
    rig.cache.publish([(lease, visit.tokens, len(visit.tokens), drafted)])


def test_a_half_that_comes_while_its_page_is_copied_is_copied_by_itself(
    rig: MakeRig, tools: SimpleNamespace, volume: Any, held: list[HeldTransfer]
) -> None:
    first = rig(backend=volume, facts=DRAFTS["Standalone"])
    transfer = held[0]
    visit = first.enter(PROMPT)
    first.wait_prefetch(visit)
    first.admit(visit)
    compute(first, tools, visit, drafted=4)
    assert [move.draft for move in transfer.moves[0]] == [True, False, False, False]
    compute(first, tools, visit, drafted=12)  # the copies of the target's halves are still under way
    assert len(transfer.moves) == 1
    entries = [entry for entry in visit.lease.entries if entry is not None]
    assert [entry.draft_on_device for entry in entries] == [True, True, True, False]
    let_go(transfer)
    first.cache.poll()
    assert [entry.draft_on_host for entry in entries] == [True, False, False, False], (
        "bytes were claimed that never came"
    )

    def all_there() -> bool:
        let_go(transfer)
        return [entry.draft_on_host for entry in entries] == [True, True, True, False] and not first.cache.busy

    first.until(all_there)
    assert sorted(move.device for moves in transfer.moves[1:] for move in moves) == sorted(visit.lease.pages[1:3])
    keys = first.keys(PROMPT)
    assert [volume.has(key, Half.DRAFT) for key in keys] == [True, True, True, False]
    assert all(volume.has(key, Half.TARGET) for key in keys)
    first.release(visit)
    first.close()
    second = rig(backend=volume, facts=DRAFTS["Standalone"])
    transfer = held[1]
    visit = second.enter(PROMPT)
    second.wait_prefetch(visit)
    hit = second.admit(visit)  # compares every byte that came
    assert (hit.tokens, hit.draft_absent) == (16, 4)
    second.release(visit)


def test_a_half_that_another_request_made_is_not_made_again(rig: MakeRig, tools: SimpleNamespace) -> None:
    cache = rig(facts=DRAFTS["Standalone"])
    visit = cache.enter(PROMPT)
    cache.admit(visit)
    compute(cache, tools, visit, drafted=0)
    other = cache.enter(PROMPT)
    assert cache.admit(other).draft_absent == 16
    assert other.lease.draft_absent == [False] * 4, "what is made anew is not masked"
    assert other.lease.first_undrafted(0) == 0
    assert other.lease.undrafted_run(0, 16, set()) == 16
    compute(cache, tools, visit, drafted=8)
    assert other.lease.first_undrafted(0) == 8
    assert other.lease.undrafted_run(9, 16, set()) == 7
    assert other.lease.undrafted_run(9, 16, {other.lease.pages[3]}) == 3
    cache.release(visit)
    cache.release(other)
