"""A store keeps to its size, whoever writes, and what goes is what was used longest ago, children before parents.

Backends in memory whose clock the tests move; the file and bucket backends do the same by the conformance suite.
"""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from speccache_runtime.cache.storage.base import BackendError, NoteName, ObjectName, StoredObject
from speccache_runtime.cache.storage.capacity import keeper as keeper_module
from speccache_runtime.cache.storage.capacity import recent as recent_module
from speccache_runtime.cache.storage.capacity import sweeper
from speccache_runtime.cache.storage.capacity.account import HIGH, LOW, Account, excess, limits
from speccache_runtime.cache.storage.capacity.budget import Budget
from speccache_runtime.cache.storage.capacity.keeper import Keeper
from speccache_runtime.cache.storage.capacity.lease import TTL_S, SweeperLease
from speccache_runtime.cache.storage.capacity.ledger import Ledger
from speccache_runtime.cache.storage.capacity.notes import STATE, USAGE, State, Usage
from speccache_runtime.cache.storage.capacity.recent import FILTER_BYTES, GENERATION_S, Recent, contains
from speccache_runtime.cache.storage.capacity.sweeper import SPARED_S, WRITER_TTL_S
from speccache_runtime.cache.storage.codec import HEADER_SIZE, Half
from speccache_runtime.cache.storage.observer import NullObserver
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairStore

from .memory import MemoryBackend, Shelf
from .places import PLACES

FINGERPRINT = "99" * 32
ROOT = bytes(32)
TARGET_SPACE, DRAFT_SPACE = b"\x11" * 32, b"\x22" * 32
TARGET_BYTES, DRAFT_BYTES = 20_000, 4_000
PAIR_BYTES = TARGET_BYTES + DRAFT_BYTES + 2 * HEADER_SIZE


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class Frozen(Shelf):
    """A shelf whose clock stands until a test moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 1e9

    def now(self) -> float:
        return self.time

    @property
    def stored(self) -> int:
        """Bytes of all objects; notes are not pages."""
        return sum(len(content) for path, (content, _) in self.kept.items() if ObjectName.parse(path))

    def pages(self) -> dict[str, str]:
        """Parent by key of all stored targets."""
        names = [name for path in self.kept if (name := ObjectName.parse(path)) and name.half is Half.TARGET]
        return {name.key: name.parent for name in names}


class Pod:
    """One writer and reader with its keeper, whose rounds the test runs."""

    def __init__(self, shelf: Frozen, capacity: int | None) -> None:
        self.removed = 0
        backend = MemoryBackend(shelf)
        self.keeper = Keeper(backend, FINGERPRINT, capacity, self, clock=lambda: shelf.time)  # type: ignore[arg-type]
        self.store = PairStore(
            backend,
            FINGERPRINT,
            TARGET_SPACE,
            DRAFT_SPACE,
            TARGET_BYTES,
            DRAFT_BYTES,
            NullObserver(),
            keeper=self.keeper,
        )
        self.usage: tuple[int, int, int | None] | None = None

    def on_usage(self, nbytes: int, objects: int, capacity: int | None) -> None:
        self.usage = nbytes, objects, capacity

    def on_swept(self, pages: int, nbytes: int) -> None:
        self.removed += pages

    def write(self, key: bytes, parent: bytes = ROOT) -> Outcome:
        return self.store.write_pair(key, parent, bytes(TARGET_BYTES), bytes(DRAFT_BYTES), (1,)).target

    def read(self, key: bytes, parent: bytes = ROOT) -> Outcome:
        buffers = memoryview(bytearray(TARGET_BYTES)), memoryview(bytearray(DRAFT_BYTES))
        return self.store.read_pair(key, parent, *buffers).target


# ---- what to remove


TREES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50), st.booleans()), min_size=1, max_size=40)


@given(TREES, st.integers(0, 51), st.sets(st.integers(0, 39)), st.integers(0, 60))
def test_leaves_go_first_and_of_them_the_one_used_longest_ago(
    tree: list[tuple[int, int, bool]], before: int, spared: set[int], count: int
) -> None:
    """A page hangs below an earlier one or is a prompt's first. The ledger against a slow, obvious way."""
    keys = [digest(f"page {number}").hex() for number in range(len(tree))]
    parents = [keys[above % number] if number and above else "0" * 64 for number, (above, _, _) in enumerate(tree)]
    objects = []
    for key, parent, (_, used, has_draft) in zip(keys, parents, tree, strict=True):
        for half in Half if has_draft else [Half.TARGET]:
            space = TARGET_SPACE if half is Half.TARGET else DRAFT_SPACE
            name = ObjectName(FINGERPRINT, half, space.hex(), key, parent[:16])
            objects.append(StoredObject(name, 100 + used, used - (half is Half.DRAFT)))
    ledger = Ledger(reversed(objects))
    assert (ledger.nbytes, ledger.objects) == (sum(o.nbytes for o in objects), len(objects))

    left = {key: (parent, used) for key, parent, (_, used, _) in zip(keys, parents, tree, strict=True)}
    kept = {keys[number] for number in spared if number < len(keys)}
    victims = ledger.victims(before, lambda key: key in kept)
    for _ in range(count):
        leaves = [
            (used, key)
            for key, (_, used) in left.items()
            if key not in kept and used < before and not any(parent == key for parent, _ in left.values())
        ]
        page = next(victims, None)
        if not leaves:
            assert page is None
            break
        assert page is not None
        assert (left[page.key][1], page.key) == min(leaves)
        assert page.names[0].half is Half.TARGET
        del left[page.key]
    assert len(ledger) == len(left)
    assert ledger.nbytes == sum(o.nbytes for o in objects if o.name.key in left)


# ---- what was read of late


def test_what_was_read_in_the_last_minute_is_named_and_later_forgotten() -> None:
    now = [100.0]
    recent = Recent(lambda: now[0])
    keys = [digest(f"{number}") for number in range(2000)]
    for key in keys[:1000]:
        recent.add(key)
    now[0] += GENERATION_S - 1
    for key in keys[1000:1500]:
        recent.add(key)
    now[0] += GENERATION_S - 1
    assert all(contains(recent.filter(), key) for key in keys[1000:1500])
    now[0] += 2
    found = recent.filter()
    assert len(found) == FILTER_BYTES
    assert sum(contains(found, key) for key in keys[1500:]) < 10, "others are named by mistake, but few"
    now[0] += GENERATION_S
    assert not any(recent.filter())


# ---- who sweeps


def test_one_pod_sweeps_until_it_gives_up_or_says_nothing_for_long() -> None:
    shelf = Frozen()
    one, other, third = (SweeperLease(MemoryBackend(shelf), FINGERPRINT, name) for name in ("one", "other", "third"))
    assert one.hold()
    assert not other.hold()
    shelf.time += TTL_S - 1
    assert one.hold()
    shelf.time += TTL_S - 1
    assert not other.hold(), "it was renewed"
    shelf.time += 2
    assert other.hold(), "it expired"
    assert not one.held()
    assert not one.hold()
    assert not third.hold()
    other.release()
    assert third.hold()
    assert not other.hold()


class Leases(RuleBasedStateMachine):
    """Pods that stop for any time, and a clock: nobody sweeps while another one believes, rightly, that it may."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Frozen()
        self.leases = [SweeperLease(MemoryBackend(self.shelf), FINGERPRINT, str(n)) for n in range(3)]
        self.until = [0.0, 0.0, 0.0]

    @rule(who=st.integers(0, 2))
    def hold(self, who: int) -> None:
        ours = self.leases[who].hold()
        others = [until for number, until in enumerate(self.until) if number != who]
        if ours:
            assert all(until < self.shelf.time for until in others), "two hold it"
            self.until[who] = self.shelf.time + TTL_S
        elif all(until < self.shelf.time for until in others):
            raise AssertionError("nobody may hold it any more")

    @rule(who=st.integers(0, 2))
    def look(self, who: int) -> None:
        if self.leases[who].held():
            assert all(until < self.shelf.time or number == who for number, until in enumerate(self.until)), (
                "it was succeeded and has not seen it"
            )

    @rule(who=st.integers(0, 2))
    def release(self, who: int) -> None:
        self.leases[who].release()
        self.until[who] = 0.0

    @rule(seconds=st.sampled_from([0.0, 1.0, TTL_S / 2, TTL_S + 0.001]))
    def wait(self, seconds: float) -> None:
        self.shelf.time += seconds


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


# ---- arithmetic


@given(
    listed=st.integers(0, 10**6),
    moves=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1000)), max_size=30),
    at=st.integers(0, 30),
    removed=st.integers(0, 1000),
)
def test_what_writers_say_is_added_to_the_listing(
    listed: int, moves: list[tuple[str, int]], at: int, removed: int
) -> None:
    written: dict[str, int] = {}
    for writer, count in moves[:at]:
        written[writer] = written.get(writer, 0) + count
    account = Account(listed, dict(written), removed)
    for writer, count in moves[at:]:
        written[writer] = written.get(writer, 0) + count
        assert account.used(written) >= 0
    assert account.used(written) == max(0, listed - removed + sum(count for _, count in moves[at:]))
    assert account.used({}) == account.used(written), "who has ended does not take with it what it wrote"


@given(st.integers(1, 10**7), st.integers(0, 2 * 10**7), st.integers(1, 5), st.integers(1, 10**5))
def test_after_making_room_writers_may_write_and_not_too_much(
    capacity: int, used: int, writers: int, largest: int
) -> None:
    left = used - excess(used, capacity, writers, largest)
    assert left <= max(capacity, 0)
    written = {str(number): number * 1000 for number in range(writers)}
    until = limits(left, capacity, written, dict.fromkeys(written, 0))
    assert left + sum(until[writer] - written[writer] for writer in written) <= int(capacity * HIGH)
    if capacity * HIGH >= 2 * writers * largest + 1:
        assert all(until[writer] - written[writer] >= largest for writer in written), "nobody can write"
    if used <= capacity * LOW and used + writers * largest <= int(capacity * HIGH):
        assert left == used, "what fits stays"


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.lists(st.tuples(*[st.integers(0, 10**6)] * 2), max_size=5))
def test_limits_are_kept_also_by_writers_that_go_by_earlier_ones(
    capacity: int, used: int, writers: list[tuple[int, int]]
) -> None:
    written = {str(number): count for number, (count, _) in enumerate(writers)}
    held = {str(number): count + more for number, (count, more) in enumerate(writers)}
    before = sum(more for _, more in writers)
    until = limits(used, capacity, written, held)
    assert all(until[writer] >= count for writer, count in written.items())
    most = sum(max(held[writer], until[writer]) - count for writer, count in written.items())
    assert used + most <= max(used + before, int(capacity * HIGH))


def test_a_budget_counts_what_was_written_and_refuses_the_rest() -> None:
    budget = Budget(limited=True)
    assert not budget.take(1)
    assert budget.short
    budget.allow(100)
    assert not budget.short
    assert budget.take(60)
    assert not budget.take(41)
    assert budget.take(40)
    budget.give_back(60)
    assert budget.take(60)
    assert (budget.written, budget.largest) == (100, 60)
    assert Budget(limited=False).take(10**15)


# ---- notes


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"{}",
        b"[]",
        b'{"written": -1, "largest": 0, "until": 0, "heard": 0, "used": -1, "objects": 1, "number": 1}',
        b'{"written": 1.5, "largest": 0, "until": 0, "heard": 0, "used": 1.5, "objects": 1, "number": 1}',
        b'{"written": true, "largest": 0, "until": 0, "heard": 0, "used": true, "objects": 1, "number": 1}',
        b'{"used": 1, "objects": 1}',
        b'{"used": 1, "objects": 1, "number": 1, "until": [1]}',
        b'{"used": 1, "objects": 1, "number": 1, "until": {"a": "b"}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_note_is_ignored(body: bytes) -> None:
    assert State.from_bytes(body) is None
    assert Usage.from_bytes(body) is None
    assert Usage.from_bytes(body + b"\n" + bytes(FILTER_BYTES)) is None


def test_notes_come_back_as_they_were_written() -> None:
    for state in (State(5, 2, 1), State(5, 2, 1, {"ab": 7})):
        assert State.from_bytes(state.to_bytes()) == state
    usage = Usage(3, 2, 4, 1, b"\n" * FILTER_BYTES)
    assert Usage.from_bytes(usage.to_bytes()) == usage
    assert Usage.from_bytes(usage.to_bytes()[:-1]) is None


# ---- the whole


def fill(pods: list[Pod], shelf: Frozen, prompts: int, pages: int, between: float) -> None:
    """Each pod writes prompts of its own, with a round now and then."""
    for prompt in range(prompts):
        for number, pod in enumerate(pods):
            parent = ROOT
            for page in range(pages):
                key = digest(f"{number} {prompt} {page}")
                pod.write(key, parent)
                parent = key
            shelf.time += between
            pod.keeper.round()


@pytest.mark.parametrize("pairs", [40, 400])
def test_four_writers_keep_within_five_per_cent(pairs: int) -> None:
    shelf = Frozen()
    capacity = pairs * PAIR_BYTES
    pods = [Pod(shelf, capacity) for _ in range(4)]
    for pod in [*pods, *pods, *pods]:  # the first gives half its share up, and then the other has it
        pod.keeper.round()
    peak = 0
    for prompt in range(pairs // 2):
        for number, pod in enumerate(pods):
            parent = ROOT
            for page in range(8):
                key = digest(f"{number} {prompt} {page}")
                pod.write(key, parent)
                parent = key
            peak = max(peak, shelf.stored)  # only rounds remove
            shelf.time += 20.0
            pod.keeper.round()
    assert peak <= 1.05 * capacity
    assert shelf.stored >= 0.85 * capacity, "it keeps what it may"
    assert sum(pod.removed for pod in pods) > pairs
    used, objects, told = pods[0].usage or (0, 0, 0)
    assert told == capacity
    assert abs(used - shelf.stored) <= 0.1 * capacity
    assert objects > 0
    left = shelf.pages()
    known = {key[:16] for key in left} | {"0" * 16}
    assert all(parent in known for parent in left.values()), "a page is left whose parent is gone"


def test_a_page_that_somebody_has_just_read_stays() -> None:
    shelf = Frozen()
    pods = [Pod(shelf, 10 * PAIR_BYTES) for _ in range(2)]
    for pod in [*pods, *pods, *pods]:  # the first gives half its share up, and then the other has it
        pod.keeper.round()
    old = [digest(f"old {number}") for number in range(8)]
    for key in old:
        assert pods[0].write(key) is Outcome.WRITTEN
        for pod in pods:
            pod.keeper.round()
    shelf.time += SPARED_S + 1
    assert pods[1].read(old[0]) is Outcome.HIT
    pods[1].keeper.round()
    shelf.time += SPARED_S - 2
    for number in range(12):
        pods[0].write(digest(f"new {number}"))
        for pod in pods:
            pod.keeper.round()
    assert old[0].hex() in shelf.pages(), "it was read in the last minute"
    assert old[1].hex() not in shelf.pages()


def test_a_page_that_has_just_got_a_child_stays() -> None:
    """The sweeper's listing may be from before; without its parent nobody would find the child."""
    shelf = Frozen()
    sweeper, writer = Pod(shelf, 20 * PAIR_BYTES), Pod(shelf, 20 * PAIR_BYTES)

    def write(key: bytes, parent: bytes = ROOT) -> None:
        for _ in range(10):
            for pod in (writer, sweeper):
                pod.keeper.round()
            shelf.time += 0.1
            if writer.write(key, parent) is Outcome.WRITTEN:
                return
        raise AssertionError("there is no room")

    parent, child = digest("parent"), digest("child")
    for number in range(14):
        write(parent if number == 4 else digest(f"old {number}"))
    shelf.time += SPARED_S + 1
    for number in range(8):
        write(digest(f"new {number}"))
    assert parent.hex() in shelf.pages()
    assert sweeper.removed + writer.removed > 0, "so there is a listing"
    write(child, parent)
    for number in range(6):
        write(digest(f"newer {number}"))
    left = shelf.pages()
    assert child.hex() in left
    assert parent.hex() in left
    assert digest("old 5").hex() not in left


def test_what_is_new_stays_and_then_there_is_no_room() -> None:
    shelf = Frozen()
    pod = Pod(shelf, 10 * PAIR_BYTES)
    pod.keeper.round()
    outcomes = []
    for number in range(30):
        outcomes.append(pod.write(digest(str(number))))
        pod.keeper.round()
    assert outcomes[:9] == [Outcome.WRITTEN] * 9
    assert set(outcomes[10:]) == {Outcome.FULL}
    shelf.time += SPARED_S + 1
    pod.keeper.round()
    assert pod.write(digest("later")) is Outcome.WRITTEN


def test_touched_pages_outlive_others() -> None:
    shelf = Frozen()
    pod = Pod(shelf, 10 * PAIR_BYTES)
    pod.keeper.round()
    for number in range(9):
        assert pod.write(digest(str(number))) is Outcome.WRITTEN
    shelf.time += 4000
    assert pod.store.touch(digest("0"), ROOT, True) is Outcome.DONE
    assert pod.store.touch(digest("none"), ROOT, True) is Outcome.MISS
    shelf.time += SPARED_S + 1
    pod.keeper.round()
    for number in range(6):
        pod.write(digest(f"new {number}"))
        pod.keeper.round()
    left = shelf.pages()
    assert digest("0").hex() in left
    assert digest("1").hex() not in left


def test_other_things_that_lie_there_are_left_alone_and_do_not_count() -> None:
    shelf = Frozen()
    foreign = {
        "v2/" + "88" * 32 + "/t/" + "11" * 32 + "/ab/" + "ab" * 32 + "-" + "0" * 16: b"x" * PAIR_BYTES * 5,
        f"v2/{FINGERPRINT}/notes.txt": b"x" * PAIR_BYTES * 5,
        "somebody/else": b"x" * PAIR_BYTES * 5,
    }
    shelf.kept.update({path: (content, 0.0) for path, content in foreign.items()})
    pod = Pod(shelf, 4 * PAIR_BYTES)
    pod.keeper.round()
    for number in range(12):
        pod.write(digest(str(number)))
        shelf.time += SPARED_S + 1
        pod.keeper.round()
    assert foreign.keys() <= shelf.kept.keys()
    assert pod.removed > 5


def test_without_a_capacity_everything_is_kept_and_counted() -> None:
    shelf = Frozen()
    pod = Pod(shelf, None)
    fill([pod], shelf, prompts=20, pages=3, between=1000.0)
    assert pod.removed == 0
    assert len(shelf.pages()) == 60
    used, objects, capacity = pod.usage or (0, 0, 0)
    assert (used, capacity) == (60 * PAIR_BYTES, None)
    assert 100 <= objects <= 120, "as of the last listing"


def test_a_writer_that_hears_nothing_stops_writing() -> None:
    """Its store does not answer, or nobody sweeps: what it was allowed holds for a minute."""
    shelf = Frozen()
    sweeper, writer = Pod(shelf, 100 * PAIR_BYTES), Pod(shelf, 100 * PAIR_BYTES)
    for pod in (sweeper, writer, sweeper, writer, sweeper, writer):
        pod.keeper.round()
    assert writer.write(digest("a")) is Outcome.WRITTEN
    writer.keeper._sweeper = None
    shelf.time += keeper_module.STATE_TTL_S + 1
    writer.keeper.round()
    assert writer.write(digest("b")) is Outcome.FULL
    sweeper.keeper.round()
    writer.keeper.round()
    assert writer.write(digest("b")) is Outcome.WRITTEN


def test_what_a_newcomer_writes_waits_for_its_first_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeper has to see it first. Nothing is refused meanwhile: that would look like a store that is full."""
    monkeypatch.setattr(keeper_module, "BUSY_S", 0.001)
    shelf = Frozen()
    sweeper, newcomer = Pod(shelf, 100 * PAIR_BYTES), Pod(shelf, 100 * PAIR_BYTES)
    sweeper.keeper.round()
    newcomer.keeper.start()
    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(newcomer.write, digest("a"))
        assert not wait([written], 0.2).done
        while not wait([written], 0.01).done:
            sweeper.keeper.round()  # the room that it had alone is its own until it has heard that it shares it
        assert written.result(20) is Outcome.WRITTEN
    newcomer.keeper.close()


def test_a_newcomer_that_is_told_nothing_is_refused_in_the_end_and_at_once_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newcomer, ending = (Pod(Frozen(), 100 * PAIR_BYTES) for _ in range(2))
    for pod, seconds in ((newcomer, 0.05), (ending, 600.0)):
        pod.keeper._sweeper = None
        monkeypatch.setattr(keeper_module, "FIRST_LIMIT_S", seconds)
        pod.keeper.start()
    assert newcomer.write(digest("a")) is Outcome.FULL
    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(ending.write, digest("a"))
        ending.keeper.close()
        assert written.result(20) is Outcome.FULL
    newcomer.keeper.close()


def test_when_the_sweeper_is_gone_another_pod_takes_over() -> None:
    shelf = Frozen()
    first, second = Pod(shelf, 10 * PAIR_BYTES), Pod(shelf, 10 * PAIR_BYTES)
    for pod in (first, second, first, second):
        pod.keeper.round()
    for number in range(9):
        first.write(digest(str(number)))
    first.keeper.round()  # its last
    shelf.time += max(TTL_S, SPARED_S, WRITER_TTL_S) + 1
    for number in range(8):
        second.keeper.round()
        second.write(digest(f"new {number}"))
    second.keeper.round()
    assert second.removed > 0
    assert shelf.stored <= 1.05 * 10 * PAIR_BYTES


def test_what_a_writer_wrote_before_it_died_counts_although_it_never_said_so() -> None:
    """It may have written all that it was allowed since it last told; its share must not be given to others too."""
    shelf = Frozen()
    capacity = 40 * PAIR_BYTES
    dying, first, second = (Pod(shelf, capacity) for _ in range(3))
    for pod in (first, second, dying, first, second, dying):
        pod.keeper.round()
    while dying.write(digest(f"untold {len(shelf.kept)}")) is Outcome.WRITTEN:
        pass
    for _ in range(3):
        shelf.time += WRITER_TTL_S / 2
        for pod in (first, second):
            pod.keeper.round()
    for pod in (first, second):
        while pod.write(digest(f"more {len(shelf.kept)}")) is Outcome.WRITTEN:
            pass
    assert shelf.stored <= 1.05 * capacity


def test_what_a_writer_has_not_told_yet_nobody_else_may_write() -> None:
    """One fills its share at once and says nothing for a while; the others write and tell without pause."""
    shelf = Frozen()
    capacity = 40 * PAIR_BYTES
    slow, first, second = (Pod(shelf, capacity) for _ in range(3))
    for pod in (first, second, slow, first, second, slow):
        pod.keeper.round()
    while slow.write(digest(f"untold {len(shelf.kept)}")) is Outcome.WRITTEN:
        pass
    for _ in range(20):
        for pod in (first, second):
            while pod.write(digest(f"more {len(shelf.kept)}")) is Outcome.WRITTEN:
                pass
            pod.keeper.round()
    assert shelf.stored <= 1.05 * capacity


def test_the_thread_goes_on_when_the_store_fails_and_ends_when_it_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "ROUND_S", 0.001)
    monkeypatch.setattr(keeper_module, "BUSY_S", 0.001)
    shelf = Frozen()
    pod = Pod(shelf, 10 * PAIR_BYTES)
    backend: Any = pod.keeper._backend
    write, fails, worked = backend.write_note, [True], threading.Event()

    def flaky(name: NoteName, body: bytes) -> None:
        if fails[0]:
            raise BackendError("Timeout", "the bucket is away")
        write(name, body)
        if name.kind == STATE:
            worked.set()

    backend.write_note = flaky
    failed = threading.Event()
    monkeypatch.setattr(keeper_module.logger, "warning", lambda *_: failed.set())
    pod.keeper.start()
    assert failed.wait(20)
    fails[0] = False
    assert worked.wait(20)
    pod.keeper.close()
    assert pod.keeper._thread is not None
    pod.keeper._thread.join(20)
    assert not pod.keeper._thread.is_alive()
    assert not backend.list_notes(FINGERPRINT, USAGE), "it takes its note with it"
    other = SweeperLease(MemoryBackend(shelf), FINGERPRINT, "other")
    assert other.hold(), "and gives the lease up"


@pytest.mark.parametrize("kind", PLACES)
def test_four_writers_keep_within_five_per_cent_of_a_real_store(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is the store's own, so pages are let go at once; they are never used twice here."""
    monkeypatch.setattr(sweeper, "SPARED_S", -3.0)  # a bucket tells the time in whole seconds
    monkeypatch.setattr(recent_module, "GENERATION_S", 0.001)
    monkeypatch.setattr(sweeper, "_FRESH_S", 0.0)
    monkeypatch.setattr(sweeper, "_FRESH_SHARE", 0)
    place = PLACES[kind](request)
    capacity = 40 * PAIR_BYTES
    backends = [place.open() for _ in range(4)]
    for backend in backends:
        backend.probe()
    keepers = [Keeper(backend, FINGERPRINT, capacity, NullObserver()) for backend in backends]
    stores = [
        PairStore(backend, FINGERPRINT, TARGET_SPACE, DRAFT_SPACE, TARGET_BYTES, DRAFT_BYTES, keeper=keeper)
        for backend, keeper in zip(backends, keepers, strict=True)
    ]

    def stored() -> int:
        return sum(each.nbytes for each in backends[0].objects(FINGERPRINT))

    for keeper in [*keepers, *keepers]:
        keeper.round()
    outcomes: list[Outcome] = []
    peak = 0
    for turn in range(24):
        for number, (store, keeper) in enumerate(zip(stores, keepers, strict=True)):
            parent = ROOT
            for page in range(2):
                key = digest(f"{number} {turn} {page}")
                outcomes.append(store.write_pair(key, parent, bytes(TARGET_BYTES), bytes(DRAFT_BYTES), (1,)).target)
                parent = key
            keeper.round()
        peak = max(peak, stored())
    assert peak <= 1.05 * capacity
    assert stored() >= 0.8 * capacity
    assert outcomes.count(Outcome.WRITTEN) > 50, "old pages make room for new ones"
    assert set(outcomes) <= {Outcome.WRITTEN, Outcome.FULL}
    for store in stores:
        store.close()


class Capacity(RuleBasedStateMachine):
    """Writers, readers, touches, rounds in any order, pods that end without a word, and time."""

    pods: list[Pod]

    @initialize()
    def begin(self) -> None:
        self.shelf = Frozen()
        self.capacity = 30 * PAIR_BYTES
        self.pods = [Pod(self.shelf, self.capacity) for _ in range(3)]
        self.read_at: dict[str, float] = {}

    @rule(who=st.integers(0, 2), prompt=st.integers(0, 9), pages=st.integers(1, 6))
    def write(self, who: int, prompt: int, pages: int) -> None:
        parent = ROOT
        for page in range(pages):
            key = digest(f"{prompt} {page}")
            assert self.pods[who].write(key, parent) in (Outcome.WRITTEN, Outcome.EXISTS, Outcome.FULL)
            parent = key

    @rule(who=st.integers(0, 2), prompt=st.integers(0, 9))
    def read(self, who: int, prompt: int) -> None:
        parent = ROOT
        for page in range(6):
            key = digest(f"{prompt} {page}")
            if self.pods[who].read(key, parent) is not Outcome.HIT:
                break
            self.read_at[key.hex()] = self.shelf.time
            parent = key
        self.pods[who].keeper.round()  # what it has read is told within seconds

    @rule(who=st.integers(0, 2))
    def keep(self, who: int) -> None:
        before = self.shelf.pages()
        self.pods[who].keeper.round()
        gone = before.keys() - self.shelf.pages().keys()
        for key in gone:
            assert self.shelf.time - self.read_at.get(key, 0.0) >= SPARED_S, "read in the last minute"
        left = self.shelf.pages()
        orphans = {key for key, parent in left.items() if parent in {key[:16] for key in gone}}
        assert not orphans, "a child outlived its parent"

    @rule(who=st.integers(0, 2))
    def end_without_a_word(self, who: int) -> None:
        self.pods[who] = Pod(self.shelf, self.capacity)

    @rule(seconds=st.sampled_from([1.0, 5.0, 31.0, 61.0, 3601.0]))
    def wait(self, seconds: float) -> None:
        self.shelf.time += seconds

    @invariant()
    def within_the_capacity(self) -> None:
        assert self.shelf.stored <= 1.05 * self.capacity


TestCapacity = Capacity.TestCase
TestCapacity.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
