"""A backend that lies in every way its interface allows. PairStore never says HIT for bytes not the page's own.

A state machine drives two stores (same target, different drafts) over one such backend and compares every buffer that
is said to be present with the one content the page's half can have.
"""

import enum
import random
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from speccache_runtime.cache.storage.base import BackendError, ObjectName, Read
from speccache_runtime.cache.storage.breaker import BreakerSettings
from speccache_runtime.cache.storage.codec import HEADER_SIZE, Bytes
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairStore, Run

FINGERPRINT = "99" * 32
ROOT = bytes(32)
TARGET_SPACE = b"\x11" * 32
DRAFT_SPACES = (b"\x22" * 32, b"\x33" * 32)
# Equal sizes, or an object of the other half would give itself away by its length alone.
NBYTES = 700
KEYS = [bytes([number]) * 32 for number in range(3)]
BACKOFF_S = 1.0


class Lie(enum.Enum):
    """What to do instead of the right thing; each applies to the operations that it makes sense for."""

    NONE = enum.auto()
    RAISE = enum.auto()
    OTHER_OBJECT = enum.auto()  # read: any object there is, under this name
    OTHER_PAYLOAD = enum.auto()  # read: the right header, another object's payload
    OTHER_HEADER = enum.auto()  # read: the right payload, another object's header
    FLIP = enum.auto()  # read and write: one byte differs
    CUT = enum.auto()  # write: the end is lost; read: says HIT, fills the beginning only
    UNTOUCHED = enum.auto()  # read: says HIT, fills nothing; write: says done, keeps nothing
    WRONG_LENGTH = enum.auto()
    MISSING = enum.auto()  # read and exists: denies everything; write: replaces what is there
    PRETEND = enum.auto()  # exists: affirms everything; write: says that the object is there already
    OTHER_NAME = enum.auto()  # write: stores under another name


class LyingBackend:
    """Objects in memory, and a lie for the next operations."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lie = Lie.NONE
        self.chance = random.Random(0)

    def probe(self) -> None:
        return

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self._maybe_raise()
        if self.lie in (Lie.MISSING, Lie.PRETEND):
            return [self.lie is Lie.PRETEND] * len(names)
        return [name.path in self.objects for name in names]

    def read(self, name: ObjectName, header: bytearray, payload: memoryview) -> Read:
        self._maybe_raise()
        if self.lie is Lie.WRONG_LENGTH:
            return Read(Outcome.CORRUPT)
        content = self.objects.get(name.path)
        if self.lie is Lie.MISSING or (content is None and self.lie is not Lie.OTHER_OBJECT) or not self.objects:
            return Read(Outcome.MISS)
        content = self._twist(content or b"")
        if self.lie not in (Lie.CUT, Lie.UNTOUCHED) and len(content) != len(header) + len(payload):
            return Read(Outcome.CORRUPT)
        front, rest = content[:HEADER_SIZE], content[HEADER_SIZE:]
        header[: len(front)] = front
        payload[: len(rest)] = rest
        return Read(Outcome.HIT, 1.0)

    def write(self, name: ObjectName, header: bytes, payload: Bytes) -> bool:
        self._maybe_raise()
        content = header + bytes(payload)
        if self.lie in (Lie.UNTOUCHED, Lie.PRETEND):
            return self.lie is Lie.UNTOUCHED
        if self.lie is Lie.OTHER_NAME and self.objects:
            self.objects[self.chance.choice(sorted(self.objects))] = content
            return True
        if name.path in self.objects and self.lie is not Lie.MISSING:
            return False
        self.objects[name.path] = self._twist(content) if self.lie in (Lie.CUT, Lie.FLIP) else content
        return True

    def delete(self, names: Sequence[ObjectName]) -> None:
        self._maybe_raise()
        for name in names:
            self.objects.pop(name.path, None)

    def now(self) -> float:
        return 1.0

    def close(self) -> None:
        return

    def _maybe_raise(self) -> None:
        if self.lie is Lie.RAISE:
            raise BackendError("EIO", "cannot: EIO")

    def _twist(self, content: bytes) -> bytes:
        other = self.objects[self.chance.choice(sorted(self.objects))] if self.objects else content
        match self.lie:
            case Lie.OTHER_OBJECT:
                return other
            case Lie.OTHER_PAYLOAD:
                return content[:HEADER_SIZE] + other[HEADER_SIZE:]
            case Lie.OTHER_HEADER:
                return other[:HEADER_SIZE] + content[HEADER_SIZE:]
            case Lie.FLIP:
                position = self.chance.randrange(len(content)) if content else 0
                return content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :]
            case Lie.CUT:
                return content[: self.chance.randrange(len(content))] if content else b""
            case Lie.UNTOUCHED:
                return b""
        return content


def body(space: bytes, key: bytes) -> bytes:
    """The one content that this page has in this namespace."""
    return random.Random(space + key).randbytes(NBYTES)


class LyingStorage(RuleBasedStateMachine):
    """Buffers are kept from read to read, so stale bytes of other pages and of the same page are always in them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.backend = LyingBackend()
        self.target_into, self.draft_into = bytearray(NBYTES), bytearray(NBYTES)
        calm = BreakerSettings(threshold=4, backoff_s=BACKOFF_S, cap_s=BACKOFF_S)
        self.stores = [
            PairStore(
                self.backend, FINGERPRINT, TARGET_SPACE, space, NBYTES, NBYTES, clock=lambda: self.now, breaker=calm
            )
            for space in DRAFT_SPACES
        ]

    @rule(lie=st.sampled_from(Lie), seed=st.integers(0, 2**16), which=st.integers(0, 1), key=st.sampled_from(KEYS))
    def read(self, lie: Lie, seed: int, which: int, key: bytes) -> None:
        self.backend.lie, self.backend.chance = lie, random.Random(seed)
        before = dict(self.backend.objects)
        views = memoryview(self.target_into), memoryview(self.draft_into)
        result = self.stores[which].read_pair(key, ROOT, *views)
        if result.target is Outcome.HIT:
            assert self.target_into == body(TARGET_SPACE, key)
        else:
            assert result.draft is Outcome.NOT_ASKED
        if result.draft is Outcome.HIT:
            assert self.draft_into == body(DRAFT_SPACES[which], key)
            assert result.successors == (key[0],)
        else:
            assert result.successors == ()
        if lie is Lie.RAISE:
            assert result.target in (Outcome.ERROR, Outcome.DROPPED)
            assert self.backend.objects == before

    @rule(lie=st.sampled_from(Lie), seed=st.integers(0, 2**16), which=st.integers(0, 1), key=st.sampled_from(KEYS))
    def write(self, lie: Lie, seed: int, which: int, key: bytes) -> None:
        self.backend.lie, self.backend.chance = lie, random.Random(seed)
        halves = body(TARGET_SPACE, key), body(DRAFT_SPACES[which], key)
        result = self.stores[which].write_pair(key, ROOT, halves[0], halves[1] if seed % 4 else None, (key[0],))
        assert (result.draft is Outcome.NOT_ASKED) == (seed % 4 == 0)
        if lie is Lie.RAISE:
            assert {result.target, result.draft} <= {Outcome.NOT_ASKED, Outcome.DROPPED, Outcome.ERROR}

    @rule(lie=st.sampled_from(Lie), which=st.integers(0, 1))
    def lookup(self, lie: Lie, which: int) -> None:
        self.backend.lie = lie
        run = self.stores[which].lookup(KEYS, ROOT)
        assert 0 <= run.draft <= run.target <= len(KEYS)
        if lie is Lie.PRETEND and run.target:
            assert run == Run(len(KEYS), len(KEYS))

    @rule(seconds=st.sampled_from([0.1, BACKOFF_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(which=st.integers(0, 1), key=st.sampled_from(KEYS))
    def honest_storage_heals(self, which: int, key: bytes) -> None:
        """After whatever lies: once storage is honest, a page is readable after at most one read, write and read."""
        self.backend.lie = Lie.NONE
        self.now += BACKOFF_S
        store = self.stores[which]
        views = memoryview(self.target_into), memoryview(self.draft_into)
        for _ in range(3):  # an old corrupt target hides an old corrupt draft, so each may take its own round
            store.read_pair(key, ROOT, *views)
            store.write_pair(key, ROOT, body(TARGET_SPACE, key), body(DRAFT_SPACES[which], key), (key[0],))
        result = store.read_pair(key, ROOT, *views)
        assert (result.target, result.draft) == (Outcome.HIT, Outcome.HIT)
        assert self.target_into == body(TARGET_SPACE, key)
        assert self.draft_into == body(DRAFT_SPACES[which], key)

    @invariant()
    def buffers_keep_their_size(self) -> None:
        assert len(self.target_into) == len(self.draft_into) == NBYTES


LyingStorage.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLyingStorage = LyingStorage.TestCase
