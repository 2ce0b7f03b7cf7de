"""Pages on their way through device, host and storage: the right bytes in every slot of both pools, or a miss."""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_runtime.cache import paired, patience, workers
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.cache.storage.base import BackendError
from speccache_runtime.cache.storage.breaker import BreakerSettings
from speccache_runtime.cache.storage.codec import Half

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
PROMPT = list(range(100, 117))  # four whole pages of 4, and one more token

MakeRig = Callable[..., Any]


def store_prompt(rig: MakeRig, volume: Any, **settings: Any) -> list[bytes]:
    """A first life that leaves the prompt in storage; the keys of its pages."""
    first = rig(backend=volume, **settings)
    first.run(PROMPT)
    first.close()
    keys: list[bytes] = first.keys(PROMPT)
    return keys


def held_in_storage(rig: MakeRig, volume: Any) -> tuple[Any, Any]:
    """A second life, and in it a request whose pages storage has and does not give; `volume.gates["read"]` lets go."""
    store_prompt(rig, volume)
    cache = rig(backend=volume)
    volume.gates["read"] = threading.Event()
    visit = cache.enter(PROMPT)
    cache.until(lambda: cache.cache.busy)
    return cache, visit


def on_host(rig: Any) -> set[bytes]:
    """Keys of the pages that the host holds."""
    return {entry.key for entry in rig.cache.index.entries() if entry.host is not None}


def prompts_that_share(draw: st.DrawFn) -> list[list[int]]:
    """Prompts over a few tokens, so that they share pages now and then, of 1 to 24 tokens."""
    trunk = draw(st.lists(st.integers(0, 1), min_size=20, max_size=20))
    out = []
    for _ in range(draw(st.integers(1, 5))):
        keep = draw(st.integers(0, 20))
        out.append(trunk[:keep] + draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)))
    return out


PROMPTS = st.composite(prompts_that_share)()


@pytest.mark.parametrize("device", DEVICES)
def test_pages_keep_every_byte_through_all_tiers_and_a_restart(tools: SimpleNamespace, device: str) -> None:
    """The rig compares each page that it is given, in both pools, with what its key says it must hold."""

    @settings(max_examples=settings().max_examples)
    @given(PROMPTS, st.randoms(use_true_random=False), st.integers(6, 12), st.integers(6, 30))
    def check(prompts: list[list[int]], random: Any, device_pages: int, host_pages: int) -> None:
        with TemporaryDirectory() as root:
            volume = tools.Volume(Path(root))
            volume.probe()
            seen: set[bytes] = set()
            for _life in range(2):
                rig = tools.Rig(device_pages=device_pages, host_pages=host_pages, backend=volume, device=device)
                with closing(rig.cache):  # hypothesis may leave in the middle
                    for prompt in [random.choice(prompts) for _ in range(6)]:
                        scatter_free_pages(rig, random)
                        hit = rig.run(prompt)
                        rig.settle()
                        wanted = rig.keys(prompt[:-1])
                        known = next((n for n, key in enumerate(wanted) if key not in seen), len(wanted))
                        assert hit.tokens == known * tools.PAGE, "a page that was computed before was not found"
                        assert hit.draft_absent == 0
                        seen.update(rig.keys(prompt[:-1]))
                    rig.drain()

    check()


def scatter_free_pages(rig: Any, random: Any) -> None:
    """Fresh runs of page numbers are contiguous; real ones are not."""
    free = rig.cache.index.device._free
    random.shuffle(free)


def test_the_tier_of_every_hit_is_told(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    one = rig(backend=volume, device_pages=5)
    assert tools.cached(one.run(PROMPT)) == {}
    assert tools.cached(one.run(PROMPT)) == {"device": 4}
    one.run(list(range(200, 219)))  # pushes the first prompt out of the device
    assert tools.cached(one.run(PROMPT)) == {"host": 4}
    one.close()
    two = rig(backend=volume)
    assert tools.cached(two.run(PROMPT)) == {"storage": 4}
    assert tools.cached(two.run(PROMPT)) == {"device": 4}
    assert two.value("page_lookups", tier="storage", half="draft", result="hit") == 4


def test_a_hit_is_made_of_pages_from_several_tiers(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    store_prompt(rig, volume)
    two = rig(backend=volume, device_pages=6)
    two.run(PROMPT[:9])  # two pages from storage, then on device and host
    visit = two.enter(PROMPT)
    two.wait_prefetch(visit)
    hit = two.admit(visit)
    assert hit is not None
    assert tools.cached(hit) == {"device": 2, "storage": 2}
    two.release(visit)


def test_the_last_prompt_token_is_always_computed(rig: MakeRig, tools: SimpleNamespace) -> None:
    cache = rig()
    cache.run(PROMPT[:8])
    assert tools.cached(cache.run(PROMPT[:8])) == {"device": 1}
    assert tools.cached(cache.run(PROMPT[:9])) == {"device": 1}, "page 2 had no known successor when it was computed"
    assert tools.cached(cache.run(PROMPT[:9])) == {"device": 2}


def test_a_page_without_known_successor_is_published_later(rig: MakeRig, tools: SimpleNamespace) -> None:
    """The draft's KV of a page's last token needs the token after it; the target alone does not."""
    visit_tokens = PROMPT[:8]
    for draft, expected in ((True, 1), (False, 2)):
        cache = rig(draft=draft)
        visit = cache.enter(visit_tokens)
        cache.admit(visit)
        cache.compute(visit)
        assert visit.lease.published == expected
        visit.tokens += [1]
        cache.compute(visit, upto=8)
        assert visit.lease.published == 2
        cache.release(visit)


def test_a_prompt_longer_than_the_host_tier_keeps_its_beginning_there(rig: MakeRig, tools: SimpleNamespace) -> None:
    cache = rig(host_pages=3, device_pages=12)
    prompt = list(range(10 * tools.PAGE + 1))
    visit = cache.enter(prompt)
    cache.admit(visit)
    for page in range(10):
        cache.compute(visit, upto=(page + 1) * tools.PAGE)
        cache.settle()
    cache.release(visit)
    assert cache.value("dropped_pages", reason="host_full") == 7
    pair = cache.target.layout.page_bytes + cache.draft.layout.page_bytes
    assert cache.value("transfer_bytes", direction="device_to_host") == 3 * pair, "pages were copied to and fro"
    assert on_host(cache) == set(cache.keys(prompt)[:3])


def test_a_running_request_is_younger_than_one_that_ended(rig: MakeRig, tools: SimpleNamespace) -> None:
    cache = rig(host_pages=6, device_pages=16)
    cache.run([1] * 13)
    visit = cache.enter([2] * 13)
    cache.admit(visit)
    cache.compute(visit)
    cache.settle()
    cache.run([3] * 13)  # three more pages on a full host
    cache.settle()
    assert on_host(cache) == set(cache.keys([2] * 13) + cache.keys([3] * 13))
    cache.release(visit)


def test_who_ended_last_was_used_last(rig: MakeRig, tools: SimpleNamespace) -> None:
    cache = rig(host_pages=0, device_pages=8)
    visits = {name: cache.enter([name] * 13) for name in (1, 2)}
    for visit in visits.values():
        cache.admit(visit)
        cache.compute(visit)
    cache.release(visits[2])
    cache.release(visits[1])
    cache.run([3] * 12)
    assert {e.key for e in cache.cache.index.entries()} >= set(cache.keys([1] * 13))


def test_pages_that_the_host_gave_up_are_copied_again_below_their_children(
    rig: MakeRig, tools: SimpleNamespace
) -> None:
    cache = rig(host_pages=5, device_pages=12)
    cache.run(PROMPT[:9])  # two pages, on the device and the host
    cache.run([7] * 21)  # five pages: all of the host
    cache.settle()
    assert tools.cached(cache.run(PROMPT)) == {"device": 2}
    cache.settle()
    assert on_host(cache) >= set(cache.keys(PROMPT))


def test_host_pages_are_lost_from_the_end_of_the_longest_unused_prompt(rig: MakeRig, tools: SimpleNamespace) -> None:
    cache = rig(host_pages=6, device_pages=8)
    cache.run(PROMPT)
    cache.run(list(range(200, 217)))  # needs 4 host pages, 2 are free
    cache.settle()
    cache.run(list(range(300, 332)))  # all 8 device pages
    # The host holds 6 of its 7 finished pages: nothing of the first prompt, whose pages were the oldest.
    assert tools.cached(cache.run(PROMPT)) == {}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=12), st.integers(5, 9))
def test_what_is_cached_always_begins_at_the_first_page(
    tools: SimpleNamespace, visits: list[tuple[int, int]], host_pages: int
) -> None:
    """No tier keeps a page whose parent it has given up, so every cached page can be hit."""
    rig = tools.Rig(device_pages=7, host_pages=host_pages)
    for name, pages in visits:
        rig.run([name] * (pages * tools.PAGE + 1))
        rig.settle()
        for tier in ("device", "host"):
            kept = {e.key: e for e in rig.cache.index.entries() if getattr(e, tier) is not None}
            assert all(e.parent in kept or e.parent == bytes(32) for e in kept.values()), f"a hole in the {tier} tier"
    rig.close()


def test_no_room_on_the_device_changes_nothing(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    store_prompt(rig, volume)
    cache = rig(backend=volume, device_pages=6)
    other = cache.enter(list(range(200, 213)))
    cache.wait_prefetch(other)
    assert cache.admit(other) is not None
    assert cache.compute(other)  # holds four of six pages
    visit = cache.enter(PROMPT)
    cache.wait_prefetch(visit)
    cache.cache.check_integrity()
    for _ in range(3):
        assert cache.admit(visit) is None
        cache.cache.check_integrity()
        assert visit.lease.pages == []
    assert not cache.cache.grow(other.lease, 7 * tools.PAGE)
    assert len(other.lease.pages) == 4
    cache.release(other)
    assert tools.cached(cache.admit(visit)) == {"storage": 4}
    cache.release(visit)


def test_no_room_on_the_device_leaves_a_device_copy_without_draft_half_where_it_is(
    rig: MakeRig, tools: SimpleNamespace
) -> None:
    """The host copy would serve better, but not while there is no room to bring all that the hit needs."""
    cache = rig(device_pages=6)
    cache.run(PROMPT)
    cache.settle()
    other = cache.enter(list(range(200, 219)))
    cache.admit(other)
    assert cache.compute(other)  # holds five of six pages
    (left,) = [entry for entry in cache.cache.index.entries() if entry.key == cache.keys(PROMPT)[0]]
    assert left.device is not None
    left.draft_on_device = False  # as after a hit whose draft half came to the host later
    visit = cache.enter(PROMPT)
    assert cache.admit(visit) is None
    assert left.device is not None, "an admission that fails has dropped a device page"
    assert (left.device_pins, left.host_pins) == (0, 0)
    cache.release(other)
    cache.settle()
    assert tools.cached(cache.admit(visit)) == {"host": 4}
    cache.release(visit)


@pytest.mark.parametrize("pages", [40, 400])
def test_publishing_a_page_costs_the_same_however_long_the_prompt_is(
    tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    rig = tools.Rig(device_pages=pages + 4, host_pages=pages + 4)
    visit = rig.enter(list(range(pages * tools.PAGE + 1)))
    rig.admit(visit)
    looked_at: list[int] = []
    index = rig.cache.index
    touch = index.touch_some

    def counted(entries: Sequence[Any], first: int, stamp: int) -> None:
        looked_at.append(len(entries))
        touch(entries, first, stamp)

    monkeypatch.setattr(index, "touch_some", counted)
    backups: list[int] = []
    backup = rig.cache._writeback.backup

    def counted_backup(wanted: Sequence[Any]) -> None:
        backups.append(sum(len(w.above) + len(w.fresh) for w in wanted))
        backup(wanted)

    monkeypatch.setattr(rig.cache._writeback, "backup", counted_backup)
    for page in range(pages):
        looked_at.clear()
        rig.compute(visit, upto=(page + 1) * tools.PAGE)
        rig.settle()
        assert sum(looked_at) <= paired.SWEEP
        assert backups[-1] == 1
    rig.release(visit)
    rig.close()


def test_a_long_running_request_gets_its_lost_host_pages_back(tools: SimpleNamespace) -> None:
    """The sweep comes round: what others pushed out of the host while it ran is copied again."""
    size = 3 * paired.SWEEP
    rig = tools.Rig(device_pages=2 * size + 24, host_pages=size + 8)
    prompt = list(range((size + 8) * tools.PAGE + 1))
    visit = rig.enter(prompt)
    rig.admit(visit)
    rig.compute(visit, upto=size * tools.PAGE)
    rig.settle()
    rig.run([7] * ((size + 8) * tools.PAGE + 1))  # all of the host
    rig.settle()
    assert not on_host(rig) & set(rig.keys(prompt))
    for page in range(size, size + 6):
        rig.compute(visit, upto=(page + 1) * tools.PAGE)
        rig.settle()
    assert on_host(rig) >= set(rig.keys(prompt[: (size + 6) * tools.PAGE]))
    rig.release(visit)
    rig.close()


def test_a_prompt_longer_than_the_host_tier_is_restored_as_far_as_it_fits(
    rig: MakeRig, volume: Any, tools: SimpleNamespace
) -> None:
    store_prompt(rig, volume)
    cache = rig(backend=volume, host_pages=2)
    assert tools.cached(cache.run(PROMPT)) == {"storage": 2}
    assert cache.value("dropped_pages", reason="host_full_prefetch") == 2


def test_without_host_pages_there_is_no_restore_and_no_failure(
    rig: MakeRig, volume: Any, tools: SimpleNamespace
) -> None:
    store_prompt(rig, volume)
    cache = rig(backend=volume, host_pages=0, device_pages=5)
    assert tools.cached(cache.run(PROMPT)) == {}
    assert tools.cached(cache.run(PROMPT)) == {"device": 4}


def test_two_requests_that_want_the_same_pages_read_them_once(
    rig: MakeRig, volume: Any, tools: SimpleNamespace
) -> None:
    store_prompt(rig, volume)
    cache = rig(backend=volume)
    volume.calls.clear()
    visits = [cache.enter(PROMPT), cache.enter([*PROMPT, 1, 2, 3, 4]), cache.enter(PROMPT[:9])]
    for visit in visits:
        cache.wait_prefetch(visit)
    cache.cache.check_integrity()
    reads = [(half, key) for operation, half, key in volume.calls if operation == "read"]
    assert len(reads) == len(set(reads)) == 8
    hits = [cache.admit(visit) for visit in visits]
    assert [tools.cached(hit) for hit in hits] == [{"storage": 4}, {"device": 4}, {"device": 2}]
    for visit in visits:
        assert cache.compute(visit)
    cache.cache.check_integrity()
    for visit in visits:
        cache.release(visit)


def test_a_slow_lookup_is_given_what_was_read_meanwhile(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    store_prompt(rig, volume)
    cache = rig(backend=volume, host_pages=4, device_pages=12)
    volume.calls.clear()
    held = volume.gates["exists"] = threading.Event()
    slow = cache.enter(PROMPT)
    cache.until(lambda: any(operation == "exists" for operation, _, _ in volume.calls))
    del volume.gates["exists"]
    quick = cache.enter(PROMPT[:9])
    cache.wait_prefetch(quick)
    cache.cache.end_prefetch(quick.prefetch)
    held.set()
    cache.wait_prefetch(slow)
    for other in (7, 8, 9):  # they would take the host pages that the quick request read
        cache.run([other] * (12 * tools.PAGE))
        cache.settle()
    assert tools.cached(cache.admit(slow)) == {"storage": 4}
    cache.release(slow)


def test_what_has_come_for_a_waiting_request_is_kept_for_it(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    store_prompt(rig, volume)
    cache = rig(backend=volume, host_pages=4, device_pages=12)
    cache.run(PROMPT[:9])  # two of its pages are on the host already
    cache.settle()
    visit = cache.enter(PROMPT)
    cache.wait_prefetch(visit)
    for other in (7, 8, 9):  # they take the device and would take the host
        cache.run([other] * (12 * tools.PAGE))
        cache.settle()
        cache.cache.check_integrity()
    assert cache.value("dropped_pages", reason="host_full") > 0
    assert tools.cached(cache.admit(visit)) == {"host": 2, "storage": 2}
    cache.release(visit)


def test_equal_pages_computed_at_the_same_time_are_known_once(rig: MakeRig, tools: SimpleNamespace) -> None:
    cache = rig(device_pages=12)
    visits = [cache.enter(PROMPT), cache.enter(PROMPT)]
    for visit in visits:
        assert tools.cached(cache.admit(visit)) == {}
    for visit in visits:
        cache.compute(visit)
        cache.cache.check_integrity()
    assert len(cache.cache.index) == 4
    for visit in reversed(visits):
        cache.release(visit)
        cache.cache.check_integrity()
    assert cache.cache.index.device.num_free == 8
    assert tools.cached(cache.run(PROMPT)) == {"device": 4}


def test_a_request_that_goes_away_while_it_waits_leaves_what_arrives_to_others(
    rig: MakeRig, volume: Any, tools: SimpleNamespace
) -> None:
    cache, visit = held_in_storage(rig, volume)
    cache.until(lambda: sum(operation == "read" for operation, _, _ in volume.calls) == 4)
    cache.cache.end_prefetch(visit.prefetch)
    cache.cache.check_integrity()
    volume.gates["read"].set()
    cache.settle()
    cache.check_idle()
    assert tools.cached(cache.run(PROMPT)) == {"host": 4}


def test_a_request_does_not_wait_for_slow_storage_beyond_its_deadline(
    rig: MakeRig, volume: Any, tools: SimpleNamespace
) -> None:
    cache, visit = held_in_storage(rig, volume)
    assert cache.cache.prefetch_pending(visit.prefetch)
    visit.prefetch.deadline = 0.0
    for _ in range(3):
        assert not cache.cache.prefetch_pending(visit.prefetch)
    assert cache.value("prefetch_deadlines") == 1, "one request is late once, however often it is asked"
    assert tools.cached(cache.admit(visit)) == {}
    assert cache.compute(visit)
    cache.cache.check_integrity()
    cache.release(visit)
    volume.gates["read"].set()  # what lands now is known already and must not be lost or counted twice
    cache.settle()
    cache.check_idle()
    assert tools.cached(cache.run(PROMPT)) == {"device": 4}


def test_a_volume_that_hangs_costs_those_a_moment_that_are_there_and_no_later_request(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads hang and writes work: ten requests that overlap wait for the stall together, later ones not at all."""
    monkeypatch.setattr(patience, "STALL_S", 0.2)
    monkeypatch.setattr(patience, "KNOCK_S", 0.01)
    cache, first = held_in_storage(rig, volume)
    volume.gates["exists"] = threading.Event()
    visits = [first, *(cache.enter([7, 7, 7, number, *PROMPT]) for number in range(9))]
    assert all(cache.cache.prefetch_pending(visit.prefetch) for visit in visits)
    cache.until(lambda: not cache.cache.prefetch_pending(first.prefetch))
    assert not any(cache.cache.prefetch_pending(visit.prefetch) for visit in visits)
    assert cache.value("prefetch_deadlines") == len(visits)
    for visit in visits:
        assert cache.admit(visit) is not None
        assert cache.compute(visit)
        cache.release(visit)
        cache.until(lambda: not cache.cache.storing)  # writes are answered, and that must not look like reads are
    assert cache.enter([9, 9, 9, 9, *PROMPT]).prefetch is None

    volume.gates["exists"].set()
    volume.gates["read"].set()

    def answers_again() -> bool:
        again = cache.enter([8, 8, 8, 8, *PROMPT]).prefetch
        cache.cache.end_prefetch(again)
        return again is not None

    cache.until(answers_again)
    cache.settle()
    cache.check_idle()


def test_a_volume_whose_hung_calls_never_end_is_used_again_when_it_answers(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some calls are lost for ever. What shows that the volume is well is a question asked for nobody."""
    for module, name in ((patience, "STALL_S"), (patience, "KNOCK_S"), (workers, "STUCK_S")):
        monkeypatch.setattr(module, name, 0.05)
    cache, first = held_in_storage(rig, volume)
    lost = volume.gates.pop("read")
    cache.until(lambda: not cache.cache.prefetch_pending(first.prefetch))

    def answers_again() -> bool:
        again = cache.enter([8, 8, 8, 8, *PROMPT]).prefetch
        cache.cache.end_prefetch(again)
        return again is not None

    cache.until(answers_again)
    cache.cache.end_prefetch(first.prefetch)
    lost.set()
    cache.settle()


def test_a_lookup_that_hangs_is_given_up_too(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    store_prompt(rig, volume)
    cache = rig(backend=volume)
    volume.gates["exists"] = threading.Event()
    visit = cache.enter(PROMPT)
    visit.prefetch.deadline = 0.0
    assert not cache.cache.prefetch_pending(visit.prefetch)
    assert tools.cached(cache.admit(visit)) == {}
    volume.gates.pop("exists").set()
    assert cache.compute(visit)
    cache.release(visit)


def test_speculation_off_and_on_share_the_target_halves(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    keys = store_prompt(rig, volume, draft=False)
    assert [volume.has(key, Half.TARGET) for key in keys] == [True] * 4
    assert not any(volume.has(key, Half.DRAFT) for key in keys)
    stamps = [volume.path(key, Half.TARGET).stat().st_mtime_ns for key in keys]

    on = rig(backend=volume, answer=MissingDraft.DEGRADE)
    hit = on.run(PROMPT)
    assert (tools.cached(hit), hit.draft_absent) == ({"storage": 4}, 16)
    on.close()

    on = rig(backend=volume, answer=MissingDraft.RECOMPUTE)
    assert tools.cached(on.run(PROMPT)) == {}
    on.close()
    assert [volume.has(key, Half.DRAFT) for key in keys] == [True] * 4, "what was rebuilt is written back"
    assert [volume.path(key, Half.TARGET).stat().st_mtime_ns for key in keys] == stamps, "the target halves stay"

    off = rig(backend=volume, draft=False)
    assert tools.cached(off.run(PROMPT)) == {"storage": 4}
    off.close()
    on = rig(backend=volume)
    hit = on.run(PROMPT)
    assert (tools.cached(hit), hit.draft_absent) == ({"storage": 4}, 0)


def test_a_drain_writes_what_storage_lacks(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    cache = rig(backend=volume, breaker=BreakerSettings(threshold=1000))
    volume.broken, volume.error = {"write"}, BackendError("ENOSPC", "full")
    cache.run(PROMPT)
    cache.settle()
    assert cache.value("dropped_pages", reason="storage_write") == 4
    assert not any(volume.has(key, half) for key in cache.keys(PROMPT) for half in Half)
    volume.broken = set()
    cache.cache.store_all()
    assert cache.cache.busy
    cache.settle()
    assert all(volume.has(key, half) for key in cache.keys(PROMPT) for half in Half)
    volume.calls.clear()
    cache.cache.store_all()
    assert not cache.cache.busy
    assert volume.calls == []


def test_too_many_waiting_writes_are_put_off_until_the_drain(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    volume.gates["write"] = threading.Event()
    cache = rig(backend=volume, device_pages=80, host_pages=80)
    long = list(range(70 * tools.PAGE + 1))
    cache.run(long)
    cache.cache.poll()
    assert cache.value("dropped_pages", reason="write_backlog") == 70 - 64
    cache.cache.check_integrity()
    volume.gates["write"].set()
    cache.settle()
    assert sum(volume.has(key, Half.TARGET) for key in cache.keys(long)) == 64
    cache.close()
    assert all(volume.has(key, half) for key in cache.keys(long) for half in Half)


def test_a_bug_in_storage_reaches_the_engine_thread(rig: MakeRig, volume: Any) -> None:
    cache = rig(backend=volume)
    volume.broken, volume.error = {"exists"}, ZeroDivisionError("a bug")
    cache.enter(PROMPT)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cache.until(lambda: False)
    cache.closed = True  # the engine ends on this; there is nothing to drain
    cache.cache.close()


def test_bytes_and_pages_are_counted(rig: MakeRig, tools: SimpleNamespace) -> None:
    cache = rig(device_pages=5)
    cache.run(PROMPT)
    cache.run(list(range(200, 219)))
    cache.run(PROMPT)
    cache.settle()
    pair = cache.target.layout.page_bytes + cache.draft.layout.page_bytes
    assert cache.value("transfer_bytes", direction="device_to_host") == 8 * pair
    assert cache.value("transfer_bytes", direction="host_to_device") == 4 * pair
    assert cache.value("page_lookups", tier="host", half="target", result="hit") == 4
    cache.cache.update_gauges()
    states = {state: cache.value("pages", tier="device", state=state) for state in ("free", "cached", "in_use")}
    assert sum(states.values()) == 5
    assert states["in_use"] == 0
    assert cache.value("evicted_pages", tier="device") > 0
