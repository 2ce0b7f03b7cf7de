"""What a storage tier must be able to do: keep whole objects under opaque names.

A backend knows nothing of pages, halves that belong together, or checksums: `store.PairStore` gives it a header and a
payload and checks what comes back. That keeps a new kind of storage (a bucket, say) to one file and six methods.
"""

from __future__ import annotations

import enum
import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from speccache_api.fingerprint import LAYOUT_VERSION
from speccache_runtime.cache.storage.codec import Bytes, Half
from speccache_runtime.errors import StorageError

LAYOUT = f"v{LAYOUT_VERSION}"
"""First part of every object's path. The next layout takes another one, so that old pods keep theirs."""

_DIGEST_HEX = re.compile(r"[0-9a-f]{64}")
_HALF_PART = {Half.TARGET: "t", Half.DRAFT: "d"}


class BackendError(StorageError):
    """An operation failed for a reason other than "no such object".

    `code` is short and from a small set, fit for a metric label: an errno name such as ENOSPC for file volumes.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    @classmethod
    def from_os_error(cls, error: OSError, doing: str) -> BackendError:
        """Map an OSError; `doing` is a verb phrase with the path, e.g. "write /x/y"."""
        code = errno.errorcode.get(error.errno or 0, "EUNKNOWN")
        return cls(code, f"cannot {doing}: {code}: {error.strerror or error}")


class ReadStatus(enum.StrEnum):
    """What `Backend.read` found."""

    FOUND = "found"
    """Header and payload buffers are filled to the last byte, and the object has no more bytes than that."""
    MISSING = "missing"
    WRONG_LENGTH = "wrong_length"
    """The object is shorter or longer than both buffers together; their content is undefined."""


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Where an object lies. Both strings are 64 lower-case hex digits of digests that we computed ourselves.

    Anything else raises ValueError, so text from a client can never become a path.
    """

    namespace: str
    half: Half
    key: str

    def __post_init__(self) -> None:
        if not (_DIGEST_HEX.fullmatch(self.namespace) and _DIGEST_HEX.fullmatch(self.key)):
            raise ValueError(f"object names are made of SHA-256 digests in hex, not {self.namespace!r}, {self.key!r}")

    @property
    def directory(self) -> tuple[str, ...]:
        """Path parts above the object: layout, namespace, half, first two digits of the key (at most 256 folders)."""
        return (LAYOUT, self.namespace, _HALF_PART[self.half], self.key[:2])

    @property
    def path(self) -> str:
        """The parts joined by slashes: a path under a directory, or a bucket key."""
        return "/".join((*self.directory, self.key))


class Backend(Protocol):
    """Keeps objects. All methods may be called from several threads at once and block until done.

    Every method but `probe` and `close` raises BackendError, and nothing else, when storage fails. No method retries:
    the caller's breaker decides when to try again.
    """

    def probe(self) -> None:
        """Call once before use: list, write, read back and delete something, and clear leftovers of dead writers.

        Raises StorageError in one line that names the place and the remedy; it is a BackendError with a `code` where
        the system gave one, so that the caller can tell a full place (still readable) from an unusable one.
        """

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        """Say for each name whether a whole object is there now; nothing about its content."""

    def read(self, name: ObjectName, header: bytearray, payload: memoryview) -> ReadStatus:
        """Fill `header`, then `payload`, with the object, never resizing them; unless FOUND they are undefined."""

    def write(self, name: ObjectName, header: bytes, payload: Bytes) -> None:
        """Store header + payload. The object becomes visible whole or not at all, and replaces an older one.

        `payload` must not change during the call. Durable against the end of this process, not against power loss: a
        lost page is a miss, and a torn one is found by its checksum.
        """

    def delete(self, name: ObjectName) -> None:
        """Remove the object; a missing one is fine."""

    def close(self) -> None:
        """Release what `probe` or use has opened. No other method may be called afterwards."""
