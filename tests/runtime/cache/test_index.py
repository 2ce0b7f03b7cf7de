"""The page table against a simple model of it: ownership, pins, halves, collisions, and the order of eviction."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from speccache_runtime.cache.eviction import EvictionOrder
from speccache_runtime.cache.index import Entry, Index
from speccache_runtime.cache.keys import ROOT, KeyChain, PageName

DEVICE, HOST = 6, 5
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


def chain_of(path: Sequence[int]) -> KeyChain:
    """One token a page, so that a path of tokens names a page."""
    chain = KeyChain(1)
    chain.extend(path, len(path))
    return chain


@dataclass
class Known:
    """What the model believes of one entry."""

    device: int | None = None
    host: int | None = None
    draft_on_device: bool = False
    draft_on_host: bool = False
    device_pins: int = 0
    host_pins: int = 0


class IndexMachine(RuleBasedStateMachine):
    """Every operation of the index, in any order that its callers may use."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(device_pages=DEVICE, host_pages=HOST)
        self.known: dict[bytes, Known] = {}
        self.taken: list[int] = []
        self.taken_host: list[int] = []

    # ---- helpers

    def entry(self, key: bytes) -> Entry:
        return next(e for e in self.index.entries() if e.key == key)

    def unpinned(self, tier: str) -> list[bytes]:
        return [
            key for key, k in self.known.items() if getattr(k, tier) is not None and getattr(k, f"{tier}_pins") == 0
        ]

    def forget_evicted(self, tier: str, count: int) -> None:
        """Finds out which entries lost their page, and that they were the `count` longest unused of those unpinned."""
        before = {key: self.used[key] for key in self.unpinned(tier)}
        now = {e.key: getattr(e, tier) for e in self.index.entries()}
        gone = [key for key in before if now.get(key) is None]
        assert len(gone) == count
        stayed = [used for key, used in before.items() if key not in gone]
        assert all(before[key] <= used for key in gone for used in stayed)
        for key in gone:
            setattr(self.known[key], tier, None)
            setattr(self.known[key], f"draft_on_{tier}", False)
            if self.known[key].device is None and self.known[key].host is None:
                del self.known[key]

    def remember_use(self) -> None:
        self.used = {e.key: e.used for e in self.index.entries()}

    # ---- device pages

    @rule(count=st.integers(1, DEVICE))
    def take_device(self, count: int) -> None:
        self.remember_use()
        unpinned, free = len(self.unpinned("device")), self.index.device.num_free
        pages = self.index.take_device(count)
        if count > free + unpinned:
            assert pages is None
            return
        assert pages is not None
        self.forget_evicted("device", max(0, count - free))
        self.taken += pages

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_device(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.taken))
        self.taken.remove(page)
        self.index.give_device([page])

    @precondition(lambda self: self.taken)
    @rule(path=PATHS, draft=st.booleans(), touch=st.booleans())
    def publish(self, path: tuple[int, ...], draft: bool, touch: bool) -> None:
        chain, at = chain_of(path), len(path) - 1
        key, page = chain.keys[at], self.taken[0]
        known = self.known.get(key)
        wanted = (
            known is None or known.device is None or (draft and not known.draft_on_device and known.device_pins == 0)
        )
        entry, owned = self.index.publish(chain.page(at), page, draft=draft, successors=(7,) if draft else ())
        assert owned == wanted
        if owned:
            self.taken.remove(page)
            known = self.known.setdefault(key, Known())
            known.device, known.draft_on_device, known.device_pins = page, draft, 1
            assert entry.successors == ((7,) if draft else entry.successors)
        if touch:
            self.index.touch(chain.keys)

    @precondition(lambda self: any(k.device is None and k.host is not None for k in self.known.values()))
    @rule(data=st.data(), draft=st.booleans())
    def attach_device(self, data: st.DataObject, draft: bool) -> None:
        if not self.taken:
            return
        keys = [key for key, k in self.known.items() if k.device is None and k.host is not None]
        key = data.draw(st.sampled_from(sorted(keys)))
        page = self.taken.pop()
        draft = draft and self.known[key].draft_on_host
        self.index.attach_device(self.entry(key), page, draft=draft)
        known = self.known[key]
        known.device, known.draft_on_device, known.device_pins = page, draft, 1

    # ---- host pages

    @rule(count=st.integers(1, HOST + 2))
    def take_host(self, count: int) -> None:
        self.remember_use()
        unpinned, free = len(self.unpinned("host")), self.index.host.num_free
        pages = self.index.take_host(count)
        assert len(pages) == min(count, free + unpinned)
        self.forget_evicted("host", max(0, len(pages) - free))
        self.taken_host += pages

    @precondition(lambda self: self.taken_host)
    @rule()
    def give_host(self) -> None:
        self.index.give_host([self.taken_host.pop()])

    @precondition(lambda self: self.taken_host)
    @rule(data=st.data(), draft=st.booleans())
    def attach_host(self, data: st.DataObject, draft: bool) -> None:
        keys = sorted(key for key, k in self.known.items() if k.host is None)
        if keys:
            key = data.draw(st.sampled_from(keys))
            page = self.taken_host.pop()
            self.index.attach_host(self.entry(key), page, draft=draft)
            self.known[key].host, self.known[key].draft_on_host = page, draft

    @precondition(lambda self: self.taken_host)
    @rule(path=PATHS, draft=st.booleans())
    def add_host(self, path: tuple[int, ...], draft: bool) -> None:
        chain, at = chain_of(path), len(path) - 1
        key, page = chain.keys[at], self.taken_host[-1]
        entry = self.index.add_host(chain.page(at), page, draft=draft, successors=())
        assert (entry is None) == (key in self.known)
        if entry is not None:
            self.taken_host.pop()
            self.known[key] = Known(host=page, draft_on_host=draft)

    # ---- pins and uses

    @precondition(lambda self: self.known)
    @rule(data=st.data(), tier=st.sampled_from(["device", "host"]))
    def pin(self, data: st.DataObject, tier: str) -> None:
        keys = sorted(key for key, k in self.known.items() if getattr(k, tier) is not None)
        if keys:
            chosen = data.draw(st.lists(st.sampled_from(keys), unique=True, max_size=3))
            getattr(self.index, f"pin_{tier}")([self.entry(key) for key in chosen])
            for key in chosen:
                setattr(self.known[key], f"{tier}_pins", getattr(self.known[key], f"{tier}_pins") + 1)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), tier=st.sampled_from(["device", "host"]))
    def unpin(self, data: st.DataObject, tier: str) -> None:
        keys = sorted(key for key, k in self.known.items() if getattr(k, f"{tier}_pins"))
        if keys:
            chosen = data.draw(st.lists(st.sampled_from(keys), unique=True, max_size=3))
            getattr(self.index, f"unpin_{tier}")([self.entry(key) for key in chosen])
            for key in chosen:
                setattr(self.known[key], f"{tier}_pins", getattr(self.known[key], f"{tier}_pins") - 1)

    @rule(path=PATHS)
    def touch(self, path: tuple[int, ...]) -> None:
        chain = chain_of(path)
        self.index.touch(chain.keys)
        used = [self.entry(key).used for key in chain.keys if key in self.known]
        assert used == sorted(used, reverse=True)
        assert len(set(used)) == len(used)

    @precondition(lambda self: self.unpinned("device"))
    @rule(data=st.data())
    def drop_device(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.unpinned("device"))))
        self.index.drop_device(self.entry(key))
        self.known[key].device, self.known[key].draft_on_device = None, False
        if self.known[key].host is None:
            del self.known[key]

    # ---- what always holds

    @rule(path=PATHS)
    def walk(self, path: tuple[int, ...]) -> None:
        chain = chain_of(path)
        run = 0
        while run < len(path) and chain.keys[run] in self.known:
            run += 1
        assert [e.key for e in self.index.walk(chain.keys, chain.packed)] == chain.keys[:run]

    @invariant()
    def every_page_is_counted_once(self) -> None:
        self.index.check_integrity(device_taken=self.taken, host_taken=self.taken_host)

    @invariant()
    def the_model_agrees(self) -> None:
        seen = {
            e.key: Known(e.device, e.host, e.draft_on_device, e.draft_on_host, e.device_pins, e.host_pins)
            for e in self.index.entries()
        }
        assert seen == self.known
        assert len(self.index) == len(self.known)
        for e in self.index.entries():
            assert e.draft_present == (e.draft_on_device if e.device is not None else e.draft_on_host)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(stateful_step_count=40)


def publish_chain(index: Index, path: Sequence[int], draft: bool = True) -> list[Entry]:
    """A request that computes a chain (what is known of it already stays as it is) and ends."""
    chain = chain_of(path)
    known = index.walk(chain.keys, chain.packed)
    index.pin_device(known)
    pages = index.take_device(len(path) - len(known))
    assert pages is not None
    entries = list(known)
    for at, page in enumerate(pages, start=len(known)):
        entry, owned = index.publish(chain.page(at), page, draft=draft, successors=())
        assert owned
        entries.append(entry)
    index.touch(chain.keys)
    index.unpin_device(entries)
    return entries


@given(st.lists(PATHS, min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_children_are_evicted_before_their_parents_in_both_tiers(paths: list[tuple[int, ...]], random: object) -> None:
    index = Index(device_pages=40, host_pages=40)
    for path in paths:
        for entry in publish_chain(index, path):
            if entry.host is None:
                index.attach_host(entry, index.take_host(1)[0], draft=True)
    # Copies and writes of one chain end in any order: each takes its pin back alone.
    entries = list(index.entries())
    index.pin_host(entries)
    random.shuffle(entries)  # type: ignore[attr-defined]
    for entry in entries:
        index.unpin_host([entry])
    for tier in ("host", "device"):
        while getattr(index, tier).evictable:
            before = {e.key: e for e in index.entries() if getattr(e, tier) is not None}
            free = getattr(index, tier).num_free
            taken = getattr(index, f"take_{tier}")(free + 1)
            getattr(index, f"give_{tier}")(taken)
            after = {e.key for e in index.entries() if getattr(e, tier) is not None}
            (gone,) = set(before) - after
            assert gone not in {before[key].parent for key in after}, f"a parent left the {tier} before its child"


def test_the_chain_used_longest_ago_goes_first() -> None:
    index = Index(device_pages=6, host_pages=0)
    for path in ((1, 1), (2, 2), (3, 3)):
        publish_chain(index, path)
    publish_chain(index, (1, 1))  # a hit
    gone = []
    for count in (1, 2, 3, 4, 5, 6):
        before = {e.packed[0]: e for e in index.entries()}
        pages = index.take_device(count)
        assert pages is not None
        gone.append(sorted(e.packed[0] for e in index.entries()))
        index.give_device(pages)
        assert before
    assert gone == [[1, 1, 2, 3, 3], [1, 1, 3, 3], [1, 1, 3], [1, 1], [1], []]


def test_a_use_of_the_device_copy_keeps_the_host_copy_too() -> None:
    index = Index(device_pages=8, host_pages=2)
    hot, cold = publish_chain(index, (1,)) + publish_chain(index, (2,))
    for entry in (hot, cold):
        index.attach_host(entry, index.take_host(1)[0], draft=True)
    publish_chain(index, (1,))
    index.give_host(index.take_host(1))
    assert (hot.host is not None, cold.host is not None) == (True, False)


def test_pages_that_come_from_storage_are_older_than_their_parent() -> None:
    index = Index(device_pages=4, host_pages=8)
    publish_chain(index, (1, 1))
    chain = chain_of((1, 1, 1, 1, 1))
    for at in (2, 3, 4):
        index.add_host(chain.page(at), index.take_host(1)[0], draft=True, successors=())
    left = []
    for count in (6, 7, 8):
        index.give_host(index.take_host(count))
        left.append([e.key for e in index.walk(chain.keys, chain.packed)])
    assert left == [chain.keys[:4], chain.keys[:3], chain.keys[:2]]


def test_a_page_whose_parent_is_unknown_goes_first() -> None:
    index = Index(device_pages=2, host_pages=3)
    old = chain_of((1,))
    index.add_host(old.page(0), index.take_host(1)[0], draft=False, successors=())
    index.touch(old.keys)
    orphan = chain_of((5, 6))
    index.add_host(orphan.page(1), index.take_host(1)[0], draft=False, successors=())
    index.give_host(index.take_host(2))
    assert [e.key for e in index.entries()] == old.keys


def test_the_same_key_with_other_tokens_is_a_collision_and_no_hit() -> None:
    index = Index(device_pages=3, host_pages=2)
    (entry,) = publish_chain(index, (1,))
    other = chain_of((2,)).packed[0]
    collides = PageName(entry.key, ROOT, other, 0)
    assert index.find(entry.key, entry.packed) is entry
    assert index.find(entry.key, other) is None
    assert index.walk([entry.key], [other]) == []
    pages = index.take_device(1)
    assert pages is not None
    known, owned = index.publish(collides, pages[0], draft=True, successors=())
    assert (known, owned) == (entry, False)
    assert entry.packed != other
    hosts = index.take_host(1)
    assert index.add_host(collides, hosts[0], draft=True, successors=()) is None
    index.check_integrity(device_taken=pages, host_taken=hosts)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_page_counted_twice_or_lost_is_named(tier: str) -> None:
    index = Index(device_pages=3, host_pages=3)
    pages = getattr(index, f"take_{tier}")(2)
    with pytest.raises(AssertionError, match=rf"{tier} pages: counted twice \[\], lost \[1\]"):
        index.check_integrity(**{"device_taken": [], "host_taken": [], f"{tier}_taken": pages[:1]})
    with pytest.raises(AssertionError, match=rf"{tier} pages: counted twice \[2\], lost \[\]"):
        index.check_integrity(**{"device_taken": [], "host_taken": [], f"{tier}_taken": [*pages, 2]})


class Item:
    """Something evictable."""

    def __init__(self, key: bytes, used: int) -> None:
        self.key, self.used = key, used


@given(
    st.lists(st.tuples(st.sampled_from(["add", "remove", "use", "pop"]), st.integers(0, 5)), max_size=300),
)
def test_the_eviction_order_is_that_of_last_use_however_often_pages_come_and_go(steps: list[tuple[str, int]]) -> None:
    order: EvictionOrder[Item] = EvictionOrder()
    items = [Item(bytes([n]), n) for n in range(6)]
    members: set[int] = set()
    clock = 10
    for verb, n in steps:
        if verb == "add" and n not in members:
            order.add(items[n])
            members.add(n)
        elif verb == "remove" and n in members:
            order.remove(items[n])
            members.remove(n)
        elif verb == "use":
            clock += 1
            items[n].used = clock
        elif verb == "pop" and members:
            expected = min(members, key=lambda m: items[m].used)
            assert order.pop() is items[expected]
            members.remove(expected)
        assert len(order) == len(members)
        assert all((item.key in order) == (n in members) for n, item in enumerate(items))
    with pytest.raises(IndexError):
        [order.pop() for _ in range(len(members) + 1)]
