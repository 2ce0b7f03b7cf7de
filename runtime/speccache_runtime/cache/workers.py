"""Threads for operations that wait for somebody else, as many at once as that takes.

How many (Little's law): as many as end while one of them is under way, rate times latency. With fewer, storage is idle
part of the time; with more they only wait for each other. Both are measured: the rate while work was waiting, the
latency when there was least of it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

LEAST = 4
MOST = 64
"""Operations at once, and threads."""

STUCK_S = 5.0
"""An operation that takes longer keeps no other from beginning: a volume may never answer it."""

_WINDOW_S = 0.25
_WINDOWS = 120
"""Half a minute of measurements, in pieces in which some operations end."""
_GAIN = 1.5
"""More than what fits exactly, or a rate that is held down by too few at once would never be found out."""


class InFlight:
    """How many operations to have under way. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that never go back."""
        self._clock = clock
        self._begun = clock()
        self._ended = 0
        self._fastest = math.inf
        self._rates: deque[float] = deque(maxlen=_WINDOWS)
        self._latencies: deque[float] = deque(maxlen=_WINDOWS)
        self.limit = LEAST

    def ended(self, seconds: float, *, waiting: bool) -> None:
        """An operation took so long; `waiting` says whether others wait to begin: else their rate says nothing."""
        self._ended += 1
        self._fastest = min(self._fastest, seconds)
        now = self._clock()
        if now - self._begun < max(_WINDOW_S, 2 * self._fastest) and waiting:
            return
        if waiting:
            self._rates.append(self._ended / (now - self._begun))
        self._latencies.append(self._fastest)
        self._begun, self._ended, self._fastest = now, 0, math.inf
        if self._rates:
            self.limit = min(MOST, max(LEAST, math.ceil(_GAIN * max(self._rates) * min(self._latencies))))


class Workers:
    """Runs jobs in order of arrival, on threads that are made when they are needed.

    They are daemons: the standard library's pools are waited for when the process ends, so that one call that a dead
    network volume never answers would keep a drained process alive until it is killed.
    """

    def __init__(self, name: str, most: int = MOST) -> None:
        """At most `most` threads, called `name`-1 and so on."""
        self._name = name
        self._most = most
        self._in_flight = InFlight()
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], bool]] = deque()
        self._running: dict[int, float] = {}
        self._threads = 0
        self._idle = 0
        self._closed = False

    def submit(self, job: Callable[[], bool]) -> None:
        """Queues a job, which must not raise. It answers whether it was an operation as most are, so that its time
        says something about the others."""
        with self._changed:
            self._jobs.append(job)
            self._use_threads()

    def close(self) -> list[Callable[[], bool]]:
        """Ends the threads, without waiting for one that hangs. Returns the jobs that have not begun: none will."""
        with self._changed:
            left = list(self._jobs)
            self._jobs.clear()
            self._closed = True
            self._changed.notify_all()
        return left

    @property
    def idle(self) -> bool:
        """Whether no job runs or waits."""
        with self._changed:
            return not (self._jobs or self._running)

    def _use_threads(self) -> None:
        """Wakes or makes threads for the jobs that may begin, and one more while jobs wait: it looks whether those that
        run hang. With the lock held."""
        wanted = min(len(self._jobs), max(1, self._room()))
        while self._idle < wanted and self._threads < self._most:
            self._idle += 1
            self._threads += 1
            name = f"{self._name}-{self._threads}"
            threading.Thread(target=self._work, args=(self._threads,), name=name, daemon=True).start()
        self._changed.notify(wanted)

    def _room(self) -> int:
        """How many jobs more may begin."""
        now = time.monotonic()
        moving = sum(now - begun <= STUCK_S for begun in self._running.values())
        return self._in_flight.limit - moving

    def _work(self, number: int) -> None:
        while (job := self._next(number)) is not None:
            begun = time.monotonic()
            usual = job()
            with self._changed:
                del self._running[number]
                self._idle += 1
                if usual:
                    self._in_flight.ended(time.monotonic() - begun, waiting=bool(self._jobs))
                self._use_threads()

    def _next(self, number: int) -> Callable[[], bool] | None:
        """The next job, when it may begin; None at the end."""
        with self._changed:
            while not self._closed:
                if self._jobs and self._room() > 0:
                    self._idle -= 1
                    self._running[number] = time.monotonic()
                    job = self._jobs.popleft()
                    self._use_threads()
                    return job
                # A job that gets stuck makes room without telling anybody.
                self._changed.wait(STUCK_S if self._jobs else None)
            return None
