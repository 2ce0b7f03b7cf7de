"""The queue and the loop on virtual time."""

import asyncio
from typing import Any

import pytest

from speccache_operator.errors import Unavailable
from speccache_operator.kinds import Key
from speccache_operator.loop.controller import RECONCILE_TIMEOUT, Controller, Result
from speccache_operator.loop.workqueue import Backoff, WorkQueue
from speccache_operator.metrics import Metrics

pytestmark = pytest.mark.looptime

A, B = Key("n", "a"), Key("n", "b")


async def test_a_key_added_many_times_runs_once() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    for _ in range(10):
        queue.add(A)
    assert await queue.get() == A
    assert queue.depth() == 0


async def test_keys_come_in_the_order_in_which_they_became_due() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    queue.add(A, 5)
    queue.add(B, 1)
    assert [await queue.get(), await queue.get()] == [B, A]


async def test_a_key_that_is_worked_on_waits_and_is_not_lost(looptime: Any) -> None:
    queue: WorkQueue[Key] = WorkQueue()
    queue.add(A)
    await queue.get()
    queue.add(A)
    second = asyncio.create_task(queue.get())
    await asyncio.sleep(3)
    assert not second.done()
    queue.done(A)
    assert await second == A
    assert looptime == 3


async def test_a_sooner_wake_up_wins_and_a_later_one_changes_nothing(looptime: Any) -> None:
    queue: WorkQueue[Key] = WorkQueue()
    queue.add(A, 10)
    queue.add(A, 2)
    queue.add(A, 20)
    await queue.get()
    assert looptime == 2


async def test_a_waiting_worker_notices_a_sooner_key(looptime: Any) -> None:
    queue: WorkQueue[Key] = WorkQueue()
    queue.add(A, 100)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(1)
    queue.add(B)
    assert await waiting == B
    assert looptime == 1


async def test_failures_wait_longer_and_longer_up_to_a_limit() -> None:
    queue: WorkQueue[Key] = WorkQueue(Backoff(first=1, most=10))
    assert [queue.add_failed(A) for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert queue.add_failed(B) == 1
    queue.forget_failures(A)
    assert queue.add_failed(A) == 1


def test_a_backoff_bears_any_number_of_failures() -> None:
    assert Backoff(first=1, most=60).delay(10**6) == 60


async def test_the_longest_wait_is_of_what_is_due_or_worked_on() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    queue.add(A)
    queue.add(B, 100)
    await asyncio.sleep(4)
    assert queue.longest_wait() == 4
    await queue.get()
    await asyncio.sleep(2)
    assert queue.longest_wait() == 2
    queue.done(A)
    assert queue.longest_wait() == 0


class _Work:
    """A reconcile that notes when it ran and does what it is told."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.ran: list[tuple[float, Key]] = []
        self.at_once: dict[Key, int] = {}

    async def __call__(self, key: Key) -> Result:
        self.ran.append((asyncio.get_running_loop().time(), key))
        self.at_once[key] = self.at_once.get(key, 0) + 1
        assert self.at_once[key] == 1
        try:
            answer = self.answers.pop(0) if self.answers else Result()
            if isinstance(answer, (int, float)):
                await asyncio.sleep(answer)
                return Result()
            if isinstance(answer, BaseException):
                raise answer
            assert isinstance(answer, Result)
            return answer
        finally:
            self.at_once[key] -= 1

    def times(self, key: Key = A) -> list[float]:
        return [at for at, ran in self.ran if ran == key]


async def _run(work: _Work, seconds: float, *keys: Key, resync: float = 1e6, workers: int = 2) -> Metrics:
    async def listed() -> list[Key]:
        return []

    metrics = Metrics()
    controller = Controller(work, listed, metrics, workers=workers, resync_seconds=resync)
    for key in keys:
        controller.wake(key)
    running = asyncio.create_task(controller.run())
    await asyncio.sleep(seconds)
    running.cancel()
    await asyncio.wait({running})
    return metrics


def _count(metrics: Metrics, result: str) -> float:
    return metrics.registry.get_sample_value("speccache_operator_reconciles_total", {"result": result}) or 0


async def test_a_failing_resource_is_tried_again_and_again_and_does_not_hold_up_others() -> None:
    work = _Work(Unavailable("x"), Unavailable("x"), Unavailable("x"))
    metrics = await _run(work, 60, A, workers=1)
    assert work.times() == [0, 0.5, 1.5, 3.5]
    assert _count(metrics, "retry") == 3
    assert _count(metrics, "ok") == 1


async def test_an_unexpected_error_ends_one_pass_and_not_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    work = _Work(ZeroDivisionError("oops"))
    metrics = await _run(work, 10, A, workers=1)
    assert work.times() == [0, 0.5]
    assert _count(metrics, "error") == 1
    assert "reconcile failed unexpectedly" in caplog.text


async def test_a_pass_that_hangs_is_given_up_and_repeated() -> None:
    work = _Work(1e9)
    await _run(work, RECONCILE_TIMEOUT + 10, A)
    assert work.times() == [0, RECONCILE_TIMEOUT + 0.5]


async def test_a_wish_to_look_again_is_granted() -> None:
    work = _Work(Result(again_after=7))
    await _run(work, 60, A)
    assert work.times() == [0, 7]


async def test_a_refusal_backs_off_like_an_error() -> None:
    refused = Result(again_after=1000, failed=True)
    work = _Work(refused, refused)
    await _run(work, 60, A)
    assert work.times() == [0, 0.5, 1.5]


async def test_a_wake_up_during_a_pass_starts_another_after_it() -> None:
    work = _Work(5)

    async def listed() -> list[Key]:
        return []

    controller = Controller(work, listed, Metrics(), workers=4, resync_seconds=1e6)
    controller.wake(A)
    running = asyncio.create_task(controller.run())
    await asyncio.sleep(2)
    controller.wake(A)
    await asyncio.sleep(10)
    running.cancel()
    await asyncio.wait({running})
    assert work.times() == [0, 5]


async def test_workers_share_the_load() -> None:
    work = _Work(10, 10, 10, 10)
    keys = [Key("n", str(n)) for n in range(4)]
    await _run(work, 100, *keys, workers=2)
    assert sorted(at for at, _ in work.ran) == [0, 0, 10, 10]


async def test_every_resource_is_looked_at_now_and_then_and_a_failed_listing_is_repeated() -> None:
    work = _Work()
    answers: list[Any] = [Unavailable("x"), [A], [A, B]]

    async def listed() -> list[Key]:
        answer = answers.pop(0) if answers else []
        if isinstance(answer, Exception):
            raise answer
        found: list[Key] = answer
        return found

    controller = Controller(work, listed, Metrics(), workers=1, resync_seconds=100)
    running = asyncio.create_task(controller.run())
    await asyncio.sleep(200)
    running.cancel()
    await asyncio.wait({running})
    assert work.times(A) == [15, 115]
    assert work.times(B) == [115]


async def test_health_is_about_the_oldest_work() -> None:
    work = _Work(50)

    async def listed() -> list[Key]:
        return []

    controller = Controller(work, listed, Metrics(), workers=1, resync_seconds=1e6)
    controller.wake(A)
    controller.wake(B)
    running = asyncio.create_task(controller.run())
    await asyncio.sleep(30)
    state = controller.health()
    assert (state.queued, state.longest_wait_seconds, state.reconciles) == (1, 30, 0)
    assert state.alive(31)
    assert not state.alive(30)
    running.cancel()
    await asyncio.wait({running})
