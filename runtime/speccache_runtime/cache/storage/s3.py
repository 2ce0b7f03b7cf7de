"""Objects in a bucket of an S3 server.

    <prefix>/<path of the object or note, see base.py>
    <prefix>/v2/tmp/probe-<random>                         objects by which a bucket is tried, gone afterwards

An object is visible when its put has ended, and whole; two writers of one name are told apart by the server, which puts
an object only where none is (If-None-Match). So nothing is asked before a write, and nothing must be cleared away after
a writer that died.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from speccache_api import names as api_names
from speccache_runtime.cache.storage.base import (
    LAYOUT,
    BackendError,
    Note,
    NoteName,
    ObjectName,
    Read,
    StoredObject,
    fingerprint_path,
)
from speccache_runtime.cache.storage.codec import Bytes
from speccache_runtime.cache.storage.s3_bucket import DELETED_AT_ONCE, Bucket
from speccache_runtime.cache.storage.s3_client import Link
from speccache_runtime.cache.storage.s3_errors import explain_code

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

    from speccache_api.storage_target import BucketTarget

logger = logging.getLogger(__name__)

LEFTOVER_AGE_S = 3600.0
"""Age at which an object of somebody's probe counts as left behind."""

BUCKET_CHECK_S = 10.0
"""How often a batch of names that are all missing is taken for a reason to ask whether the bucket is there."""

_AT_ONCE = 16
_PROBE = re.compile(r"probe-[0-9a-f]{32}")


class S3Backend:
    """A `Backend` on a bucket. Requests of all threads share the connections of one client."""

    def __init__(
        self,
        target: BucketTarget,
        credentials: Path = Path(api_names.S3_CREDENTIALS_PATH),
        ca_bundle: Path = Path(api_names.S3_CA_BUNDLE_PATH) / api_names.CA_BUNDLE_KEY,
    ) -> None:
        """`credentials` is the folder, `ca_bundle` the file, that `target` says are mounted. Connects nowhere yet."""
        self._root = f"{target.prefix}/" if target.prefix else ""
        self._link = Link(target, credentials, ca_bundle)
        self._bucket = Bucket(target, self._link)
        self._lookers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="s3-exists")
        self._doubt_bucket_at = 0.0

    def probe(self) -> None:
        """See `Backend.probe`. Also tries that the server refuses to put an object where one is."""
        folder = f"{self._root}{LAYOUT}/tmp/"
        listed = next(self._bucket.pages(folder))
        self._sweep(listed, folder)
        key, wrote = f"{folder}probe-{secrets.token_hex(16)}", secrets.token_bytes(1024)
        try:
            self._round_trip(key, wrote)
        except BaseException:
            with contextlib.suppress(BackendError):
                self._bucket.delete([key])
            raise
        self._bucket.delete([key])

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        """See `Backend.exists`: one HEAD per name, all at once."""
        keys = [self._key(name) for name in names]
        found = list((map if len(keys) < 2 else self._lookers.map)(self._bucket.has, keys))
        if keys and not any(found) and time.monotonic() >= self._doubt_bucket_at:
            # HEAD answers the same for a missing object and for a missing bucket. When that is gone, this asks again
            # each time, so that it is counted as the fault that it is until the bucket is back.
            self._bucket.surely_has(keys[0])
            self._doubt_bucket_at = time.monotonic() + BUCKET_CHECK_S
        return found

    def read(self, name: ObjectName, header: bytearray, payload: memoryview) -> Read:
        """See `Backend.read`. The payload goes from the socket straight into the caller's memory."""
        return self._bucket.fetch(self._key(name), [memoryview(header), payload])

    def write(self, name: ObjectName, header: bytes, payload: Bytes) -> bool:
        """See `Backend.write`. The payload goes from the caller's memory straight into the socket.

        For a large object that is there this costs a round trip, and the payload is not sent: the server is asked
        first whether to go on (Expect: 100-continue).
        """
        return self._bucket.create(self._key(name), memoryview(header), memoryview(payload))

    def touch(self, name: ObjectName) -> bool:
        """See `Backend.touch`: a copy onto itself, inside the server."""
        return self._bucket.touch(self._key(name))

    def delete(self, names: Sequence[ObjectName]) -> None:
        """See `Backend.delete`: a thousand in one request."""
        for start in range(0, len(names), DELETED_AT_ONCE):
            self._bucket.delete([self._key(name) for name in names[start : start + DELETED_AT_ONCE]])

    def objects(self, fingerprint: str) -> Iterator[StoredObject]:
        """See `Backend.objects`: a thousand in one request."""
        for page in self._bucket.pages(f"{self._root}{fingerprint_path(fingerprint)}/"):
            for entry in page.get("Contents", ()):
                name = ObjectName.parse(entry["Key"].removeprefix(self._root))
                if name is not None:
                    yield StoredObject(name, entry["Size"], entry["LastModified"].timestamp())

    def create_note(self, name: NoteName, body: bytes) -> bool:
        """See `Backend.create_note`."""
        return self._bucket.create(self._key(name), memoryview(body))

    def write_note(self, name: NoteName, body: bytes) -> None:
        """See `Backend.write_note`."""
        self._bucket.put(self._key(name), body)

    def read_note(self, name: NoteName) -> Note | None:
        """See `Backend.read_note`."""
        return self._bucket.get(self._key(name))

    def list_notes(self, fingerprint: str, kind: str) -> Sequence[NoteName]:
        """See `Backend.list_notes`."""
        folder = self._root + "/".join(NoteName(fingerprint, kind, "0").directory) + "/"
        found = []
        for page in self._bucket.pages(folder):
            for entry in page.get("Contents", ()):
                with contextlib.suppress(ValueError):  # not one of ours
                    found.append(NoteName(fingerprint, kind, entry["Key"].removeprefix(folder)))
        return sorted(found, key=lambda name: name.id)

    def delete_note(self, name: NoteName) -> None:
        """See `Backend.delete_note`."""
        self._bucket.delete([self._key(name)])

    def now(self) -> float:
        """See `Backend.now`: by the date of the last answer."""
        return self._link.now()

    def close(self) -> None:
        """Close the connections, when the requests that run have ended."""
        self._lookers.shutdown()
        self._bucket.close()

    def _key(self, name: ObjectName | NoteName) -> str:
        return f"{self._root}{name.path}"

    def _round_trip(self, key: str, wrote: bytes) -> None:
        """Write something, try to write it again, read it back."""
        if not self._bucket.create(key, memoryview(wrote)):
            raise self._bucket.error("Lying", "says that an object is there whose name was just made: check the server")
        if self._bucket.create(key, memoryview(wrote)):
            raise self._bucket.error(*explain_code("NotImplemented"))
        read = self._bucket.get(key)
        if read is None or read.body != wrote:
            raise self._bucket.error("Lying", "returns other bytes than were written: check the server")

    def _sweep(self, listed: ListObjectsV2OutputTypeDef, folder: str) -> None:
        """Remove what probes have left that did not come to their end."""
        before = self.now() - LEFTOVER_AGE_S
        old = [
            entry["Key"]
            for entry in listed.get("Contents", ())
            if _PROBE.fullmatch(entry["Key"].removeprefix(folder)) and entry["LastModified"].timestamp() < before
        ]
        if old:
            self._bucket.delete(old)
            logger.info("removed %d objects of earlier probes under %s", len(old), folder)
