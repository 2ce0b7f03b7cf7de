"""Leader election against a Lease in memory, on virtual time. The real API server's part is in tests/apiserver."""

import asyncio
import copy
from typing import Any

import pytest

from speccache_operator.errors import ClusterError, Conflict, LeadershipLost, NotFound, Unavailable
from speccache_operator.kinds import LEASE, Ref
from speccache_operator.process.leader import Elector, Sighting, Timing, is_free

pytestmark = pytest.mark.looptime

REF = Ref(LEASE, "system", "operator")
TIMING = Timing(duration=15, renew_within=10, retry=2)


class Leases:
    """One Lease with optimistic locking. `trouble` is raised instead of answering; `hang` never answers."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] | None = None
        self.version = 0
        self.trouble: ClusterError | None = None
        self.hang = False
        self.slow = 0.0

    async def get(self, ref: Ref) -> Any:
        await self._answer()
        return copy.deepcopy(self.stored)

    async def create(self, obj: Any) -> Any:
        await self._answer()
        if self.stored is not None:
            raise Conflict(409, "exists", "POST")
        return self._store(obj)

    async def replace(self, obj: Any) -> Any:
        await self._answer()
        if self.stored is None:
            raise NotFound(404, "gone", "PUT")
        if obj["metadata"]["resourceVersion"] != self.stored["metadata"]["resourceVersion"]:
            raise Conflict(409, "changed", "PUT")
        return self._store(obj)

    def _store(self, obj: Any) -> Any:
        self.version += 1
        self.stored = copy.deepcopy(dict(obj))
        self.stored["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.stored)

    async def _answer(self) -> None:
        if self.hang:
            await asyncio.Event().wait()
        await asyncio.sleep(self.slow)
        if self.trouble is not None:
            raise self.trouble

    @property
    def holder(self) -> str:
        assert self.stored is not None
        return str(self.stored["spec"]["holderIdentity"])


@pytest.fixture
def leases() -> Leases:
    return Leases()


def _elector(leases: Any, name: str) -> Elector:
    return Elector(leases, REF, name, TIMING)


async def _time() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("spec", "age", "free"),
    [
        ({}, 0, True),
        ({"holderIdentity": ""}, 0, True),
        ({"holderIdentity": "b", "leaseDurationSeconds": 15}, 14.9, False),
        ({"holderIdentity": "b", "leaseDurationSeconds": 15}, 15, True),
        ({"holderIdentity": "b"}, 0, True),
    ],
)
async def test_when_a_lease_is_free(spec: dict[str, Any], age: float, free: bool) -> None:
    assert is_free({"spec": spec}, Sighting("1", 100.0), 100.0 + age) is free


async def test_the_first_takes_a_lease_that_is_not_there(leases: Leases) -> None:
    await _elector(leases, "a").acquire()
    assert leases.holder == "a"
    assert leases.stored is not None
    assert leases.stored["spec"]["leaseTransitions"] == 0


async def test_a_lease_that_an_installer_made_keeps_its_labels(leases: Leases) -> None:
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    leases.stored = {"metadata": {"name": "operator", "resourceVersion": "0", "labels": labels}}
    elector = _elector(leases, "a")
    await elector.acquire()
    assert leases.holder == "a"
    await elector.release()
    assert leases.stored["metadata"]["labels"] == labels


async def test_the_second_waits_for_as_long_as_the_first_renews(leases: Leases) -> None:
    first, second = _elector(leases, "a"), _elector(leases, "b")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(300)
    assert not waiting.done()
    holding.cancel()
    await waiting
    assert await _time() < 300 + TIMING.duration + 2 * TIMING.retry
    assert leases.holder == "b"


async def test_a_released_lease_is_taken_at_once(leases: Leases) -> None:
    first, second = _elector(leases, "a"), _elector(leases, "b")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(1)
    await first.release()
    await waiting
    assert await _time() <= 1 + TIMING.retry
    await first.release()
    assert leases.holder == "b"


async def test_the_same_process_started_anew_has_to_wait(leases: Leases) -> None:
    """Identities are unique for each process: a container that restarts cannot know what its predecessor still does."""
    await _elector(leases, "a").acquire()
    await _elector(leases, "b").acquire()
    assert await _time() >= TIMING.duration


@pytest.mark.parametrize("kind", ["errors", "hangs"])
async def test_a_holder_that_cannot_renew_stops_before_others_may_start(kind: str, leases: Leases) -> None:
    first, second = _elector(leases, "a"), _elector(leases, "b")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    await asyncio.sleep(5)
    renewed = 4
    if kind == "errors":
        leases.trouble = Unavailable("cut")
    else:
        leases.hang = True
    with pytest.raises(LeadershipLost):
        await holding
    stopped = await _time()
    assert stopped <= renewed + TIMING.renew_within
    leases.trouble, leases.hang = None, False
    await second.acquire()
    assert await _time() >= renewed + TIMING.duration


async def test_time_is_counted_from_before_the_request(leases: Leases) -> None:
    """An answer that took 6 s says nothing about those 6 s: others may have counted them."""
    elector = _elector(leases, "a")
    leases.slow = 6
    await elector.acquire()  # reads, then creates: asked at 0, answered at 12
    leases.hang = True
    with pytest.raises(LeadershipLost):
        await elector.hold()
    assert await _time() == 12  # at 10, which had passed already


async def test_a_short_outage_is_survived(leases: Leases) -> None:
    elector = _elector(leases, "a")
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    await asyncio.sleep(3)
    leases.trouble = Unavailable("cut")
    await asyncio.sleep(6)
    leases.trouble = None
    await asyncio.sleep(60)
    assert not holding.done()
    holding.cancel()


async def test_a_lease_taken_by_another_is_lost_at_once(leases: Leases) -> None:
    elector = _elector(leases, "a")
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    await asyncio.sleep(3)
    assert leases.stored is not None
    leases._store({**leases.stored, "spec": {**leases.stored["spec"], "holderIdentity": "b"}})
    with pytest.raises(LeadershipLost, match="another process"):
        await holding
    assert await _time() <= 3 + TIMING.retry


async def test_a_deleted_lease_is_lost(leases: Leases) -> None:
    elector = _elector(leases, "a")
    await elector.acquire()
    leases.stored = None
    with pytest.raises(LeadershipLost):
        await elector.hold()


async def test_a_renewal_whose_answer_was_lost_is_still_ours(leases: Leases) -> None:
    """The server renewed, the answer never came: the next try conflicts with ourselves."""
    elector = _elector(leases, "a")
    await elector.acquire()
    assert leases.stored is not None
    leases._store(leases.stored)
    holding = asyncio.create_task(elector.hold())
    await asyncio.sleep(60)
    assert not holding.done()
    holding.cancel()


async def test_trouble_while_waiting_is_waited_out(leases: Leases) -> None:
    leases.trouble = Unavailable("down")
    waiting = asyncio.create_task(_elector(leases, "a").acquire())
    await asyncio.sleep(30)
    leases.trouble = None
    await waiting
    assert leases.holder == "a"


async def test_release_never_raises(leases: Leases) -> None:
    elector = _elector(leases, "a")
    await elector.release()
    await elector.acquire()
    leases.trouble = Unavailable("down")
    await elector.release()
