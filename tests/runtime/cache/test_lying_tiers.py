"""Many requests over one cache whose storage is slow, refuses, loses, damages and mixes up objects, is taken away and
changed for another, in any order.

Storage calls run when the state machine says so, hence every order of arrival can happen and each failure repeats.
Whatever happens, a page that a tier calls its own holds the bytes of its key, every page is counted once, and in the
end nobody pins anything.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from speccache_api.geometry import KVGeometry
from speccache_runtime.cache import storage_io
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.cache.pool import HostArena, KVPool, PoolShape, shared_bytes
from speccache_runtime.cache.shared_memory import SharedMemory
from speccache_runtime.cache.storage.base import BackendError
from speccache_runtime.cache.storage.breaker import BreakerSettings
from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.cache.storage.store import PairStore
from speccache_runtime.cache.storage_io import StorageIO
from speccache_runtime.cache.transfer import Move
from speccache_runtime.cache.transfers import make_transfer
from speccache_runtime.engine.parallel.messages import (
    Backup,
    Cancel,
    Found,
    Hurry,
    Load,
    Lookup,
    Moved,
    Read,
    Touch,
    Touched,
    WasRead,
    WasWritten,
    Write,
)
from speccache_runtime.engine.parallel.spread import SpreadStorage, SpreadTransfer

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

# Beginnings of three texts of which two share their first page, so that requests meet.
TEXTS = ([0] * 18, [0, 0, 0, 0, *[1] * 14], [2] * 18)
SPACES = [hashlib.sha256(f"{half} of rank 1".encode()).digest() for half in ("target", "draft")]
PROMPTS = st.builds(lambda text, length: TEXTS[text][:length], st.integers(0, 2), st.integers(1, 18))


class CacheMachine(RuleBasedStateMachine):
    """See the module's docstring. `tools` are the helpers of conftest."""

    tools: SimpleNamespace
    device: str

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.volume = self.volume_in("one")
        self.attached = False
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.rig: Any = None

    def volume_in(self, name: str) -> Any:
        root = Path(self.folder.name) / name
        root.mkdir()
        volume = self.tools.Volume(root)
        volume.probe()
        volume.error = BackendError("EIO", "broken on purpose")
        return volume

    # ---- lives

    @initialize(
        draft=st.booleans(), answer=st.sampled_from(MissingDraft), device=st.integers(4, 9), host=st.integers(0, 9)
    )
    def start(self, draft: bool, answer: MissingDraft, device: int, host: int) -> None:
        self.jobs: list[Any] = []
        with self.workers():
            self.rig = self.make_rig(
                backend=self.volume,
                draft=draft,
                answer=answer,
                device=self.device,
                device_pages=device,
                host_pages=host,
                breaker=BreakerSettings(threshold=3, backoff_s=1e-6, cap_s=1e-6),
            )
        self.attached = True

    @contextmanager
    def workers(self) -> Iterator[None]:
        """What is made meanwhile has its storage jobs put into `jobs`."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage_io, "Workers", type("Workers", (self.tools.HandWorkers,), {"queue": self.jobs}))
            yield

    def make_rig(self, **settings: Any) -> Any:
        return self.tools.Rig(**settings)

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
        if self.attached and not self.volume.broken and self.rig.draft is not None:
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
    def a_flush_begins(self) -> None:
        self.rig.cache.ask_again()

    @rule()
    def a_flush_goes_on(self) -> None:
        self.rig.cache.flush()

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
                assert self.same(arena.target.page(entry.host), entry.key, "target")
                if entry.draft_on_host:
                    assert self.same(arena.draft.page(entry.host), entry.key, "draft")

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


class ChangingMachine(CacheMachine):
    """The same with storage that is taken away and changed for another."""

    def __init__(self) -> None:
        super().__init__()
        self.volumes = [self.volume, self.volume_in("other")]

    @rule()
    def storage_is_detached(self) -> None:
        self.attach(None)

    @rule(which=st.integers(0, 1))
    def storage_is_attached_or_changed(self, which: int) -> None:
        self.volume = self.volumes[which]
        self.attach(self.volume)

    def attach(self, volume: Any) -> None:
        """The jobs of the storage before have then been dropped; those of this one are in `jobs`."""
        before, self.jobs = self.jobs, []
        with self.workers():
            self.rig.attach(volume)
        assert before == []
        self.attached = volume is not None


@pytest.mark.parametrize("machine", [CacheMachine, ChangingMachine])
@pytest.mark.parametrize("device", DEVICES)
def test_storage_that_lies_costs_misses_and_nothing_else(
    tools: SimpleNamespace, device: str, machine: type[CacheMachine]
) -> None:
    machine = type(machine.__name__, (machine,), {"tools": tools, "device": device})
    wide = settings(max_examples=4 * settings().max_examples, stateful_step_count=50)
    run_state_machine_as_test(machine, settings=wide)  # type: ignore[no-untyped-call]


# ---- a rank that is behind


class LaggingRank:
    """Rank 1 in the same process: real pools, host pages and storage, which does what rank 0 says when it comes to it.

    Rank 0's target half is its own too; its draft half has other bytes, and another place in storage.
    """

    def __init__(self, tools: SimpleNamespace, backend: Any, target: PoolShape, **settings: Any) -> None:
        cpu, pages, host_pages = torch.device("cpu"), settings["device_pages"], settings["host_pages"]
        draft = tools.DRAFT_SHAPE if settings["draft"] else None
        apart = [half for half, shape in ((Half.TARGET, target), (Half.DRAFT, draft)) if shape]
        self._apart = [half for half in apart if half is Half.DRAFT or not target.geometry.shared]
        nbytes = shared_bytes([target], host_pages)
        self.memory = SharedMemory.create(nbytes) if nbytes else None
        self.target, self.draft = KVPool(target, pages, cpu), KVPool(draft, pages, cpu) if draft else None
        there = None if self.memory is None else SharedMemory(os.dup(self.memory.fd), owner=False)
        self.arena = HostArena.of(self.target, self.draft, host_pages, there)
        if there is not None:
            there.close()
        self._transfer = make_transfer(self.arena, self.target, self.draft)
        target_bytes = target.layout.page_bytes if Half.TARGET in self._apart else 0
        self._store = None
        if self._apart:
            self._store = PairStore(
                backend,
                tools.FINGERPRINT,
                SPACES[0] if target_bytes else None,
                SPACES[1] if draft else None,
                target_bytes,
                draft.layout.page_bytes if draft else 0,
                breaker=settings["breaker"],
            )
        self._io = StorageIO(self._store, self.arena, lambda: None) if self._store else None
        self.orders: list[Callable[[], None]] = []
        self._answers: list[tuple[Callable[[list[Any]], None], Any]] = []
        self._last = 0
        self._reads: dict[int, Any] = {}

    def work(self, count: int) -> None:
        """Does the next orders."""
        for _ in range(min(count, len(self.orders))):
            self.orders.pop(0)()

    # ---- what rank 0 sees

    def transfer(self, local: Any) -> Any:
        return SpreadTransfer(local, self, self._apart)  # type: ignore[arg-type]

    def storage(self, local: Any) -> Any:
        return SpreadStorage(local, self, self._apart)  # type: ignore[arg-type]

    def poll(self) -> bool:
        heard = bool(self._io and self._io.poll()) or bool(self._answers)
        while self._answers:
            then, answer = self._answers.pop(0)
            then([answer])
        return heard

    def ask(self, order: Callable[[int], Any], then: Callable[[list[Any]], None]) -> int:
        self._last += 1
        message = order(self._last)
        self.orders.append(lambda: self._do(message, lambda answer: self._answers.append((then, answer))))
        return self._last

    def tell(self, order: Any) -> None:
        self.orders.append(lambda: self._do(order, lambda answer: None))

    def _do(self, order: Any, answer: Callable[[Any], None]) -> None:
        match order:
            case Load(number, moves):
                self._transfer.load([Move(*move) for move in moves])
                answer(Moved(number))
            case Backup(number, moves):
                self._transfer.backup([Move(*move) for move in moves])
                answer(Moved(number))
            case Lookup(number, keys, parent):
                assert self._io
                names = [bytes.fromhex(key) for key in keys]
                self._io.lookup(names, bytes.fromhex(parent), lambda run: answer(Found(number, run.target, run.draft)))
            case Read(number, key, parent, host, draft):
                assert self._io
                page = bytes.fromhex(key), bytes.fromhex(parent)
                self._reads[number] = self._io.read(
                    *page, host, draft, lambda read: answer(WasRead(number, read.target, read.draft))
                )
            case Write(number, key, parent, host, draft, successors):
                assert self._io
                page = bytes.fromhex(key), bytes.fromhex(parent)
                self._io.write(
                    *page,
                    host,
                    draft,
                    successors,
                    lambda written: answer(WasWritten(number, written.target, written.draft)),
                )
            case Touch(number, key, parent, draft):
                assert self._io
                page = bytes.fromhex(key), bytes.fromhex(parent)
                self._io.touch(*page, draft, lambda outcome: answer(Touched(number, outcome)))
            case Cancel(number):
                self._reads[number].cancel()
            case Hurry():
                assert self._io
                self._io.hurry()
            case _:
                raise AssertionError(f"nobody asks this: {order}")


class RankedMachine(CacheMachine):
    """The same with a second rank, which is as far behind as the machine likes."""

    shared: bool
    other: LaggingRank

    def make_rig(self, **settings: Any) -> Any:
        tools, machine = self.tools, self
        geometry = KVGeometry.latent(2, 6, 2) if self.shared else KVGeometry.heads(2, 2, 4)
        target = PoolShape(geometry, tools.PAGE, "float32")
        self.other = other = LaggingRank(tools, target=target, **settings)

        class Rig(tools.Rig):  # type: ignore[misc,name-defined]
            def fill(self, page: int, key: bytes) -> None:
                super().fill(page, key)
                other.orders.append(lambda: machine.fill_there(page, key))

            def check_pages(self, visit: Any) -> None:
                super().check_pages(visit)
                pages = zip(visit.lease.chain.keys, visit.lease.pages, visit.lease.draft_absent, strict=False)
                seen = list(pages)[: visit.hit.tokens // tools.PAGE]
                other.orders.append(lambda: machine.check_there(seen))

        rig = Rig(target=target, ranks=other, **settings)
        if other.memory is not None:
            other.memory.close()
        return rig

    def fill_there(self, page: int, key: bytes) -> None:
        self.tools.put_page(self.other.target, page, key, "target")
        if self.other.draft is not None:
            self.tools.put_page(self.other.draft, page, key, "draft of rank 1")

    def check_there(self, pages: list[tuple[bytes, int, bool]]) -> None:
        """A request of the other rank sees its own pages."""
        for key, page, absent in pages:
            assert self.tools.page_is(self.other.target, page, key, "target")
            if self.other.draft is not None and not absent:
                assert self.tools.page_is(self.other.draft, page, key, "draft of rank 1")

    def finish_jobs(self) -> None:
        deadline = time.monotonic() + 20
        while self.other.orders or self.jobs or self.rig.cache.poll() or self.rig.cache.busy:
            self.other.work(len(self.other.orders))
            while self.jobs:
                self.jobs.pop(0)()
            assert time.monotonic() < deadline, "an operation never ends"

    @rule(numbers=st.lists(st.integers(0, 4), min_size=1, max_size=4))
    def serve_in_a_hurry(self, numbers: list[int]) -> None:
        """Whole requests, of which the other rank has done nothing yet when they have ended here."""
        for number in numbers:
            visit = self.rig.enter(self.tools.numbered_prompt(number))
            if self.rig.admit(visit) is None:
                self.rig.cache.end_prefetch(visit.prefetch)
                continue
            self.rig.compute(visit)
            self.rig.release(visit)
            self.rig.cache.poll()

    @rule(count=st.integers(1, 6))
    def the_other_rank_works(self, count: int) -> None:
        self.other.work(count)

    @invariant()
    def what_the_host_holds_of_it_is_its_own(self) -> None:
        for entry in self.rig.cache.index.entries():
            if entry.host is not None:
                assert self.same(self.other.arena.target.page(entry.host), entry.key, "target")
                if entry.draft_on_host:
                    assert self.same(self.other.arena.draft.page(entry.host), entry.key, "draft of rank 1")


@pytest.mark.parametrize("shared", [True, False], ids=["latents", "heads"])
def test_a_rank_that_is_behind_never_sees_another_page(tools: SimpleNamespace, shared: bool) -> None:
    """Neither one that rank 0 has not filled yet, nor one that it has filled anew."""
    machine = type("RankedMachine", (RankedMachine,), {"tools": tools, "device": "cpu", "shared": shared})
    wide = settings(max_examples=2 * settings().max_examples, stateful_step_count=50)
    run_state_machine_as_test(machine, settings=wide)  # type: ignore[no-untyped-call]
