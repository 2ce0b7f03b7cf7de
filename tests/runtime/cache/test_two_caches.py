"""Many requests over two caches on one volume that is slow, refuses, loses, damages and mixes up objects, fills up and
is swept, in any order.

Storage calls run when the state machine says so, hence every order of arrival can happen and each failure repeats.
Whatever happens, a page that a tier calls its own holds the bytes of its key, every page is counted once, what is
called stored is there unless somebody took it away, the volume keeps to its size, and in the end nobody pins anything.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
from speccache_runtime.cache.storage.base import BackendError, NoteName, ObjectName, parent_digits
from speccache_runtime.cache.storage.breaker import BreakerSettings
from speccache_runtime.cache.storage.capacity.keeper import Keeper
from speccache_runtime.cache.storage.capacity.lease import TTL_S
from speccache_runtime.cache.storage.codec import HEADER_SIZE, Corrupt, Half, Identity, check
from speccache_runtime.cache.storage.observer import NullObserver

from .faulty import WRITE_FAULTS, FaultyVolume, Killed

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
OPERATIONS = ["exists", "read", "write", "delete", "touch", "objects"]
ERRORS = [BackendError("EIO", "broken on purpose"), BackendError("ENOSPC", "full on purpose")]

# Beginnings of three texts of which two share their first page, so that requests meet.
TEXTS = ([0] * 18, [0, 0, 0, 0, *[1] * 14], [2] * 18)
PROMPTS = st.builds(lambda text, length: TEXTS[text][:length], st.integers(0, 2), st.integers(1, 18))
PODS = st.integers(0, 1)


class HandKeeper(Keeper):
    """Its rounds are the test's."""

    def start(self) -> None:
        pass


@dataclass
class Pod:
    """A cache with its requests, and what its storage has been asked and not done yet."""

    number: int
    rig: Any
    keeper: Keeper
    jobs: list[Callable[[], bool]]
    waiting: list[Any] = field(default_factory=list)
    running: list[Any] = field(default_factory=list)


class TwoCaches(RuleBasedStateMachine):
    """See the module's docstring. `tools` are the helpers of conftest."""

    tools: SimpleNamespace
    device: str

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.volume = FaultyVolume(Path(self.folder.name))
        self.volume.probe()
        self.later = 0.0
        self.pods: list[Pod] = []

    # ---- lives

    @initialize(
        draft=st.booleans(),
        answer=st.sampled_from(MissingDraft),
        device=st.integers(4, 9),
        host=st.integers(0, 9),
        pairs=st.sampled_from([None, 8, 14]),
    )
    def start(self, draft: bool, answer: MissingDraft, device: int, host: int, pairs: int | None) -> None:
        pair_bytes = 2 * HEADER_SIZE + self.tools.PAIR_BYTES
        self.capacity = None if pairs is None else pairs * pair_bytes
        self.pods = [self.pod(0, draft, answer, device, host), self.pod(1, True, MissingDraft.RECOMPUTE, 9, 9)]
        for pod in self.pods * 3:
            pod.keeper.round()

    def pod(self, number: int, draft: bool, answer: MissingDraft, device: int, host: int) -> Pod:
        jobs: list[Callable[[], bool]] = []
        workers = type("Workers", (self.tools.HandWorkers,), {"queue": jobs})
        keeper = HandKeeper(
            self.volume,
            self.tools.FINGERPRINT,
            self.capacity,
            NullObserver(),
            clock=lambda: time.monotonic() + self.later,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage_io, "Workers", workers)
            rig = self.tools.Rig(
                backend=self.volume,
                keeper=keeper,
                draft=draft,
                answer=answer,
                device=self.device,
                device_pages=device,
                host_pages=host,
                breaker=BreakerSettings(threshold=3, backoff_s=1e-6, cap_s=1e-6),
            )
        return Pod(number, rig, keeper, jobs)

    @rule(
        who=PODS,
        draft=st.booleans(),
        answer=st.sampled_from(MissingDraft),
        device=st.integers(4, 9),
        host=st.integers(0, 9),
    )
    def die_and_start_again(self, who: int, draft: bool, answer: MissingDraft, device: int, host: int) -> None:
        """What was not written by now is gone."""
        self.pods[who].rig.cache.close()
        self.pods[who] = self.pod(who, draft, answer, device, host)

    @precondition(lambda self: any(pod.jobs for pod in self.pods))
    @rule(data=st.data(), at=st.sampled_from(["write target", "write draft", "read draft"]))
    def killed_in_the_middle(self, data: st.DataObject, at: str) -> None:
        """Between a draft half and its target half, for one."""
        pod = data.draw(st.sampled_from([pod for pod in self.pods if pod.jobs]))

        def killed() -> None:
            raise Killed

        self.volume.meanwhile = at, killed
        while pod.jobs and self.volume.meanwhile is not None:
            self.work(pod, 0)
        self.volume.meanwhile = None
        pod.rig.cache.close()
        self.pods[pod.number] = self.pod(pod.number, True, MissingDraft.RECOMPUTE, 9, 9)

    @rule(who=PODS)
    def drain(self, who: int) -> None:
        pod = self.pods[who]
        for visit in [*pod.waiting]:
            self.give_up(pod, visit)
        for visit in [*pod.running]:
            self.end(pod, visit)
        self.finish_jobs(pod)
        pod.rig.check_idle()
        pod.rig.cache.store_all()
        faults = self.volume.broken or self.volume.write_fault or self.capacity
        self.finish_jobs(pod)
        pod.rig.check_idle()
        if not faults and pod.rig.draft is not None:
            assert all(entry.stored_target for entry in pod.rig.cache.index.entries() if entry.host is not None)

    def work(self, pod: Pod, number: int) -> None:
        """One storage call."""
        self.volume.writer = pod.number
        pod.jobs.pop(number)()

    def finish_jobs(self, pod: Pod) -> None:
        """All storage calls in order, and all copies; on a GPU these end when they end."""
        deadline = time.monotonic() + 20
        while pod.jobs or pod.rig.cache.poll() or pod.rig.cache.busy:
            while pod.jobs:
                self.work(pod, 0)
            assert time.monotonic() < deadline, "a copy never ends"

    # ---- requests

    @rule(who=PODS, prompt=PROMPTS)
    def serve(self, who: int, prompt: list[int]) -> None:
        """A whole request, with storage as quick as it can be; not if others leave too little room."""
        pod = self.pods[who]
        visit = pod.rig.enter(prompt)
        self.finish_jobs(pod)
        if pod.rig.admit(visit) is None:
            pod.rig.cache.end_prefetch(visit.prefetch)
            return
        pod.rig.compute(visit)
        pod.rig.release(visit)
        self.finish_jobs(pod)

    @rule(who=PODS, prompt=PROMPTS)
    def enter(self, who: int, prompt: list[int]) -> None:
        self.pods[who].waiting.append(self.pods[who].rig.enter(prompt))

    def one_of(self, data: st.DataObject, state: str) -> tuple[Pod, Any]:
        pod = data.draw(st.sampled_from([pod for pod in self.pods if getattr(pod, state)]))
        return pod, data.draw(st.sampled_from(getattr(pod, state)))

    @precondition(lambda self: any(pod.waiting for pod in self.pods))
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        """With or without what storage has brought so far: a deadline may end the wait at any time."""
        pod, visit = self.one_of(data, "waiting")
        before = len(pod.rig.cache.index)
        if pod.rig.admit(visit) is None:
            assert visit.lease.pages == []
            assert len(pod.rig.cache.index) <= before
            return
        pod.waiting.remove(visit)
        pod.running.append(visit)
        visit.extra["done"] = visit.hit.tokens

    @precondition(lambda self: any(pod.waiting for pod in self.pods))
    @rule(data=st.data())
    def abort_waiting(self, data: st.DataObject) -> None:
        self.give_up(*self.one_of(data, "waiting"))

    def give_up(self, pod: Pod, visit: Any) -> None:
        pod.rig.cache.end_prefetch(visit.prefetch)
        pod.waiting.remove(visit)

    @precondition(lambda self: any(pod.running for pod in self.pods))
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3))
    def compute(self, data: st.DataObject, more: list[int]) -> None:
        """Prefills a piece of the prompt, or decodes a few tokens behind it."""
        pod, visit = self.one_of(data, "running")
        done = visit.extra["done"]
        if done >= len(visit.tokens) - 1:
            visit.tokens += more
        upto = data.draw(st.integers(done, len(visit.tokens)))
        if pod.rig.compute(visit, upto):
            visit.extra["done"] = upto

    @precondition(lambda self: any(pod.running for pod in self.pods))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.end(*self.one_of(data, "running"))

    def end(self, pod: Pod, visit: Any) -> None:
        pod.rig.release(visit)
        pod.running.remove(visit)

    # ---- storage

    @rule(who=PODS)
    def storage_finishes(self, who: int) -> None:
        self.finish_jobs(self.pods[who])

    @precondition(lambda self: any(pod.jobs for pod in self.pods))
    @rule(data=st.data(), count=st.integers(1, 4))
    def storage_works(self, data: st.DataObject, count: int) -> None:
        pod = data.draw(st.sampled_from([pod for pod in self.pods if pod.jobs]))
        for _ in range(min(count, len(pod.jobs))):
            self.work(pod, data.draw(st.integers(0, len(pod.jobs) - 1)))

    @precondition(lambda self: any(pod.jobs for pod in self.pods))
    @rule(
        data=st.data(),
        at=st.sampled_from(["exists", "read target", "read draft", "write target", "write draft"]),
        what=st.sampled_from(["sweep", "steal", "vanish", "other pod"]),
    )
    def something_happens_in_the_middle(self, data: st.DataObject, at: str, what: str) -> None:
        """Between two operations of one storage call, such as the halves of a pair."""
        pod = data.draw(st.sampled_from([pod for pod in self.pods if pod.jobs]))
        other = self.pods[1 - pod.number]

        def meanwhile() -> None:
            if what == "sweep":
                self.keep(other.number)
            elif what == "steal":
                self.lease_is_stolen()
            elif what == "vanish":
                for path in self.volume.paths():
                    self.volume.spoilt(path)
                    path.unlink()
            elif other.jobs:
                self.work(other, 0)
            self.volume.writer = pod.number

        self.volume.meanwhile = at, meanwhile
        while pod.jobs and self.volume.meanwhile is not None:
            self.work(pod, 0)
        self.volume.meanwhile = None

    @rule(who=PODS)
    def poll(self, who: int) -> None:
        self.pods[who].rig.cache.poll()

    @rule(operation=st.sampled_from(OPERATIONS), error=st.sampled_from(ERRORS))
    def storage_breaks(self, operation: str, error: BackendError) -> None:
        self.volume.broken, self.volume.error = self.volume.broken | {operation}, error

    @precondition(lambda self: self.volume.broken)
    @rule()
    def storage_heals(self) -> None:
        self.volume.broken = set()

    @rule(fault=st.sampled_from(WRITE_FAULTS))
    def the_next_write_goes_wrong(self, fault: str) -> None:
        self.volume.write_fault = fault

    @precondition(lambda self: self.volume.paths())
    @rule(data=st.data(), how=st.sampled_from(["deleted", "truncated", "header bit", "payload bit"]))
    def an_object_is_damaged(self, data: st.DataObject, how: str) -> None:
        path = data.draw(st.sampled_from(self.volume.paths()))
        if path.stat().st_size > 4097:
            self.volume.spoilt(path)
            self.tools.damage(path, how)

    @precondition(lambda self: self.volume.paths())
    @rule(who=PODS, prompt=PROMPTS, how=st.sampled_from(["truncated", "header bit", "payload bit"]))
    def all_objects_are_damaged_and_read(self, who: int, prompt: list[int], how: str) -> None:
        """By a pod that knows nothing yet."""
        for path in self.volume.paths():
            if path.stat().st_size > 4097:
                self.volume.spoilt(path)
                self.tools.damage(path, how)
        self.die_and_start_again(who, True, MissingDraft.RECOMPUTE, 9, 9)
        self.serve(who, prompt)

    @precondition(lambda self: len(self.volume.paths()) > 1)
    @rule(data=st.data())
    def an_object_takes_the_place_of_another(self, data: st.DataObject) -> None:
        one, other = (data.draw(st.sampled_from(self.volume.paths())) for _ in range(2))
        self.volume.spoilt(other)
        self.volume.planted += max(0, one.stat().st_size - other.stat().st_size)
        other.write_bytes(one.read_bytes())

    # ---- capacity

    @rule(who=PODS, numbers=st.lists(st.integers(3, 12), min_size=2, max_size=3, unique=True))
    def fill(self, who: int, numbers: list[int]) -> None:
        """Prompts that nobody else asks, with all the room that the pods' keepers find for them."""
        for number in numbers:
            self.serve(who, [number] * 14)
            self.time_passes(31.0)
            for pod in self.pods:
                self.keep(pod.number)

    @rule(who=PODS)
    def keep(self, who: int) -> None:
        """A round of a pod's keeper, which may sweep: children go before their parents."""
        before = self.parents()
        told, self.volume.untold[who] = self.volume.untold[who], set()
        try:
            self.pods[who].keeper.round()
        except BackendError:
            self.volume.untold[who] |= told
        after = self.parents()
        gone = {key[:16] for key in before.keys() - after.keys()}
        new = set().union(*self.volume.untold)
        assert not [key for key, parent in after.items() if parent in gone and key not in new], "a child without parent"

    def parents(self) -> dict[str, str]:
        """Parent by key of all stored targets."""
        names = [ObjectName.parse(str(path.relative_to(self.volume.root))) for path in self.volume.paths()]
        return {name.key: name.parent for name in names if name is not None and name.half is Half.TARGET}

    @rule(seconds=st.sampled_from([1.0, TTL_S + 1, 61.0, 3601.0]))
    def time_passes(self, seconds: float) -> None:
        self.later += seconds
        self.volume.age(seconds)
        for pod in self.pods:
            for entry in pod.rig.cache.index.entries():
                entry.stored_used -= seconds

    @rule()
    def lease_is_stolen(self) -> None:
        """By a pod that never does anything with it: until it has expired nobody sweeps."""
        taken = self.volume.files.list_notes(self.tools.FINGERPRINT, "lease")
        number = int(taken[-1].id, 16) + 1 if taken else 0
        self.volume.files.create_note(NoteName(self.tools.FINGERPRINT, "lease", f"{number:016x}"), b"thief")
        before = self.volume.paths()
        for pod in self.pods:
            with contextlib.suppress(BackendError):
                pod.keeper.round()
        assert self.volume.paths() == before, "a page was removed by who had lost the lease"

    @invariant()
    def storage_keeps_to_its_size(self) -> None:
        if self.capacity is not None and self.volume.changed:
            used = sum(path.stat().st_size for path in self.volume.paths())
            assert used <= 1.05 * self.capacity + self.volume.planted
            self.volume.changed = False

    # ---- what always holds

    @invariant()
    def every_page_is_counted_once(self) -> None:
        for pod in self.pods:
            pod.rig.cache.check_integrity()

    @invariant()
    def every_known_page_holds_its_own_bytes(self) -> None:
        for pod in self.pods:
            rig = pod.rig
            rig.cache.loads.wait_draft(rig.cache._loading)
            for entry in rig.cache.index.entries():
                if entry.device is not None:
                    assert self.tools.page_is(rig.target, entry.device, entry.key, "target")
                    if entry.draft_on_device:
                        assert self.tools.page_is(rig.draft, entry.device, entry.key, "draft")
                if entry.host is not None:
                    arena = rig.cache._arena
                    assert self.same(arena.target.page(entry.host), entry.key, "target")
                    if entry.draft_on_host:
                        assert self.same(arena.draft.page(entry.host), entry.key, "draft")

    def same(self, found: memoryview, key: bytes, half: str) -> bool:
        return torch.equal(torch.frombuffer(found, dtype=torch.uint8), self.tools.content(key, half, len(found)))

    @invariant()
    def a_request_sees_its_own_pages(self) -> None:
        for pod in self.pods:
            for visit in pod.running:
                pod.rig.check_pages(visit)

    @invariant()
    def what_is_called_stored_is_there_unless_somebody_took_it_away(self) -> None:
        tools = self.tools
        spaces = {Half.TARGET: tools.TARGET_SPACE.hex(), Half.DRAFT: tools.DRAFT_SPACE.hex()}
        for pod in self.pods:
            for entry in pod.rig.cache.index.entries():
                for half, stored in ((Half.TARGET, entry.stored_target), (Half.DRAFT, entry.stored_draft)):
                    if stored:
                        key, parent = entry.key.hex(), parent_digits(entry.parent)
                        path = ObjectName(tools.FINGERPRINT, half, spaces[half], key, parent).path
                        assert path in self.volume.gone or (self.volume.root / path).exists(), f"{half} is not stored"

    def what_nobody_damaged_is_whole(self) -> None:
        for path in self.volume.paths():
            name = ObjectName.parse(str(path.relative_to(self.volume.root)))
            if name is None or name.path in self.volume.gone:
                continue
            data, key = path.read_bytes(), bytes.fromhex(name.key)
            payload = data[HEADER_SIZE:]
            try:
                check(data[:HEADER_SIZE], Identity(bytes.fromhex(name.namespace), name.half, key), payload)
            except Corrupt as corrupt:
                raise AssertionError(f"{name.path} is {corrupt.reason}") from corrupt
            assert payload == self.tools.content(key, name.half, len(payload)).numpy().tobytes()

    def teardown(self) -> None:
        for pod in self.pods:
            self.drain(pod.number)
            pod.rig.cache.close()
        self.what_nobody_damaged_is_whole()
        self.folder.cleanup()


@pytest.mark.parametrize("device", DEVICES)
def test_two_caches_on_a_volume_that_lies_fills_up_and_is_swept(tools: SimpleNamespace, device: str) -> None:
    machine = type("TwoCaches", (TwoCaches,), {"tools": tools, "device": device})
    wide = settings(max_examples=3 * settings().max_examples, stateful_step_count=50)
    run_state_machine_as_test(machine, settings=wide)  # type: ignore[no-untyped-call]
