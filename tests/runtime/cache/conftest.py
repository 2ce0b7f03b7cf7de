"""Tests of the paired cache: keys, index, policies, and the way of pages through device, host and storage.

In: token lists, and in the place of a model a rule that says what a page's bytes must be. Real pools, a real file
backend, real threads unless a test wants to choose their order. Out: models and the engine's loop (engine/), the
storage tier by itself (storage/).
"""

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry

from speccache_api.drafts import DRAFTS, Draft
from speccache_api.geometry import KVGeometry
from speccache_runtime.cache.keys import KeyChain
from speccache_runtime.cache.lease import Hit, Lease
from speccache_runtime.cache.paired import PairedCache
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.cache.pool import KVPool, PoolShape
from speccache_runtime.cache.ranks import OtherRanks
from speccache_runtime.cache.storage.base import Backend, ObjectName, Read
from speccache_runtime.cache.storage.breaker import BreakerSettings
from speccache_runtime.cache.storage.capacity.keeper import Keeper
from speccache_runtime.cache.storage.codec import Bytes, Half
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.cache.storage.store import PairStore
from speccache_runtime.cache.storage_metrics import StorageMetrics
from speccache_runtime.cache.storing import Flush
from speccache_runtime.core import Tier
from speccache_runtime.metrics import Metrics

PAGE = 4
PATIENCE_S = 20.0
FINGERPRINT = hashlib.sha256(b"model").hexdigest()
TARGET_SPACE = hashlib.sha256(b"target").digest()
DRAFT_SPACE = hashlib.sha256(b"draft").digest()
TARGET_SHAPE = PoolShape(KVGeometry.heads(2, 2, 4), PAGE, "float32")
DRAFT_SHAPE = PoolShape(KVGeometry.heads(1, 1, 6), PAGE, "float32")


@functools.cache
def content(key: bytes, half: str, nbytes: int) -> torch.Tensor:
    """What the page `key` holds in this half, in a world where KV is a function of the prefix."""
    return torch.frombuffer(bytearray(hashlib.shake_128(key + half.encode()).digest(nbytes)), dtype=torch.uint8)


def put_page(pool: KVPool, page: int, key: bytes, half: str) -> None:
    """Does what a model does to a page, in the order of the pool's layout."""
    data = content(key, half, pool.layout.page_bytes)
    for view, buffer, at in zip(pool.page_bytes(), pool.layout.buffers, pool.layout.offsets, strict=True):
        view[page] = data[at : at + buffer.page_bytes].to(view.device)


def page_is(pool: KVPool, page: int, key: bytes, half: str) -> bool:
    """Whether every slot of the page holds what it must."""
    found = torch.cat([view[page].cpu() for view in pool.page_bytes()])
    return torch.equal(found, content(key, half, pool.layout.page_bytes))


class Volume:
    """A real directory behind a switchboard: calls can be held, refused, or counted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = FileBackend(root)
        self.gates: dict[str, threading.Event] = {}
        self.broken: set[str] = set()
        self.error: Exception = RuntimeError("not set")
        self.calls: list[tuple[str, Half, str]] = []

    def _pass(self, operation: str, name: ObjectName) -> None:
        self.calls.append((operation, name.half, name.key))
        gate = self.gates.get(operation)
        if gate is not None:
            assert gate.wait(PATIENCE_S), "the test never let this call go on"
        if operation in self.broken:
            raise self.error

    def probe(self) -> None:
        self.files.probe()

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        for name in names[:1]:
            self._pass("exists", name)
        return self.files.exists(names)

    def read(self, name: ObjectName, header: bytearray, payload: memoryview) -> Read:
        self._pass("read", name)
        return self.files.read(name, header, payload)

    def write(self, name: ObjectName, header: bytes, payload: Bytes) -> bool:
        self._pass("write", name)
        return self.files.write(name, header, payload)

    def delete(self, names: Sequence[ObjectName]) -> None:
        for name in names:
            self._pass("delete", name)
        self.files.delete(names)

    def touch(self, name: ObjectName) -> bool:
        self._pass("touch", name)
        return self.files.touch(name)

    def now(self) -> float:
        return self.files.now()

    def close(self) -> None:
        self.files.close()

    def path(self, key: bytes, half: Half) -> Path:
        """Of the object of that key, whatever its parent; one that does not exist if there is none."""
        space = TARGET_SPACE if half is Half.TARGET else DRAFT_SPACE
        path = self.root / ObjectName(FINGERPRINT, half, space.hex(), key.hex(), "0" * 16).path
        return next(path.parent.glob(f"{key.hex()}-*"), path)

    def has(self, key: bytes, half: Half) -> bool:
        return self.path(key, half).is_file()


def numbered_prompt(number: int) -> list[int]:
    """Three whole pages and a bit, which no other number shares."""
    return [number, *range(3 * PAGE)]


def damage(path: Path, how: str) -> None:
    """Deletes the object, cuts it, or flips one bit of its payload or header."""
    data = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
        return
    if how == "truncated":
        data = data[:-1]
    else:
        data[{"header bit": 50, "payload bit": 4096 + (len(data) - 4096) // 2}[how]] ^= 0x10
    path.write_bytes(data)


@dataclass
class Visit:
    """One request's way through a cache: what it was given, and what it still holds."""

    tokens: list[int]
    lease: Lease
    prefetch: object = None
    hit: Hit | None = None
    extra: dict[str, object] = field(default_factory=dict)


class Rig:
    """A PairedCache whose "model" fills pages with `content`, and which checks every page it is given.

    `run` is a request that ends at once; the smaller verbs leave one open.
    """

    def __init__(
        self,
        *,
        device_pages: int = 32,
        host_pages: int = 32,
        answer: MissingDraft = MissingDraft.RECOMPUTE,
        backend: Backend | None = None,
        draft: bool = True,
        facts: Draft = DRAFTS["EAGLE3"],
        device: str = "cpu",
        breaker: BreakerSettings | None = None,
        target: PoolShape = TARGET_SHAPE,
        ranks: OtherRanks | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.target = KVPool(target, device_pages, torch.device(device))
        self.draft = KVPool(DRAFT_SHAPE, device_pages, torch.device(device)) if draft else None
        self.cache = PairedCache(self.target, host_pages=host_pages, answer=answer, metrics=self.metrics)
        if self.draft is not None:
            self.cache.register_draft(self.draft, facts)
        self.rebuilds = facts.rebuilds
        self.woken = threading.Event()
        self.breaker, self.keeper = breaker, keeper
        self.cache.open(self.store(backend), self.woken.set, ranks)
        self.closed = False

    def store(self, backend: Backend | None) -> PairStore | None:
        """This rig's pages on a backend."""
        if backend is None:
            return None
        return PairStore(
            backend,
            FINGERPRINT,
            TARGET_SPACE,
            DRAFT_SPACE if self.draft is not None else None,
            self.target.layout.page_bytes,
            DRAFT_SHAPE.layout.page_bytes if self.draft is not None else 0,
            StorageMetrics(self.metrics),
            breaker=self.breaker,
            keeper=self.keeper,
        )

    def attach(self, backend: Backend | None) -> None:
        """Puts storage on another backend in the place of what there is."""
        self.cache.attach(self.store(backend))

    def flush(self) -> Flush:
        """A whole flush; how far it is in the end, which is as far as it gets if nothing fails."""
        self.cache.ask_again()
        self.until(lambda: self.cache.flush().done)
        done = self.cache.flush()
        assert done is not None
        return done

    # ---- the way of one request

    def enter(self, tokens: Sequence[int]) -> Visit:
        lease = Lease(PAGE)
        return Visit(list(tokens), lease, self.cache.prefetch(lease, tokens))

    def wait_prefetch(self, visit: Visit) -> None:
        self.until(lambda: not self.cache.prefetch_pending(visit.prefetch))

    def admit(self, visit: Visit) -> Hit | None:
        """Admits, and checks the bytes of every page that came, in both pools."""
        visit.hit = self.cache.admit(visit.lease, visit.tokens, visit.prefetch)
        if visit.hit is not None:
            self.cache.end_prefetch(visit.prefetch)
            self.check_pages(visit)
        return visit.hit

    def check_pages(self, visit: Visit) -> None:
        assert visit.hit is not None
        lease = visit.lease
        assert visit.hit.tokens == sum(visit.hit.by_tier.values())
        absent = lease.draft_absent
        if self.rebuilds:
            assert not any(absent), "what is made anew is not masked"
            absent = [e is not None and self.draft is not None and not e.draft_on_device for e in lease.entries]
        assert visit.hit.draft_absent == sum(absent) * PAGE
        self.cache.loads.wait_draft(lease.loads)
        for page in range(visit.hit.tokens // PAGE):
            key = lease.chain.keys[page]
            assert page_is(self.target, lease.pages[page], key, "target"), f"target page {page} is not its own"
            if self.draft is not None and not absent[page]:
                assert page_is(self.draft, lease.pages[page], key, "draft"), f"draft page {page} is not its own"

    def compute(self, visit: Visit, upto: int | None = None) -> bool:
        """Computes tokens [hit, upto) (default: all), publishes what is final. False if there is no room."""
        assert visit.hit is not None
        upto = len(visit.tokens) if upto is None else upto
        if not self.cache.grow(visit.lease, upto):
            return False
        keys = KeyChain(PAGE)
        keys.extend(visit.tokens, upto // PAGE)
        for layer in range(self.target.shape.geometry.layers):
            self.cache.loads.wait_target_layer(visit.lease.loads, layer)
        self.cache.loads.wait_draft(visit.lease.loads)
        for page in range(visit.hit.tokens // PAGE, upto // PAGE):
            if visit.lease.entries[page] is None:
                self.fill(visit.lease.pages[page], keys.keys[page])
        self.cache.publish([(visit.lease, visit.tokens, upto, upto)])
        return True

    def fill(self, page: int, key: bytes) -> None:
        """Computes a device page."""
        put_page(self.target, page, key, "target")
        if self.draft is not None:
            put_page(self.draft, page, key, "draft")

    def release(self, visit: Visit) -> None:
        self.cache.release(visit.lease)

    def run(self, tokens: Sequence[int]) -> Hit:
        """A whole request alone: hit checked, the rest computed, all published, all given back."""
        visit = self.enter(tokens)
        self.wait_prefetch(visit)
        hit = self.admit(visit)
        assert hit is not None
        assert self.compute(visit)
        self.release(visit)
        return hit

    # ---- waiting and ends

    def until(self, condition: Callable[[], bool]) -> None:
        """Polls the cache whenever it says that something has happened, until `condition` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.woken.clear()
            self.cache.poll()
            if condition():
                return
            assert time.monotonic() < deadline, "nothing more happens"
            self.woken.wait(0.05)

    def settle(self) -> None:
        """Waits for all jobs and storage operations."""
        self.until(lambda: not self.cache.busy)

    def drain(self) -> None:
        """Stores what storage lacks, and counts pages and pins."""
        self.settle()
        self.check_idle()
        self.cache.store_all()
        self.settle()
        self.check_idle()

    def close(self) -> None:
        """Ends the cache after a drain; once."""
        if not self.closed:
            self.drain()
            self.cache.close()
            self.closed = True

    def check_idle(self) -> None:
        """Nobody is running: every page is counted once and nobody pins any."""
        self.cache.check_integrity()
        for entry in self.cache.index.entries():
            assert entry.device_pins == 0, "a device page is pinned by nobody"
            assert entry.host_pins == 0, "a host page is pinned by nobody"

    def value(self, name: str, **labels: str) -> float:
        """A counter's value, 0 if it was never touched."""
        found = getattr(self.metrics, name)
        return float((found.labels(**labels) if labels else found)._value.get())

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        chain = KeyChain(PAGE)
        chain.extend(tokens, len(tokens) // PAGE)
        return chain.keys


def cached(hit: Hit | None) -> dict[str, int]:
    """Cached pages by tier, without the tiers that gave none."""
    assert hit is not None
    return {tier.value: hit.by_tier[tier] // PAGE for tier in Tier if hit.by_tier.get(tier)}


class HandWorkers:
    """In place of the storage threads: jobs wait until the test runs them, in the order it wants.

    Make it a class of its own for each cache (`type`), so that readers and writers of one cache share one queue.
    """

    queue: list[Callable[[], bool]]

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, job: Callable[[], bool]) -> None:
        self.queue.append(job)

    def close(self) -> list[Callable[[], bool]]:
        left = list(self.queue)
        self.queue.clear()
        return left

    @property
    def idle(self) -> bool:
        return not self.queue


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    volume = Volume(tmp_path)
    volume.probe()
    return volume


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs; at the end of the test each must be able to drain, with every page counted once."""
    made: list[Rig] = []

    def make(**settings: object) -> Rig:
        made.append(Rig(**settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    """The helpers of this file: test modules cannot import a conftest by name."""
    return SimpleNamespace(
        PAGE=PAGE,
        PAIR_BYTES=TARGET_SHAPE.layout.page_bytes + DRAFT_SHAPE.layout.page_bytes,
        Rig=Rig,
        Volume=Volume,
        HandWorkers=HandWorkers,
        cached=cached,
        content=content,
        damage=damage,
        numbered_prompt=numbered_prompt,
        page_is=page_is,
        put_page=put_page,
        FINGERPRINT=FINGERPRINT,
        TARGET_SPACE=TARGET_SPACE,
        DRAFT_SPACE=DRAFT_SPACE,
        DRAFT_SHAPE=DRAFT_SHAPE,
    )
