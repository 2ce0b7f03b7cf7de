"""Ways to move an object to and from storage: the backend's, and the plainest ones that each library or system offers.

Every way takes the same buffers, header and page, and moves the same bytes. A way is used by many threads at once.
"""

from __future__ import annotations

import http.client
import os
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from speccache_api.storage_target import BucketTarget
from speccache_runtime.bench.server import BenchError
from speccache_runtime.cache.storage.base import Backend, ObjectName
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.cache.storage.outcome import Outcome

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

Buffers = tuple[memoryview, memoryview]
"""Header and page, each at the start of a memory page."""


class Way(Protocol):
    """`title` is the row of the table; `raw` says whether it is something to compare the backend with."""

    title: str
    raw: bool

    def prepare(self, names: Sequence[ObjectName]) -> None:
        """What may be done before the time is taken."""

    def write(self, name: ObjectName, buffers: Buffers) -> None: ...

    def settle(self, name: ObjectName) -> None:
        """The end of writing, within its time: what was written is where it stays."""

    def forget(self, name: ObjectName) -> None:
        """Between writing and reading, outside their times: nothing is read from this machine's memory."""

    def read(self, name: ObjectName, buffers: Buffers) -> None: ...

    def clear(self, names: Sequence[ObjectName]) -> None:
        """Remove the objects."""

    def close(self) -> None: ...


class BackendWay:
    """The backend, as the engine's storage threads use it."""

    raw = False

    def __init__(self, title: str, backend: Backend) -> None:
        self.title = title
        self._backend = backend
        backend.probe()

    def prepare(self, names: Sequence[ObjectName]) -> None:
        pass

    def write(self, name: ObjectName, buffers: Buffers) -> None:
        if not self._backend.write(name, bytes(buffers[0]), buffers[1]):
            raise BenchError(f"{name.path} is there already")

    def settle(self, name: ObjectName) -> None:
        pass

    def forget(self, name: ObjectName) -> None:
        pass

    def read(self, name: ObjectName, buffers: Buffers) -> None:
        header = bytearray(len(buffers[0]))
        if self._backend.read(name, header, buffers[1]).outcome is not Outcome.HIT:
            raise BenchError(f"{name.path} did not come back")
        buffers[0][:] = header

    def clear(self, names: Sequence[ObjectName]) -> None:
        self._backend.delete(names)

    def close(self) -> None:
        self._backend.close()


class FileBackendWay(BackendWay):
    """The backend on a directory, up to the disk and from it."""

    def __init__(self, root: Path) -> None:
        super().__init__("SpecCache", FileBackend(root))
        self._root = root

    def settle(self, name: ObjectName) -> None:
        sync(self._root / name.path)

    def forget(self, name: ObjectName) -> None:
        drop(self._root / name.path)


class DirectWay:
    """Files by O_DIRECT, one call each: what the disk gives."""

    title, raw = "O_DIRECT pwritev, preadv", True

    def __init__(self, root: Path) -> None:
        self._root = root / "direct"
        self._root.mkdir()

    def prepare(self, names: Sequence[ObjectName]) -> None:
        pass

    def write(self, name: ObjectName, buffers: Buffers) -> None:
        descriptor = os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            if os.pwritev(descriptor, buffers, 0) != sum(map(len, buffers)):
                raise BenchError("pwritev wrote less than it was given")
        finally:
            os.close(descriptor)

    def settle(self, name: ObjectName) -> None:
        sync(self._path(name))

    def forget(self, name: ObjectName) -> None:
        pass

    def read(self, name: ObjectName, buffers: Buffers) -> None:
        descriptor = os.open(self._path(name), os.O_RDONLY | os.O_DIRECT)
        try:
            if os.preadv(descriptor, buffers, 0) != sum(map(len, buffers)):
                raise BenchError("preadv read less than it was asked for")
        finally:
            os.close(descriptor)

    def clear(self, names: Sequence[ObjectName]) -> None:
        for name in names:
            self._path(name).unlink()

    def close(self) -> None:
        self._root.rmdir()

    def _path(self, name: ObjectName) -> Path:
        return self._root / f"{name.fingerprint[:16]}-{name.half}-{name.parent}"


def sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop(path: Path) -> None:
    """Take a file, which is on the disk, out of the system's memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class _BucketWay:
    raw = True

    def __init__(self, target: BucketTarget, client: S3Client) -> None:
        self._target = target
        self._client = client

    def prepare(self, names: Sequence[ObjectName]) -> None:
        pass

    def settle(self, name: ObjectName) -> None:
        pass

    def forget(self, name: ObjectName) -> None:
        pass

    def clear(self, names: Sequence[ObjectName]) -> None:
        for name in names:
            self._client.delete_object(Bucket=self._target.bucket, Key=self._key(name))

    def close(self) -> None:
        self._client.close()

    def _key(self, name: ObjectName) -> str:
        return f"{self._target.prefix}/{name.path}"


class BotoWay(_BucketWay):
    """boto3 as its documentation shows it: `put_object` of bytes, `readinto` of a body."""

    def __init__(self, target: BucketTarget, client: S3Client, title: str) -> None:
        super().__init__(target, client)
        self.title = title
        self._joined: dict[int, bytes] = {}

    def write(self, name: ObjectName, buffers: Buffers) -> None:
        # Joined once for all objects: the best that could be had.
        body = self._joined.get(len(buffers[1])) or self._joined.setdefault(len(buffers[1]), b"".join(buffers))
        self._client.put_object(Bucket=self._target.bucket, Key=self._key(name), Body=body)

    def read(self, name: ObjectName, buffers: Buffers) -> None:
        body: Any = self._client.get_object(Bucket=self._target.bucket, Key=self._key(name))["Body"]
        for buffer in buffers:
            fill(body, buffer)
        body.close()

    def clear(self, names: Sequence[ObjectName]) -> None:
        super().clear(names)
        self._joined.clear()


class SocketWay(_BucketWay):
    """http.client and URLs signed beforehand: nothing but HTTP."""

    title = "plain sockets (http.client)"

    def __init__(self, target: BucketTarget, client: S3Client, authorities: str | None) -> None:
        super().__init__(target, client)
        self._signed: dict[tuple[str, ObjectName], str] = {}
        self._server = urlsplit(self._sign("get_object", "any"))
        self._context = ssl.create_default_context(cafile=authorities)
        self._own = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def prepare(self, names: Sequence[ObjectName]) -> None:
        self._signed = {
            (action, name): urlsplit(self._sign(action, self._key(name)))._replace(scheme="", netloc="").geturl()
            for action in ("put_object", "get_object")
            for name in names
        }

    def write(self, name: ObjectName, buffers: Buffers) -> None:
        connection = self._connection()
        connection.putrequest("PUT", self._signed["put_object", name], skip_accept_encoding=True)
        connection.putheader("Content-Length", str(sum(map(len, buffers))))
        connection.endheaders()
        for buffer in buffers:
            connection.send(buffer)
        self._answer(connection).read()

    def read(self, name: ObjectName, buffers: Buffers) -> None:
        connection = self._connection()
        connection.request("GET", self._signed["get_object", name])
        answer = self._answer(connection)
        for buffer in buffers:
            fill(answer, buffer)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        super().close()

    def _sign(self, action: str, key: str) -> str:
        return self._client.generate_presigned_url(action, Params={"Bucket": self._target.bucket, "Key": key})

    def _connection(self) -> http.client.HTTPConnection:
        made: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if made is None:
            if self._server.scheme == "https":
                made = http.client.HTTPSConnection(self._server.netloc, timeout=30, context=self._context)
            else:
                made = http.client.HTTPConnection(self._server.netloc, timeout=30)
            self._own.connection = made
            self._connections.append(made)
        return made

    def _answer(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        answer = connection.getresponse()
        if answer.status != 200:
            raise BenchError(f"the server answers {answer.status} to a signed request")
        return answer


def fill(source: Any, buffer: memoryview) -> None:
    """Read until the buffer is full. Raises BenchError when there is less."""
    while buffer:
        count = source.readinto(buffer)
        if not count:
            raise BenchError("an object is shorter than it was")
        buffer = buffer[count:]
