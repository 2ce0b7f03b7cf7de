"""The scheduler over a cache that only counts pages: order, budget, preemption, and that everybody finishes.

In: requests as numbers of tokens. Out: what the tokens are (engine/), where cached pages come from (cache/).
"""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccache_runtime.core import Finish, Request, SamplingParams, Tier
from speccache_runtime.scheduling.scheduler import Scheduler, Work
from speccache_runtime.scheduling.sequence import Sequence, Status

PAGE = 4


@dataclass
class Hit:
    tokens: int
    by_tier: dict[Tier, int] = field(default_factory=dict)
    draft_absent: int = 0


@dataclass(eq=False)
class Lease:
    """Page numbers of one request; `hit` is how many tokens admission finds for it."""

    hit: int = 0
    pages: list[int] = field(default_factory=list)
    released: int = 0
    loads: tuple[int, ...] = ()


@dataclass(eq=False)
class Wait:
    """A prefetch that is pending for so many more questions."""

    questions: int
    ended: int = 0


class CountingCache:
    """Pages as numbers. Every page has one owner; giving a page back twice is an error."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self.free = set(range(pages))
        self.arrived: set[int] = set()

    def prefetch_pending(self, prefetch: Wait | None) -> bool:
        if prefetch is None or prefetch.questions == 0:
            return False
        prefetch.questions -= 1
        return True

    def end_prefetch(self, prefetch: Wait | None) -> None:
        if prefetch is not None:
            prefetch.ended += 1
            assert prefetch.ended == 1, "a prefetch was ended twice"

    def admit(self, lease: Lease, tokens: Seq[int], prefetch: Any) -> Hit | None:
        assert lease.pages == []
        hit = min(lease.hit, (len(tokens) - 1) // PAGE * PAGE)
        if not self.take(lease, hit // PAGE):
            return None
        return Hit(hit, {Tier.HOST: hit}, draft_absent=hit // 2)

    def loading(self, lease: Lease) -> bool:
        return bool(set(lease.loads) - self.arrived)

    def grow(self, lease: Lease, num_slots: int) -> bool:
        return self.take(lease, -(-num_slots // PAGE) - len(lease.pages))

    def take(self, lease: Lease, count: int) -> bool:
        if count > len(self.free):
            return False
        lease.pages += [self.free.pop() for _ in range(max(0, count))]
        return True

    def release(self, lease: Lease) -> None:
        assert not self.free & set(lease.pages), "a page was given back twice"
        self.free |= set(lease.pages)
        lease.pages = []
        lease.released += 1


class World:
    """Runs a scheduler as the engine does, with a chosen number of accepted proposals."""

    def __init__(self, pages: int, *, max_running: int = 8, budget: int = 8, steps: int = 0, seed: int = 0) -> None:
        self.cache = CountingCache(pages)
        self.scheduler = Scheduler(self.cache, max_running=max_running, prefill_budget=budget, num_steps=steps)
        self.budget, self.steps = budget, steps
        self.random = random.Random(seed)
        self.all: list[Sequence] = []

    def add(self, prompt: int, new: int, *, hit: int = 0, wait: int = 0) -> Sequence:
        name = f"r{len(self.all)}"
        request = Request(name, tuple(range(prompt)), SamplingParams(max_tokens=new))
        seq = Sequence(request, Lease(hit), Wait(wait) if wait else None, arrived=float(len(self.all)))  # type: ignore[arg-type]
        self.all.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[Work]:
        waited = any(s.prefetch is not None and s.prefetch.questions for s in self.scheduler.waiting)  # type: ignore[attr-defined]
        before = list(self.scheduler.running)
        work = self.scheduler.schedule()
        assert work or waited, "nothing runs and nothing is waited for"
        self.check(work, before)
        for item in work:
            self.apply(item)
        for item in work:
            if item.seq.finish is not None:
                self.scheduler.finish(item.seq)
        return work

    def check(self, work: list[Work], before: list[Sequence]) -> None:
        assert len({id(w.seq) for w in work}) == len(work), "two shares for one sequence"
        prefill = [w for w in work if not w.decode]
        assert work == [w for w in work if w.decode] + prefill, "decoding does not come first"
        assert sum(w.rows for w in prefill) <= self.budget
        assert len(self.scheduler.running) <= self.scheduler._max_running
        for w in work:
            assert w.seq.status is Status.RUNNING
            assert w.start == w.seq.computed
            assert len(w.seq.lease.pages) * PAGE >= w.start + w.rows, "work without pages for it"
            assert w.wants_token == (w.start + w.rows - w.seq.num_proposals == len(w.seq.tokens))
        if before:
            assert before[0] in [w.seq for w in work], "the oldest must always go on"
        held = [page for seq in self.scheduler.running for page in seq.lease.pages]
        assert sorted([*held, *self.cache.free]) == list(range(self.cache.total))
        assert all(seq.lease.pages == [] for seq in self.scheduler.waiting)

    def apply(self, item: Work) -> None:
        seq, accepted = item.seq, self.random.randint(0, item.seq.num_proposals)
        seq.num_proposals = 0
        if not item.wants_token:
            seq.computed = item.start + item.rows
            return
        seq.append([9] * (accepted + 1))
        seq.computed = min(item.start + (1 + accepted if item.decode else item.rows), len(seq.tokens))
        if seq.finish is None:
            seq.num_proposals = min(item.propose, seq.tokens_left - 1)
            assert len(seq.lease.pages) * PAGE >= seq.computed + seq.num_proposals, "proposals without room for them"

    def run(self) -> None:
        """Until all have finished; a bound far above what any order needs."""
        left = 50 + 20 * sum(len(s.request.prompt) + s.request.params.max_tokens for s in self.all)
        while list(self.scheduler.sequences()):
            self.step()
            left -= 1
            assert left, "it goes on for ever"
        assert len(self.cache.free) == self.cache.total
        for seq in self.all:
            assert seq.status is Status.FINISHED


REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 10), st.integers(0, 3)), min_size=1, max_size=8
)


@given(REQUESTS, st.integers(0, 12), st.integers(1, 6), st.integers(1, 30), st.integers(0, 7), st.integers(0, 99))
def test_everybody_finishes_whom_the_pages_could_hold_alone(
    requests: list[tuple[int, int, int, int]], spare: int, max_running: int, budget: int, steps: int, seed: int
) -> None:
    pages = max(-(-(prompt + new) // PAGE) for prompt, new, _, _ in requests) + spare
    world = World(pages, max_running=max_running, budget=budget, steps=steps, seed=seed)
    for prompt, new, hit, wait in requests:
        world.add(prompt, new, hit=hit * PAGE, wait=wait)
    world.run()
    for seq, (_, new, _, _) in zip(world.all, requests, strict=True):
        assert seq.num_generated == new
        assert seq.finish is Finish.LENGTH


@given(REQUESTS, st.integers(0, 4), st.integers(0, 99), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 7))))
def test_an_abort_in_any_state_gives_everything_back_once(
    requests: list[tuple[int, int, int, int]], spare: int, seed: int, aborts: list[tuple[int, int]]
) -> None:
    pages = max(-(-(prompt + new) // PAGE) for prompt, new, _, _ in requests) + spare
    world = World(pages, steps=3, seed=seed)
    for prompt, new, hit, wait in requests:
        world.add(prompt, new, hit=hit * PAGE, wait=wait)
    for step in range(61):
        for seq in [world.all[n] for at, n in aborts if at == step and n < len(world.all)]:
            if seq.status is not Status.FINISHED:
                world.scheduler.finish(seq)
        if list(world.scheduler.sequences()):
            world.step()
    world.run()
    for seq in world.all:
        assert seq.prefetch is None or seq.prefetch.ended == 1  # type: ignore[attr-defined]
        assert seq.lease.pages == []


def test_who_comes_first_is_served_first() -> None:
    world = World(100, max_running=2, budget=100)
    seqs = [world.add(10, 3) for _ in range(4)]
    assert [w.seq for w in world.step()] == seqs[:2]
    assert [w.seq for w in world.step()] == seqs[:2]
    assert [w.seq for w in world.step()] == seqs[:2]
    assert [w.seq for w in world.step()] == seqs[2:]


def test_who_waits_for_storage_lets_others_pass_but_keeps_its_place() -> None:
    world = World(100, max_running=1, budget=100)
    late = world.add(10, 2, wait=1)
    first, second = world.add(10, 2), world.add(10, 2)
    order = []
    while list(world.scheduler.sequences()):
        order += [w.seq for w in world.step() if not w.decode]
    assert order == [first, late, second]


def test_a_long_prompt_is_computed_in_pieces_within_the_budget_while_others_decode() -> None:
    world = World(100, budget=8)
    short = world.add(3, 6)
    world.step()
    long = world.add(29, 2)
    pieces = []
    for _ in range(5):
        work = {w.seq: w for w in world.step()}
        assert short not in work or work[short].decode
        pieces.append((work[long].start, work[long].rows, work[long].wants_token))
    assert pieces == [(0, 8, False), (8, 8, False), (16, 8, False), (24, 5, True), (29, 1, True)]


def test_the_budget_is_shared_in_order_of_arrival() -> None:
    world = World(100, budget=8)
    for prompt in (3, 9, 2):
        world.add(prompt, 2)
    assert [(w.seq.request.request_id, w.rows) for w in world.step()] == [("r0", 3), ("r1", 5)]
    assert [(w.seq.request.request_id, w.rows) for w in world.step()] == [("r0", 1), ("r1", 4), ("r2", 2)]


def test_decoding_does_not_count_against_the_prefill_budget() -> None:
    world = World(100, budget=4)
    world.add(4, 5)
    world.step()
    world.add(4, 5)
    assert [(w.decode, w.rows) for w in world.step()] == [(True, 1), (False, 4)]


def test_the_youngest_is_preempted_and_starts_again_at_the_head_of_the_queue() -> None:
    world = World(5, budget=100)
    old, middle, young = world.add(7, 9), world.add(4, 2), world.add(4, 6)
    later = world.add(1, 1)
    world.scheduler.waiting.remove(later)
    world.step()
    assert world.scheduler.running == [old, middle, young]
    world.scheduler.add(later)
    while not world.scheduler.preemptions:
        world.step()
    assert young.status is Status.WAITING
    assert young.lease.pages == []  # type: ignore[attr-defined]
    assert (young.computed, young.num_proposals) == (0, 0)
    assert list(world.scheduler.waiting) == [young, later]
    generated = young.num_generated
    assert generated > 0, "its tokens stay"
    world.run()
    assert young.num_generated == 6


def test_a_preempted_request_keeps_the_cache_source_of_its_first_admission() -> None:
    world = World(5, budget=100)
    world.add(7, 9)
    young = world.add(5, 9, hit=PAGE)
    world.step()
    assert (young.cached, young.draft_absent) == ({Tier.HOST: 4}, 2)
    young.lease.hit = 0  # type: ignore[attr-defined]
    while not world.scheduler.preemptions:
        world.step()
    world.run()
    assert (young.cached, young.draft_absent) == ({Tier.HOST: 4}, 2)


def test_nobody_comes_in_while_somebody_is_short_of_room() -> None:
    """Else the whole queue would be admitted with nothing to compute, each holding the pages of its cached prefix."""
    world = World(6, budget=100, max_running=8)
    first = world.add(17, 3)  # five of six pages
    others = [world.add(8, 2, hit=PAGE) for _ in range(4)]
    world.step()
    world.step()
    assert world.scheduler.running[0] is first
    assert len(world.scheduler.running) <= 2
    assert sum(seq.status is Status.WAITING for seq in others) >= 3
    world.run()


def test_two_prompts_that_fill_the_pages_together_do_not_wait_for_each_other() -> None:
    world = World(8, budget=4)
    one, two = world.add(24, 8), world.add(24, 8)
    order = []
    while list(world.scheduler.sequences()):
        order += [w.seq for w in world.step() if w.wants_token]
    assert order.index(one) < order.index(two)


def test_a_whole_hit_decodes_at_once_after_a_preemption() -> None:
    """When all but the newest token is cached there is one row to compute, and it chooses a token."""
    world = World(10, budget=100)
    seq = world.add(8, 9, hit=100)
    seq.tokens.append(9)  # generated before it was preempted
    (work,) = world.scheduler.schedule()
    assert (work.start, work.rows, work.wants_token) == (8, 1, True)


@pytest.mark.parametrize(
    ("stops", "tokens", "taken", "finish"),
    [
        ((), [1, 2, 3], [1, 2, 3], None),
        ((2,), [1, 2, 3], [1, 2], Finish.STOP),
        ((), [1, 2, 3, 4, 5], [1, 2, 3, 4], Finish.LENGTH),
        ((4,), [1, 2, 3, 4], [1, 2, 3, 4], Finish.STOP),
        ((5,), [1, 2, 3, 4, 5], [1, 2, 3, 4], Finish.LENGTH),
    ],
)
def test_tokens_behind_the_end_of_a_request_do_not_count(
    stops: tuple[int, ...], tokens: list[int], taken: list[int], finish: Finish | None
) -> None:
    params = SamplingParams(max_tokens=4, stop_token_ids=frozenset(stops))
    seq = Sequence(Request("r", (7, 8), params), Lease(), None, 0.0)  # type: ignore[arg-type]
    assert seq.append(tokens) == taken
    assert seq.finish is finish
    assert seq.tokens == [7, 8, *taken]


def test_accept_length_of_the_first_64_tokens_ends_with_the_step_that_passes_them() -> None:
    seq = Sequence(Request("r", (1,), SamplingParams(max_tokens=200)), Lease(), None, 0.0)  # type: ignore[arg-type]
    seq.append([1])
    for _ in range(30):
        before = seq.num_generated
        seq.append([1] * 5)
        seq.counts.add(4, before, seq.num_generated)
    usage = seq.usage()
    assert usage.completion_tokens == 151
    assert (usage.verify_steps, usage.verify_steps_first64, usage.tokens_first64) == (30, 13, 66)
    assert usage.accept_length == pytest.approx(151 / 30)
    assert usage.accept_length_first64 == pytest.approx(66 / 13)
    assert usage.accepted_by_step == (4,) * 30


@pytest.mark.parametrize(
    ("cached", "absent", "source"),
    [
        (None, 0, "cold"),
        ({Tier.DEVICE: 0}, 0, "cold"),
        ({Tier.DEVICE: 16, Tier.HOST: 0}, 0, "device"),
        ({Tier.DEVICE: 16, Tier.STORAGE: 16}, 0, "storage"),
        ({Tier.STORAGE: 16}, 16, "degraded"),
    ],
)
def test_a_request_is_named_after_the_slowest_tier_it_used(
    cached: dict[Tier, int] | None, absent: int, source: str
) -> None:
    seq = Sequence(Request("r", (1,), SamplingParams(max_tokens=1)), Lease(), None, 0.0)  # type: ignore[arg-type]
    seq.cached, seq.draft_absent = cached, absent
    assert seq.source == source
