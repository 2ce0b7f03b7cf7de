"""What a storage tier must be able to do: keep whole objects under opaque names.

    <layout>/<fingerprint>/t/<namespace>/<kk>/<key>-<parent>      target halves
    <layout>/<fingerprint>/d/<namespace>/<kk>/<key>-<parent>      draft halves
    <layout>/<fingerprint>/n/<kind>/<id>                          notes of the pods to each other

A backend knows nothing of pages, halves that belong together, or checksums: `store.PairStore` gives it a header and a
payload and checks what comes back. That keeps a new kind of storage (another vendor's bucket, say) to one file.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from speccache_api.fingerprint import LAYOUT_VERSION
from speccache_runtime.cache.storage.codec import Bytes, Half
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.errors import StorageError

LAYOUT = f"v{LAYOUT_VERSION}"
"""First part of every object's path. The next layout takes another one, so that old pods keep theirs."""

PARENT_DIGITS = 16
"""How much of the parent's key an object's name carries: enough to find it among the others."""

NOTE_BYTES = 65536
"""The longest note."""

_DIGEST = "[0-9a-f]{64}"
_DIGEST_HEX = re.compile(_DIGEST)
_PARTS = {Half.TARGET: "t", Half.DRAFT: "d"}
_HALVES = {part: half for half, part in _PARTS.items()}
_OBJECT_PATH = re.compile(rf"{LAYOUT}/({_DIGEST})/([td])/({_DIGEST})/([0-9a-f]{{2}})/({_DIGEST})-([0-9a-f]{{16}})")
_PARENT = re.compile(f"[0-9a-f]{{{PARENT_DIGITS}}}")
_NOTE_KIND = re.compile("[a-z]{1,16}")
_NOTE_ID = re.compile("[0-9a-f]{1,64}")


class BackendError(StorageError):
    """An operation failed for a reason other than "no such object".

    `code` is short and from a small set, fit for a metric label: an errno name such as ENOSPC for file volumes, a word
    such as AccessDenied for buckets.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    @classmethod
    def from_os_error(cls, error: OSError, doing: str) -> BackendError:
        """Map an OSError; `doing` is a verb phrase with the path, e.g. "write /x/y"."""
        code = errno.errorcode.get(error.errno or 0, "EUNKNOWN")
        return cls(code, f"cannot {doing}: {code}: {error.strerror or error}")


def check_digest(text: str) -> str:
    """`text`, if it is a SHA-256 digest in 64 lower-case hex digits; else ValueError.

    Every name in storage is made of such digests and of numbers, so text from a client can never become a path.
    """
    if not _DIGEST_HEX.fullmatch(text):
        raise ValueError(f"names in storage are made of SHA-256 digests in hex, not {text!r}")
    return text


def parent_digits(key: bytes) -> str:
    """What the name of an object says of its parent, whose key this is."""
    return key.hex()[:PARENT_DIGITS]


def fingerprint_path(fingerprint: str) -> str:
    """Where all lies that is kept under a fingerprint, without a slash at the end."""
    return f"{LAYOUT}/{check_digest(fingerprint)}"


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Where an object lies. Raises ValueError unless made of digests."""

    fingerprint: str
    """Of model, number format and page size: all that belongs to one kind of page lies below it."""
    half: Half
    namespace: str
    """Of this half: which draft, which shard."""
    key: str
    parent: str
    """The first PARENT_DIGITS digits of the key of the page before, so that a listing tells children from parents."""

    def __post_init__(self) -> None:
        for digest in (self.fingerprint, self.namespace, self.key):
            check_digest(digest)
        if not _PARENT.fullmatch(self.parent):
            raise ValueError(f"a parent is named by {PARENT_DIGITS} digits of its digest, not {self.parent!r}")

    @property
    def directory(self) -> tuple[str, ...]:
        """Path parts above the object. The last is the key's first two digits: at most 256 folders a namespace."""
        return (LAYOUT, self.fingerprint, _PARTS[self.half], self.namespace, self.key[:2])

    @property
    def path(self) -> str:
        """The parts joined by slashes: a path under a directory, or a bucket key."""
        return "/".join((*self.directory, f"{self.key}-{self.parent}"))

    @classmethod
    def parse(cls, path: str) -> ObjectName | None:
        """The name whose `path` this is; None for any other text."""
        found = _OBJECT_PATH.fullmatch(path)
        if found is None or not found[5].startswith(found[4]):
            return None
        return cls(found[1], _HALVES[found[2]], found[3], found[5], found[6])


@dataclass(frozen=True, slots=True)
class NoteName:
    """Where a note lies: a small object by which pods tell each other something. ValueError unless `kind` is 1 to 16
    lower-case letters and `id` 1 to 64 hex digits."""

    fingerprint: str
    kind: str
    id: str

    def __post_init__(self) -> None:
        check_digest(self.fingerprint)
        if not (_NOTE_KIND.fullmatch(self.kind) and _NOTE_ID.fullmatch(self.id)):
            raise ValueError(f"a note is named by letters and hex digits, not {self.kind!r}, {self.id!r}")

    @property
    def directory(self) -> tuple[str, ...]:
        """Path parts above the note."""
        return (LAYOUT, self.fingerprint, "n", self.kind)

    @property
    def path(self) -> str:
        """The parts joined by slashes."""
        return "/".join((*self.directory, self.id))


@dataclass(frozen=True, slots=True)
class Read:
    """What `Backend.read` found: HIT, MISS, or CORRUPT for an object that is not as long as both buffers together.

    `used_at` is when the object was last written or touched, in seconds since the epoch by the store's clock; 0.0
    unless HIT.
    """

    outcome: Outcome
    used_at: float = 0.0


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a listing. `nbytes` is its whole size, header included; `used_at` as in `Read`."""

    name: ObjectName
    nbytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class Note:
    """A note's content, and when it was last written, in seconds since the epoch by the store's clock."""

    body: bytes
    changed_at: float


class Backend(Protocol):
    """Keeps objects. All methods may be called from several threads at once and block until done.

    Every method but `close` raises BackendError, and nothing else, when storage fails. No method tries for longer than
    its own time limits: the caller's breaker decides when to try again.
    """

    def probe(self) -> None:
        """Call once before use: list, write, read back and delete something, and clear leftovers of dead writers.

        Raises BackendError in one line that names the place, what is wrong and the remedy; its `code` tells a full
        place (still readable) from an unusable one.
        """

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        """Say for each name whether a whole object is there now; nothing about its content. Costs about one round trip,
        however many names (16 at most) there are."""

    def read(self, name: ObjectName, header: bytearray, payload: memoryview) -> Read:
        """Fill `header`, then `payload`, with the object, never resizing them; unless HIT they are undefined."""

    def write(self, name: ObjectName, header: bytes, payload: Bytes) -> bool:
        """Store header + payload unless an object is there; False when there is. Visible whole or not at all.

        `payload` must not change during the call. Of two writers of one name at the same time both may be told True:
        objects of one name are equal. Durable against the end of this process, not against power loss: a lost page is a
        miss, and a torn one is found by its checksum.
        """

    def touch(self, name: ObjectName) -> bool:
        """Mark the object as used now; False when there is none. Its content stays as it is."""

    def delete(self, names: Sequence[ObjectName]) -> None:
        """Remove objects; missing ones are fine."""

    def objects(self, fingerprint: str) -> Iterator[StoredObject]:
        """All objects under the fingerprint, in no order. Other things that lie there are left out."""

    def create_note(self, name: NoteName, body: bytes) -> bool:
        """Make a note of at most NOTE_BYTES unless there is one; False when there is. Of several callers at the same
        time exactly one is told True."""

    def write_note(self, name: NoteName, body: bytes) -> None:
        """Make or replace a note of at most NOTE_BYTES."""

    def read_note(self, name: NoteName) -> Note | None:
        """The note, None when there is none."""

    def list_notes(self, fingerprint: str, kind: str) -> Sequence[NoteName]:
        """The notes of a kind, sorted by id."""

    def delete_note(self, name: NoteName) -> None:
        """Remove a note; a missing one is fine."""

    def now(self) -> float:
        """The store's clock, in seconds since the epoch, as far as it is known without asking: right within seconds
        after `probe`."""

    def close(self) -> None:
        """Release what `probe` or use has opened. No other method may be called afterwards."""
