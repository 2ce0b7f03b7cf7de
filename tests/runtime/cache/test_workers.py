"""Storage threads: as many operations at once as latency asks for, and none that hangs holds up another."""

import heapq
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from speccache_runtime.cache import workers
from speccache_runtime.cache.workers import LEAST, MOST, InFlight, Workers

PATIENCE_S = 20.0


@pytest.fixture
def made() -> Iterator[Callable[..., Workers]]:
    every: list[Workers] = []

    def make(*arguments: object) -> Workers:
        every.append(Workers(*arguments))  # type: ignore[arg-type]
        return every[-1]

    yield make
    for each in every:
        each.close()


def test_one_thread_runs_jobs_in_order_of_arrival(made: Callable[..., Workers]) -> None:
    seen: list[int] = []
    done = threading.Event()
    pool = made("test", 1)
    for number in range(50):
        pool.submit(lambda number=number: seen.append(number) is None)
    pool.submit(lambda: done.set() is None)
    assert done.wait(PATIENCE_S)
    assert seen == list(range(50))


def test_closing_drops_what_has_not_begun_and_waits_for_nobody() -> None:
    hangs, go_on, never = threading.Event(), threading.Event(), threading.Event()

    def hang() -> bool:
        hangs.set()
        return go_on.wait(PATIENCE_S)

    pool = Workers("hanging", 1)
    pool.submit(hang)
    pool.submit(lambda: never.set() is None)
    assert hangs.wait(PATIENCE_S)
    pool.close()
    (thread,) = [t for t in threading.enumerate() if t.name == "hanging-1"]
    assert thread.daemon, "the interpreter would wait for it at exit"
    go_on.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not never.is_set()


def test_jobs_run_at_once_but_not_more_than_the_limit(made: Callable[..., Workers]) -> None:
    together = threading.Barrier(LEAST, timeout=PATIENCE_S)
    running = threading.Semaphore(LEAST)
    done = threading.Semaphore(0)

    def job() -> bool:
        assert running.acquire(blocking=False), "too many at once"
        together.wait()
        running.release()
        done.release()
        return False

    pool = made("test")
    for _ in range(5 * LEAST):
        pool.submit(job)
    for _ in range(5 * LEAST):
        assert done.acquire(timeout=PATIENCE_S)


def test_what_hangs_makes_room(made: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume may never answer: were its calls counted for ever, nothing would be tried when it is well again."""
    monkeypatch.setattr(workers, "STUCK_S", 0.05)
    go_on, done = threading.Event(), threading.Event()
    pool = made("test")
    for _ in range(2 * LEAST):
        pool.submit(lambda: go_on.wait(PATIENCE_S))
    pool.submit(lambda: done.set() is None)
    assert done.wait(PATIENCE_S)
    go_on.set()


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def simulate(latency: float, most_per_second: float, seconds: float = 20.0) -> int:
    """A storage with this latency and rate, always asked for as much as the limit allows; the limit in the end."""
    clock = Clock()
    in_flight = InFlight(clock)
    free_at, pending, end = clock.now, [], clock.now + seconds
    while clock.now < end:
        while len(pending) < in_flight.limit:
            free_at = max(free_at, clock.now) + 1 / most_per_second
            heapq.heappush(pending, (max(free_at, clock.now + latency), clock.now))
        ends, begun = heapq.heappop(pending)
        clock.now = max(clock.now, ends)
        in_flight.ended(clock.now - begun, waiting=True)
    return in_flight.limit


@pytest.mark.parametrize(
    ("latency", "rate", "least", "most"),
    [
        (0.0001, 2000, LEAST, LEAST),  # a disk
        (0.030, 400, 12, 24),  # a bucket near by
        (0.100, 250, 25, 60),
        (0.500, 5000, MOST, MOST),
    ],
)
def test_as_many_at_once_as_latency_asks_for(latency: float, rate: float, least: int, most: int) -> None:
    assert least <= simulate(latency, rate) <= most


def test_operations_with_nobody_waiting_say_nothing_of_the_rate() -> None:
    clock = Clock()
    in_flight = InFlight(clock)
    for _ in range(1000):
        clock.now += 0.3
        in_flight.ended(0.2, waiting=False)
    assert in_flight.limit == LEAST


def test_a_thread_is_made_only_when_it_is_needed(made: Callable[..., Workers]) -> None:
    pool = made("sparing")
    for _ in range(20):
        done = threading.Event()
        pool.submit(lambda done=done: done.set() is None)
        assert done.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while pool._idle < 1:
            assert time.monotonic() < deadline
    assert sum(thread.name.startswith("sparing-") for thread in threading.enumerate()) <= 2
