"""Storage attached, detached and changed under a running cache, and filled again by a flush: over real directories."""

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.cache.storage.base import BackendError
from speccache_runtime.cache.storage.breaker import BreakerSettings
from speccache_runtime.cache.storage.codec import Half

PROMPT = list(range(100, 119))
OTHER = list(range(300, 319))
MakeRig = Callable[..., Any]


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory, tools: SimpleNamespace) -> Any:
    """A second volume."""
    made = tools.Volume(tmp_path_factory.mktemp("other"))
    made.probe()
    return made


def has_all(volume: Any, cache: Any, prompt: list[int]) -> bool:
    return all(volume.has(key, half) for key in cache.keys(prompt) for half in Half)


def empty(volume: Any) -> None:
    """As by a person, or a volume that was made anew."""
    for path in volume.root.iterdir():
        shutil.rmtree(path)


def remove_objects(volume: Any) -> None:
    """While others may be writing."""
    for folder, _, names in os.walk(volume.root):
        if not folder.endswith("tmp"):
            for name in names:
                Path(folder, name).unlink(missing_ok=True)


def lose_the_device(cache: Any) -> None:
    cache.settle()
    cache.cache.index.give_device(cache.cache.index.take_device(cache.cache.index.device.total))


def lose_the_host(cache: Any) -> None:
    cache.settle()
    cache.cache.index.give_host(cache.cache.index.take_host(cache.cache.index.host.total))


def test_what_is_attached_later_is_read_and_written(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    cache = rig()
    cache.run(PROMPT)
    cache.settle()
    cache.attach(volume)
    cache.run(OTHER)
    cache.settle()
    assert has_all(volume, cache, OTHER)
    assert not volume.has(cache.keys(PROMPT)[0], Half.TARGET), "what was there before is written by a flush"
    cache.flush()
    assert has_all(volume, cache, PROMPT)
    again = rig()
    again.attach(volume)
    assert tools.cached(again.run(PROMPT)) == {"storage": 4}


def test_without_storage_nothing_is_asked_and_serving_goes_on(
    rig: MakeRig, volume: Any, tools: SimpleNamespace
) -> None:
    cache = rig(backend=volume)
    cache.run(PROMPT)
    cache.settle()
    cache.attach(None)
    volume.calls.clear()
    assert tools.cached(cache.run(PROMPT)) == {"device": 4}
    assert tools.cached(cache.run(OTHER)) == {}
    assert cache.cache.flush() is None
    assert cache.cache.unstored == 0
    cache.settle()
    assert volume.calls == []
    assert cache.cache.num_ending == 0


def test_changed_storage_gets_what_the_old_one_had(
    rig: MakeRig, volume: Any, other: Any, tools: SimpleNamespace
) -> None:
    """What was stored in the old place is not believed to be in the new one."""
    cache = rig(backend=volume)
    cache.run(PROMPT)
    cache.settle()
    cache.attach(other)
    assert cache.cache.unstored == 4
    assert cache.flush().written == 4
    assert has_all(other, cache, PROMPT)
    lose_the_device(cache)
    lose_the_host(cache)
    assert tools.cached(cache.run(PROMPT)) == {"storage": 4}


@pytest.mark.parametrize("operation", ["exists", "read"])
def test_a_request_does_not_wait_for_storage_that_is_taken_away(
    rig: MakeRig, volume: Any, tools: SimpleNamespace, operation: str
) -> None:
    """What arrives afterwards is dropped, and its host page comes back."""
    first = rig(backend=volume)
    first.run(PROMPT)
    first.close()
    cache = rig(backend=volume)
    volume.gates[operation] = threading.Event()
    visit = cache.enter(PROMPT)
    cache.until(lambda: volume.calls[-1][0] == operation)
    assert cache.cache.prefetch_pending(visit.prefetch)
    cache.attach(None)
    assert not cache.cache.prefetch_pending(visit.prefetch)
    cache.cache.check_integrity()
    assert tools.cached(cache.admit(visit)) == {}
    assert cache.compute(visit)
    cache.release(visit)
    assert cache.cache.num_ending == 1
    volume.gates[operation].set()
    cache.until(lambda: cache.cache.num_ending == 0)
    cache.settle()
    cache.check_idle()
    assert not any(entry.stored_target for entry in cache.cache.index.entries())


def test_a_write_under_way_ends_and_says_nothing_of_the_new_storage(
    rig: MakeRig, volume: Any, other: Any, tools: SimpleNamespace
) -> None:
    volume.gates["write"] = threading.Event()
    cache = rig(backend=volume)
    cache.run(PROMPT)
    cache.until(lambda: volume.calls)
    cache.attach(other)
    cache.cache.check_integrity()
    assert not cache.cache.storing, "a drain need not wait for what was taken away"
    assert cache.flush().written == 4
    assert has_all(other, cache, PROMPT)
    volume.gates["write"].set()
    cache.until(lambda: cache.cache.num_ending == 0)
    cache.check_idle()
    assert cache.cache.unstored == 0


def test_an_ended_storage_leaves_its_gauges(rig: MakeRig, volume: Any) -> None:
    cache = rig(backend=volume, breaker=BreakerSettings(threshold=1))
    volume.broken, volume.error = {"write"}, BackendError("EIO", "broken on purpose")
    cache.run(PROMPT)
    cache.settle()
    assert cache.value("storage_breaker_open", operation="write") == 1
    cache.attach(None)
    assert cache.value("storage_breaker_open", operation="write") == 0


def test_a_volume_emptied_under_a_running_pod_is_filled_again(
    rig: MakeRig, volume: Any, tools: SimpleNamespace
) -> None:
    cache = rig(backend=volume)
    cache.run(PROMPT)
    cache.settle()
    empty(volume)
    assert cache.flush().written == 8, "four when they were computed, four now"
    assert has_all(volume, cache, PROMPT)
    volume.calls.clear()
    cache.flush()
    assert not any(call[0] == "write" for call in volume.calls), "what is there is not written again"


def test_a_lost_draft_half_is_written_again(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    cache = rig(backend=volume)
    cache.run(PROMPT)
    cache.settle()
    volume.path(cache.keys(PROMPT)[2], Half.DRAFT).unlink()
    cache.flush()
    assert has_all(volume, cache, PROMPT)


def test_a_flush_says_what_storage_does_not_take(rig: MakeRig, volume: Any) -> None:
    """And takes it up again when it does."""
    cache = rig(backend=volume, breaker=BreakerSettings(threshold=1000))
    cache.run(PROMPT)
    cache.settle()
    empty(volume)
    volume.broken, volume.error = {"write"}, BackendError("ENOSPC", "full")
    cache.cache.ask_again()
    cache.until(lambda: not cache.cache.flush().asking)
    cache.settle()
    assert cache.cache.unstored == 4
    volume.broken = set()
    cache.until(lambda: cache.cache.flush().done)
    assert has_all(volume, cache, PROMPT)


def test_a_page_that_storage_does_not_answer_for_counts_as_lost(rig: MakeRig, volume: Any) -> None:
    cache = rig(backend=volume, breaker=BreakerSettings(threshold=1000))
    cache.run(PROMPT)
    cache.settle()
    volume.broken, volume.error = {"touch", "write"}, BackendError("EIO", "broken on purpose")
    cache.cache.ask_again()
    cache.settle()
    cache.until(lambda: cache.cache.unstored == 4)
    volume.broken = set()
    assert cache.flush().written == 4, "when they were computed; they are there"


def test_a_flush_writes_more_pages_than_may_wait(rig: MakeRig, volume: Any, tools: SimpleNamespace) -> None:
    long = list(range(70 * tools.PAGE + 1))
    cache = rig(device_pages=80, host_pages=80)
    cache.run(long)
    cache.settle()
    cache.attach(volume)
    assert cache.flush().written == 70
    assert cache.value("dropped_pages", reason="write_backlog") == 0
    assert has_all(volume, cache, long)


STEPS = st.lists(
    st.sampled_from(
        [
            *("request", "request", "request", "open", "end", "flush", "empty"),
            *("detach", "attach one", "attach other", "lose device", "lose host"),
        ]
    ),
    min_size=5,
    max_size=30,
)


@settings(max_examples=2 * settings().max_examples)
@given(steps=STEPS, seed=st.integers(0, 2**16), answer=st.sampled_from(MissingDraft), host=st.sampled_from([6, 40]))
def test_any_order_over_real_files_and_threads(
    tools: SimpleNamespace,
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[str],
    seed: int,
    answer: MissingDraft,
    host: int,
) -> None:
    """Every page that a request gets has its own bytes (the rig compares them), and every page is counted once."""
    draw = random.Random(seed)
    volumes = {name: tools.Volume(tmp_path_factory.mktemp(name)) for name in ("one", "other")}
    for volume in volumes.values():
        volume.probe()
    rig = tools.Rig(backend=volumes["one"], device_pages=24, host_pages=host, answer=answer)
    held: list[Any] = []
    for step in steps:
        verb, _, what = step.partition(" ")
        text = [draw.randint(0, 2), *range(draw.randint(1, 18))]
        if verb == "request":
            rig.run(text)
        elif verb == "open" and len(held) < 2:
            held.append(rig.enter(text))
        elif verb == "end" and held:
            visit = held.pop(0)
            if rig.admit(visit) is not None:
                rig.compute(visit)
                rig.release(visit)
            else:
                rig.cache.end_prefetch(visit.prefetch)
        elif verb in ("attach", "detach"):
            rig.attach(volumes[what] if what else None)
        elif verb == "flush" and rig.cache.storage_state is not None:
            rig.flush()
        elif verb == "empty":
            for volume in volumes.values():
                remove_objects(volume)
        elif verb == "lose":
            {"device": lose_the_device, "host": lose_the_host}[what](rig)
        rig.cache.check_integrity()
    for visit in held:
        rig.cache.end_prefetch(visit.prefetch)
    rig.until(lambda: rig.cache.num_ending == 0)
    rig.close()
