"""Requests whose pages are on their way to the device: who waits for them, and who does not."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from speccache_runtime.cache import paired
from speccache_runtime.cache.transfer import Job, Move
from speccache_runtime.cache.transfer_cpu import CpuTransfer
from speccache_runtime.core import Tier
from speccache_runtime.scheduling.sequence import Status

NEW = 24


class HeldJob:
    """A load whose bytes arrive late: layer by layer when somebody waits for them, or all when it is let go."""

    def __init__(self, transfer: CpuTransfer, moves: Sequence[Move], waits: list[int]) -> None:
        self._transfer, self._moves, self._waits = transfer, moves, waits
        self._job: Job | None = None

    @property
    def nbytes(self) -> int:
        assert self._job is not None
        return self._job.nbytes

    @property
    def seconds(self) -> float:
        assert self._job is not None
        return self._job.seconds

    def arrive(self) -> None:
        if self._job is None:
            self._job = self._transfer.load(self._moves)

    def done(self) -> bool:
        return self._job is not None

    def wait_target_layer(self, layer: int) -> None:
        self._waits.append(layer)
        self.arrive()

    def wait_draft(self) -> None:
        self._waits.append(-1)
        self.arrive()


class SlowTransfer:
    """A transfer whose loads take as long as the test wants. Backups are done at once."""

    def __init__(self, inner: CpuTransfer) -> None:
        self._inner = inner
        self.jobs: list[HeldJob] = []
        self.waits: list[int] = []

    def backup(self, moves: Sequence[Move]) -> Job:
        return self._inner.backup(moves)

    def load(self, moves: Sequence[Move]) -> HeldJob:
        self.jobs.append(HeldJob(self._inner, moves, self.waits))
        return self.jobs[-1]


@pytest.fixture
def slow_life(
    pair: Any, tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, SlowTransfer]]:
    """Makes an engine with a slow transfer; its prompts are known to the host and no longer on the device."""
    made: list[SlowTransfer] = []

    def slowly(*pools: Any) -> SlowTransfer:
        made.append(SlowTransfer(CpuTransfer(*pools)))
        return made[-1]

    monkeypatch.setattr(paired, "make_transfer", slowly)

    def make(prompts: Sequence[Sequence[int]], **settings: Any) -> tuple[Any, SlowTransfer]:
        life = tools.Life(pair, **settings)
        life.run(prompts, 2)
        life.lose_the_device()
        return life, made[-1]

    return make


@pytest.fixture(scope="module")
def long(tools: SimpleNamespace) -> list[int]:
    return list(tools.random_tokens(90, seed=70))


def test_decoders_go_on_every_step_while_a_long_host_hit_arrives(
    pair: Any, tools: SimpleNamespace, slow_life: Any, long: list[int]
) -> None:
    life, transfer = slow_life([long])
    short = tools.random_tokens(9, seed=71)
    running = life.add(short, NEW)
    life.step()
    said = len(life.tokens_so_far(running))
    arriving = life.add(long, NEW)
    steps = 0
    while running in life.engine._sequences:
        life.step()
        now = len(life.tokens_so_far(running))
        assert now > said, "a running request waited for somebody else's pages"
        said, steps = now, steps + 1
    assert steps > 3
    assert transfer.waits == [], "a step waited for a load"
    assert arriving not in life.outputs
    (waiting,) = life.engine.scheduler.running
    assert waiting.status is Status.LOADING
    transfer.jobs[-1].arrive()
    while life.engine.num_requests:
        life.step()
    assert life.usage(arriving).cached_tokens[Tier.HOST] == 88
    for name, prompt in ((running, short), (arriving, long)):
        assert life.tokens(name) == pair.greedy(prompt, NEW)
    life.end()


def test_a_cold_prompt_passes_one_whose_pages_are_on_their_way(
    pair: Any, tools: SimpleNamespace, slow_life: Any, long: list[int]
) -> None:
    life, transfer = slow_life([long])
    arriving = life.add(long, NEW)
    cold = tools.random_tokens(30, seed=72)
    passing = life.add(cold, NEW)
    while passing in life.engine._sequences:
        life.step()
    assert (transfer.waits, arriving in life.outputs) == ([], False)
    transfer.jobs[-1].arrive()
    while life.engine.num_requests:
        life.step()
    assert life.tokens(arriving) == pair.greedy(long, NEW)
    assert life.tokens(passing) == pair.greedy(cold, NEW)
    life.end()


def test_alone_it_begins_at_once_and_waits_layer_by_layer_and_for_the_draft_last(
    pair: Any, slow_life: Any, long: list[int]
) -> None:
    life, transfer = slow_life([long])
    (name,) = life.run([long], NEW)
    layers = pair.target.facts.geometry.layers
    assert transfer.waits == [*range(layers), -1]
    assert life.tokens(name) == pair.greedy(long, NEW)
    life.end()


def test_accepted_counts_after_a_slow_load_are_those_of_the_device(pair: Any, slow_life: Any, long: list[int]) -> None:
    life, _ = slow_life([long])
    (slow,) = life.run([long], NEW)
    (fast,) = life.run([long], NEW)
    assert life.usage(slow).accepted_by_step == life.usage(fast).accepted_by_step
    life.end()


def test_who_shares_pages_that_are_on_their_way_waits_for_them_too(
    pair: Any, tools: SimpleNamespace, slow_life: Any, long: list[int]
) -> None:
    life, transfer = slow_life([long])
    decoding = life.add(tools.random_tokens(9, seed=71), 4 * NEW)
    life.step()
    first, second = life.add(long, NEW), life.add([*long[:80], *range(5)], NEW)
    for _ in range(4):
        life.step()
    assert len(transfer.jobs) == 1, "the second request loads pages that are already under way"
    assert [s.status for s in life.engine.scheduler.running[1:]] == [Status.LOADING, Status.LOADING]
    life.engine.abort(decoding)
    while life.engine.num_requests:
        life.step()
    assert life.tokens(first) == pair.greedy(long, NEW)
    assert life.tokens(second) == pair.greedy([*long[:80], *range(5)], NEW)
    life.end()


def test_pages_of_a_load_whose_request_is_gone_are_not_given_to_others_before_it_ends(
    pair: Any, tools: SimpleNamespace, slow_life: Any, long: list[int]
) -> None:
    """Else late bytes would land in somebody else's pages."""
    life, transfer = slow_life([long], device_pages=20)
    decoding = life.add(tools.random_tokens(9, seed=71), 5)
    life.step()
    gone = life.add(long, NEW)
    life.step()
    life.engine.abort(gone)
    life.cache.check_integrity()
    # Eleven of twenty pages are still being written to; this one needs all of the others.
    prompt = tools.random_tokens(40, seed=73)
    other = life.add(prompt, 8)
    while decoding in life.engine._sequences or other in life.engine._sequences:
        life.step()
    moved = {move.device for move in transfer.jobs[-1]._moves}
    assert not moved & set(life.cache.index.device.free_pages())
    transfer.jobs[-1].arrive()
    assert life.tokens(other) == pair.greedy(prompt, 8)
    (again,) = life.run([long], NEW)
    assert life.tokens(again) == pair.greedy(long, NEW)
    life.end()
