"""Half a pair is a known state: what is served, what is rebuilt and written back, and what is never attended to."""

import shutil
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.cache.storage.base import BackendError
from speccache_runtime.cache.storage.breaker import BreakerSettings
from speccache_runtime.cache.storage.codec import Half

PROMPT = list(range(100, 117))  # four whole pages of 4, and one more token
DAMAGES = ("deleted", "truncated", "header bit", "payload bit")

MakeRig = Callable[..., Any]


@pytest.fixture
def keys(rig: MakeRig, volume: Any) -> list[bytes]:
    """A first life that leaves the prompt in storage; the keys of its pages."""
    first = rig(backend=volume)
    first.run(PROMPT)
    first.close()
    found: list[bytes] = first.keys(PROMPT)
    return found


@pytest.mark.parametrize("how", DAMAGES)
def test_recompute_gives_the_hit_up_from_a_damaged_draft_half_and_writes_it_anew(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes], how: str
) -> None:
    tools.damage(volume.path(keys[2], Half.DRAFT), how)
    second = rig(backend=volume)
    volume.calls.clear()
    hit = second.run(PROMPT)
    assert (tools.cached(hit), hit.draft_absent) == ({"storage": 2}, 0)
    if how == "deleted":
        read = {key for operation, _, key in volume.calls if operation == "read"}
        assert read == {key.hex() for key in keys[:2]}, "pages were read that could not be used"
    second.close()
    corrupt = 0 if how == "deleted" else 1
    assert second.value("page_lookups", tier="storage", half="draft", result="corrupt") == corrupt
    third = rig(backend=volume)
    assert tools.cached(third.run(PROMPT)) == {"storage": 4}, "the rebuilt half was not written back"
    assert third.value("page_lookups", tier="storage", half="draft", result="hit") == 4


@pytest.mark.parametrize("how", DAMAGES)
def test_degrade_keeps_the_hit_and_masks_a_damaged_draft_half(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes], how: str
) -> None:
    tools.damage(volume.path(keys[2], Half.DRAFT), how)
    second = rig(backend=volume, answer=MissingDraft.DEGRADE, device_pages=8)
    visit = second.enter(PROMPT)
    second.wait_prefetch(visit)
    hit = second.admit(visit)
    assert (tools.cached(hit), hit.draft_absent) == ({"storage": 4}, 4)
    assert visit.lease.draft_absent == [False, False, True, False]
    second.compute(visit)
    second.release(visit)
    # From the device, and from the host after the device lost it, it is absent still.
    for _ in range(2):
        assert second.run(PROMPT).draft_absent == 4
        second.run([7] * (8 * tools.PAGE))
    assert second.value("page_lookups", tier="host", half="draft", result="degraded") == 3


@pytest.mark.parametrize("answer", MissingDraft)
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_target_half_is_a_miss_from_that_page_on(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes], how: str, answer: MissingDraft
) -> None:
    tools.damage(volume.path(keys[1], Half.TARGET), how)
    second = rig(backend=volume, answer=answer)
    hit = second.run(PROMPT)
    assert (tools.cached(hit), hit.draft_absent) == ({"storage": 1}, 0)
    assert second.value("page_lookups", tier="storage", half="target", result="corrupt") == (how != "deleted")
    second.close()
    third = rig(backend=volume, answer=answer)
    assert tools.cached(third.run(PROMPT)) == {"storage": 4}


@pytest.mark.parametrize("half", Half)
@pytest.mark.parametrize("how", DAMAGES)
def test_every_page_of_one_half_damaged(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes], how: str, half: Half
) -> None:
    for key in keys:
        tools.damage(volume.path(key, half), how)
    second = rig(backend=volume)
    assert tools.cached(second.run(PROMPT)) == {}
    second.close()
    third = rig(backend=volume)
    assert tools.cached(third.run(PROMPT)) == {"storage": 4}


def test_draft_halves_behind_an_absent_one_are_found(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes]
) -> None:
    """Lookups find where a run ends and not its holes; what can be used of what lies behind one must be asked for."""
    tools.damage(volume.path(keys[0], Half.DRAFT), "deleted")
    second = rig(backend=volume, answer=MissingDraft.DEGRADE)
    visit = second.enter(PROMPT)
    second.wait_prefetch(visit)
    assert second.admit(visit).draft_absent == 4
    assert visit.lease.draft_absent == [True, False, False, False]
    second.compute(visit)
    second.release(visit)


def test_pages_behind_a_hole_are_not_waited_for(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    """Of a long prompt only some pages are asked for, so a hole is found when it is read: then the run ends there."""
    prompt = list(range(40 * tools.PAGE + 1))
    first = rig(backend=volume, device_pages=64, host_pages=64)
    first.run(prompt)
    first.close()
    tools.damage(volume.path(first.keys(prompt)[2], Half.TARGET), "deleted")
    second = rig(backend=volume, device_pages=64, host_pages=64)
    hit = second.run(prompt)
    assert tools.cached(hit) == {"storage": 2}
    read = [key for operation, half, key in volume.calls if operation == "read" and half is Half.TARGET]
    assert len(read) < 30, "pages were read that nobody could use"


def test_bytes_of_an_absent_half_are_never_moved_to_the_device(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes]
) -> None:
    """A read that failed leaves undefined bytes on the host; they must stay there."""
    tools.damage(volume.path(keys[0], Half.DRAFT), "payload bit")
    second = rig(backend=volume, answer=MissingDraft.DEGRADE)
    for tensor in second.draft.layer(0):
        tensor.fill_(7.0)
    visit = second.enter(PROMPT)
    second.wait_prefetch(visit)
    assert second.admit(visit).draft_absent == 4
    page = visit.lease.pages[0]
    assert all((tensor[page] == 7.0).all() for tensor in second.draft.layer(0))
    second.release(visit)


def test_a_whole_pair_on_the_host_is_taken_before_half_a_pair_on_the_device(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes]
) -> None:
    for key in keys:
        tools.damage(volume.path(key, Half.DRAFT), "deleted")
    second = rig(backend=volume, answer=MissingDraft.DEGRADE)
    first = second.run(PROMPT)
    assert first.draft_absent == 16
    for entry in second.cache.index.entries():
        assert entry.device is not None
        assert not entry.draft_on_device
        # Another pod has written the draft half, and it has come to the host.
        second.cache._arena.draft.page(entry.host)[:] = bytes(
            tools.content(entry.key, "draft", second.draft.layout.page_bytes)
        )
        entry.draft_on_host = True
    again = second.run(PROMPT)
    assert (tools.cached(again), again.draft_absent) == ({"host": 4}, 0)
    second.cache.check_integrity()


def test_a_page_in_use_without_its_draft_half_does_not_give_way_to_a_whole_one(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes]
) -> None:
    for key in keys:
        tools.damage(volume.path(key, Half.DRAFT), "deleted")
    cache = rig(backend=volume, answer=MissingDraft.DEGRADE)
    degraded = cache.enter(PROMPT)
    whole = cache.enter(PROMPT)
    whole.prefetch.deadline = 0.0
    assert tools.cached(cache.admit(whole)) == {}  # computes everything itself
    cache.wait_prefetch(degraded)
    assert cache.admit(degraded).draft_absent == 16
    cache.compute(whole)  # while its pages are in use by the other: stays private
    cache.cache.check_integrity()
    assert cache.cache.index.device.num_free == 32 - 5 - 5 + 1
    cache.release(degraded)
    cache.release(whole)
    cache.settle()
    cache.check_idle()


def test_the_draft_half_of_another_draft_model_is_not_ours(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[type(volume).__module__], "DRAFT_SPACE", bytes(31) + b"\x01")
    swapped = rig(backend=volume)
    assert tools.cached(swapped.run(PROMPT)) == {}, "pages of the old draft were served to the new one"
    swapped.close()
    degraded = rig(backend=volume, answer=MissingDraft.DEGRADE)
    assert degraded.run(PROMPT).draft_absent == 0
    degraded.close()
    monkeypatch.undo()
    back = rig(backend=volume)
    assert tools.cached(back.run(PROMPT)) == {"storage": 4}, "rolling back found the old draft's pages again"


@pytest.mark.parametrize("operation", ["exists", "read", "write"])
def test_errors_of_storage_cost_a_miss_and_a_counter(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes], operation: str
) -> None:
    cache = rig(backend=volume, breaker=BreakerSettings(threshold=3, backoff_s=60.0))
    volume.broken, volume.error = {operation}, BackendError("EIO", "broken on purpose")
    expected = {"storage": 4} if operation == "write" else {}
    assert tools.cached(cache.run(PROMPT)) == expected
    cache.run([*PROMPT[:8], 1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.settle()
    asked = {"exists": "lookup"}.get(operation, operation)
    assert cache.value("storage_errors", operation=asked, code="EIO") > 0
    cache.check_idle()


def test_a_breaker_that_opens_stops_asking_and_requests_go_on(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes]
) -> None:
    cache = rig(backend=volume, breaker=BreakerSettings(threshold=2, backoff_s=60.0, cap_s=60.0))
    volume.broken, volume.error = {"exists", "read", "write"}, BackendError("EIO", "broken on purpose")
    for prompt in range(5):
        assert tools.cached(cache.run([prompt] * 9)) == {}
    cache.settle()
    assert cache.value("storage_breaker_open", operation="read") == 1
    calls = len(volume.calls)
    for prompt in range(5, 10):
        assert tools.cached(cache.run([prompt] * 9)) == {}
    cache.settle()
    assert len(volume.calls) == calls
    assert tools.cached(cache.run([9] * 9)) == {"device": 2}


def test_a_cleared_volume_is_a_miss(rig: MakeRig, volume: Any, tools: SimpleNamespace, keys: list[bytes]) -> None:
    shutil.rmtree(volume.root / "v2")
    cache = rig(backend=volume)
    assert tools.cached(cache.run(PROMPT)) == {}
    cache.close()
    assert all(volume.has(key, half) for key in keys for half in Half)
