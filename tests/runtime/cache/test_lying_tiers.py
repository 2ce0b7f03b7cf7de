"""Many requests over one cache whose storage is slow, refuses, loses, damages and mixes up objects, in any order.

Storage calls run when the state machine says so, hence every order of arrival can happen and each failure repeats.
Whatever happens, a page that a tier calls its own holds the bytes of its key, every page is counted once, and in the
end nobody pins anything.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from speccache_runtime.cache import storage_io
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.cache.storage.base import BackendError
from speccache_runtime.cache.storage.breaker import BreakerSettings

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

# Beginnings of three texts of which two share their first page, so that requests meet.
TEXTS = ([0] * 18, [0, 0, 0, 0, *[1] * 14], [2] * 18)
PROMPTS = st.builds(lambda text, length: TEXTS[text][:length], st.integers(0, 2), st.integers(1, 18))


class CacheMachine(RuleBasedStateMachine):
    """See the module's docstring. `tools` are the helpers of conftest."""

    tools: SimpleNamespace
    device: str

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.volume = self.tools.Volume(Path(self.folder.name))
        self.volume.probe()
        self.volume.error = BackendError("EIO", "broken on purpose")
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.rig: Any = None

    # ---- lives

    @initialize(
        draft=st.booleans(), answer=st.sampled_from(MissingDraft), device=st.integers(4, 9), host=st.integers(0, 9)
    )
    def start(self, draft: bool, answer: MissingDraft, device: int, host: int) -> None:
        self.jobs: list[Any] = []
        workers = type("Workers", (self.tools.HandWorkers,), {"queue": self.jobs})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage_io, "Workers", workers)
            self.rig = self.tools.Rig(
                backend=self.volume,
                draft=draft,
                answer=answer,
                device=self.device,
                device_pages=device,
                host_pages=host,
                breaker=BreakerSettings(threshold=3, backoff_s=1e-6, cap_s=1e-6),
            )

    @rule(draft=st.booleans(), answer=st.sampled_from(MissingDraft), device=st.integers(4, 9), host=st.integers(0, 9))
    def die_and_start_again(self, draft: bool, answer: MissingDraft, device: int, host: int) -> None:
        """What was not written by now is gone."""
        self.rig.cache.close()
        self.waiting, self.running = [], []
        self.start(draft, answer, device, host)

    @rule()
    def drain(self) -> None:
        for visit in [*self.waiting]:
            self.give_up(visit)
        for visit in [*self.running]:
            self.end(visit)
        self.finish_jobs()
        self.rig.check_idle()
        self.rig.cache.store_all()
        self.finish_jobs()
        self.rig.check_idle()
        if not self.volume.broken and self.rig.draft is not None:
            assert all(entry.stored_target for entry in self.rig.cache.index.entries() if entry.host is not None)

    def finish_jobs(self) -> None:
        """All storage calls in order, and all copies; on a GPU these end when they end."""
        deadline = time.monotonic() + 20
        while self.jobs or self.rig.cache.poll() or self.rig.cache.busy:
            while self.jobs:
                self.jobs.pop(0)()
            assert time.monotonic() < deadline, "a copy never ends"

    # ---- requests

    @rule(prompt=PROMPTS)
    def serve(self, prompt: list[int]) -> None:
        """A whole request, with storage as quick as it can be; not if others leave too little room."""
        visit = self.rig.enter(prompt)
        self.finish_jobs()
        if self.rig.admit(visit) is None:
            self.rig.cache.end_prefetch(visit.prefetch)
            return
        self.rig.compute(visit)
        self.rig.release(visit)
        self.finish_jobs()

    @rule(prompt=PROMPTS)
    def enter(self, prompt: list[int]) -> None:
        self.waiting.append(self.rig.enter(prompt))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        """With or without what storage has brought so far: a deadline may end the wait at any time."""
        visit = data.draw(st.sampled_from(self.waiting))
        before = len(self.rig.cache.index)
        if self.rig.admit(visit) is None:
            assert visit.lease.pages == []
            assert len(self.rig.cache.index) <= before
            return
        self.waiting.remove(visit)
        self.running.append(visit)
        visit.extra["done"] = visit.hit.tokens

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort_waiting(self, data: st.DataObject) -> None:
        self.give_up(data.draw(st.sampled_from(self.waiting)))

    def give_up(self, visit: Any) -> None:
        self.rig.cache.end_prefetch(visit.prefetch)
        self.waiting.remove(visit)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3))
    def compute(self, data: st.DataObject, more: list[int]) -> None:
        """Prefills a piece of the prompt, or decodes a few tokens behind it."""
        visit = data.draw(st.sampled_from(self.running))
        done = visit.extra["done"]
        if done >= len(visit.tokens) - 1:
            visit.tokens += more
        upto = data.draw(st.integers(done, len(visit.tokens)))
        if self.rig.compute(visit, upto):
            visit.extra["done"] = upto

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.running)))

    def end(self, visit: Any) -> None:
        self.rig.release(visit)
        self.running.remove(visit)

    # ---- storage

    @rule()
    def storage_finishes(self) -> None:
        self.finish_jobs()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), count=st.integers(1, 4))
    def storage_works(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.jobs))):
            self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))()

    @rule()
    def poll(self) -> None:
        self.rig.cache.poll()

    @rule(operations=st.sets(st.sampled_from(["exists", "read", "write", "delete"])))
    def storage_breaks_or_heals(self, operations: set[str]) -> None:
        self.volume.broken = operations

    def objects(self) -> list[Path]:
        return sorted(p for p in self.volume.root.rglob("*") if p.is_file() and p.parent.name != "tmp")

    @precondition(lambda self: self.objects())
    @rule(data=st.data(), how=st.sampled_from(["deleted", "truncated", "header bit", "payload bit"]))
    def an_object_is_damaged(self, data: st.DataObject, how: str) -> None:
        path = data.draw(st.sampled_from(self.objects()))
        if path.stat().st_size > 4097:
            self.tools.damage(path, how)

    @precondition(lambda self: len(self.objects()) > 1)
    @rule(data=st.data())
    def an_object_takes_the_place_of_another(self, data: st.DataObject) -> None:
        one, other = (data.draw(st.sampled_from(self.objects())) for _ in range(2))
        other.write_bytes(one.read_bytes())

    # ---- what always holds

    @invariant()
    def every_page_is_counted_once(self) -> None:
        self.rig.cache.check_integrity()

    @invariant()
    def every_known_page_holds_its_own_bytes(self) -> None:
        self.rig.cache.loads.wait_draft(self.rig.cache._loading)
        for entry in self.rig.cache.index.entries():
            if entry.device is not None:
                assert self.tools.page_is(self.rig.target, entry.device, entry.key, "target")
                if entry.draft_on_device:
                    assert self.tools.page_is(self.rig.draft, entry.device, entry.key, "draft")
            if entry.host is not None:
                arena = self.rig.cache._arena
                assert self.same(arena.target_half(entry.host), entry.key, "target")
                if entry.draft_on_host:
                    assert self.same(arena.draft_half(entry.host), entry.key, "draft")

    def same(self, found: memoryview, key: bytes, half: str) -> bool:
        return torch.equal(torch.frombuffer(found, dtype=torch.uint8), self.tools.content(key, half, len(found)))

    @invariant()
    def a_request_sees_its_own_pages(self) -> None:
        for visit in self.running:
            self.rig.check_pages(visit)

    def teardown(self) -> None:
        if self.rig is not None:
            self.drain()
            self.rig.cache.close()
        self.folder.cleanup()


@pytest.mark.parametrize("device", DEVICES)
def test_storage_that_lies_costs_misses_and_nothing_else(tools: SimpleNamespace, device: str) -> None:
    machine = type("CacheMachine", (CacheMachine,), {"tools": tools, "device": device})
    wide = settings(max_examples=4 * settings().max_examples, stateful_step_count=50)
    run_state_machine_as_test(machine, settings=wide)  # type: ignore[no-untyped-call]
