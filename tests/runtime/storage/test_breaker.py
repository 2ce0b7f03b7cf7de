"""The breaker's states over a clock that the tests move."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from speccache_runtime.cache.storage.breaker import Breaker, BreakerSettings, BreakerState

SETTINGS = BreakerSettings(threshold=3, backoff_s=2.0, cap_s=10.0)
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


@pytest.fixture
def changes() -> list[BreakerState]:
    return []


@pytest.fixture
def breaker(clock, changes) -> Breaker:
    return Breaker(SETTINGS, clock, changes.append)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        assert breaker.allow()
        breaker.failure()


def test_opens_after_failures_in_a_row_only(breaker: Breaker, changes) -> None:
    fail(breaker, 2)
    assert breaker.allow()
    breaker.success()
    fail(breaker, 2)
    assert breaker.state is CLOSED
    assert breaker.allow()
    breaker.failure()
    assert breaker.state is OPEN
    assert not breaker.allow()
    assert breaker.blocked()
    assert changes == [OPEN]


def test_back_off_doubles_to_the_cap_and_starts_anew_after_success(breaker: Breaker, clock, changes) -> None:
    fail(breaker, 3)
    for silence in (2.0, 4.0, 8.0, 10.0, 10.0):
        clock.now += silence - 0.001
        assert breaker.blocked()
        assert not breaker.allow()
        clock.now += 0.001
        assert not breaker.blocked()
        fail(breaker, 1)
    clock.now += 10.0
    assert breaker.allow()
    breaker.success()
    assert breaker.state is CLOSED
    fail(breaker, 3)
    clock.now += 2.0
    assert breaker.allow()
    assert changes == [OPEN, *[HALF_OPEN, OPEN] * 5, HALF_OPEN, CLOSED, OPEN, HALF_OPEN]


def test_one_attempt_while_half_open(breaker: Breaker, clock) -> None:
    fail(breaker, 3)
    clock.now += 2.0
    with ThreadPoolExecutor(16) as pool:
        allowed = list(pool.map(lambda _: breaker.allow(), range(200)))
    assert allowed.count(True) == 1
    assert breaker.blocked()
    breaker.success()
    assert breaker.allow()


def test_late_answers_of_calls_from_before_the_opening_change_nothing(breaker: Breaker, clock, changes) -> None:
    for _ in range(6):
        assert breaker.allow()
    for _ in range(3):
        breaker.failure()
    clock.now += 1.0
    breaker.failure()
    breaker.success()
    breaker.failure()
    assert changes == [OPEN]
    clock.now += 1.0
    assert breaker.allow()  # the first back-off: late failures have neither doubled it nor begun it anew


def test_an_attempt_that_hangs_has_failed(breaker: Breaker, clock, changes) -> None:
    """One call that never comes back does not keep storage from being asked for ever."""
    fail(breaker, 3)
    clock.now += 2.0
    assert breaker.allow()
    clock.now += SETTINGS.attempt_s - 0.001
    assert not breaker.allow()
    clock.now += 0.001
    assert not breaker.allow()
    assert changes == [OPEN, HALF_OPEN, OPEN]
    breaker.success()  # it came back after all, when nobody counted on it any more
    assert breaker.state is OPEN
    clock.now += 4.0
    assert breaker.allow()
    breaker.success()
    assert breaker.state is CLOSED


def test_in_a_hurry_every_silence_is_the_shortest(breaker: Breaker, clock) -> None:
    fail(breaker, 3)
    for silence in (2.0, 4.0):
        clock.now += silence
        fail(breaker, 1)
    breaker.hurry()
    for _ in range(3):
        clock.now += 1.999
        assert not breaker.allow()
        clock.now += 0.001
        fail(breaker, 1)


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": 0}, {"backoff_s": 0.0}, {"backoff_s": 5.0, "cap_s": 1.0}, {"cap_s": -1.0}, {"attempt_s": 0.0}],
)
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="threshold"):
        BreakerSettings(**wrong)  # type: ignore[arg-type]
