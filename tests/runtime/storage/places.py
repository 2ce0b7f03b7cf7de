"""Where the conformance suite keeps objects: one class and one line of `PLACES` for each kind of backend.

The bucket is one of a versitygw that the tests start. To use another server, set

    SPECCACHE_TEST_S3_BUCKET       a bucket that exists; everything is kept under prefixes of the tests' own
    SPECCACHE_TEST_S3_ENDPOINT     its server's URL; without it, the public endpoint of AWS
    SPECCACHE_TEST_S3_REGION       if the server wants one
    SPECCACHE_TEST_S3_PATH_STYLE   "true" where buckets have no host names of their own

and the credentials as every S3 client takes them (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and so on).
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import boto3
import pytest
from botocore.config import Config

from speccache_api.storage_target import BucketTarget
from speccache_runtime.cache.storage.base import Backend
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.cache.storage.s3 import S3Backend

from .memory import MemoryBackend, Shelf

BUCKET = "speccache-tests"


class Place(Protocol):
    """A store, as backends see it (`open`) and as it is behind their backs (the rest)."""

    def open(self) -> Backend:
        """Another pod's backend on this store, not yet probed."""

    def paths(self) -> list[str]:
        """Of everything that is kept, sorted."""

    def put(self, path: str, content: bytes) -> None: ...

    def get(self, path: str) -> bytes: ...

    def clear(self) -> None:
        """Remove everything, as somebody does who cleans up the store."""


class FilePlace:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._root: Path = request.getfixturevalue("tmp_path") / "volume"
        self._root.mkdir()

    def open(self) -> FileBackend:
        return FileBackend(self._root)

    def paths(self) -> list[str]:
        return sorted(str(path.relative_to(self._root)) for path in self._root.rglob("*") if path.is_file())

    def put(self, path: str, content: bytes) -> None:
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        (self._root / path).write_bytes(content)

    def get(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def clear(self) -> None:
        for path in self._root.iterdir():
            with suppress(FileNotFoundError):
                shutil.rmtree(path)


class MemoryPlace:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._shelf = Shelf()

    def open(self) -> MemoryBackend:
        return MemoryBackend(self._shelf)

    def paths(self) -> list[str]:
        return sorted(self._shelf.kept)

    def put(self, path: str, content: bytes) -> None:
        self._shelf.kept[path] = (content, self._shelf.now())

    def get(self, path: str) -> bytes:
        return self._shelf.kept[path][0]

    def clear(self) -> None:
        self._shelf.kept.clear()


class BucketPlace:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.target = _given() or _local(request)
        style = "path" if self.target.force_path_style else "auto"
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=self.target.endpoint,
            region_name=self.target.region,
            config=Config(s3={"addressing_style": style}, max_pool_connections=32),
        )
        request.addfinalizer(self._client.close)
        request.addfinalizer(self.clear)

    def open(self) -> S3Backend:
        return S3Backend(self.target)

    def paths(self) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.target.bucket, Prefix=self._key(""))
        return sorted(entry["Key"].removeprefix(self._key("")) for page in pages for entry in page.get("Contents", ()))

    def put(self, path: str, content: bytes) -> None:
        self._client.put_object(Bucket=self.target.bucket, Key=self._key(path), Body=content)

    def get(self, path: str) -> bytes:
        body: bytes = self._client.get_object(Bucket=self.target.bucket, Key=self._key(path))["Body"].read()
        return body

    def clear(self) -> None:
        found = [{"Key": self._key(path)} for path in self.paths()]
        for start in range(0, len(found), 1000):
            self._client.delete_objects(Bucket=self.target.bucket, Delete={"Objects": found[start : start + 1000]})

    def _key(self, path: str) -> str:
        return f"{self.target.prefix}/{path}"


PLACES: dict[str, Callable[[pytest.FixtureRequest], Place]] = {
    "file": FilePlace,
    "memory": MemoryPlace,
    "s3": BucketPlace,
}


def bucket_target(endpoint: str | None, **changes: object) -> BucketTarget:
    """A target with a prefix of its own, credentials from the environment."""
    fields: dict[str, Any] = {
        "bucket": BUCKET,
        "prefix": f"tests/{secrets.token_hex(8)}",
        "endpoint": endpoint,
        "region": None,
        "force_path_style": True,
        "credentials_secret": None,
        "ca_bundle_config_map": None,
        "service_account": None,
    }
    return BucketTarget(**{**fields, **changes})


def _given() -> BucketTarget | None:
    bucket = os.environ.get("SPECCACHE_TEST_S3_BUCKET")
    if bucket is None:
        return None
    return bucket_target(
        os.environ.get("SPECCACHE_TEST_S3_ENDPOINT"),
        bucket=bucket,
        region=os.environ.get("SPECCACHE_TEST_S3_REGION"),
        force_path_style=os.environ.get("SPECCACHE_TEST_S3_PATH_STYLE") == "true",
    )


def _local(request: pytest.FixtureRequest) -> BucketTarget:
    server = request.getfixturevalue("s3_server")
    request.getfixturevalue("s3_environment")
    server.make_bucket(BUCKET)
    return bucket_target(server.endpoint, region=server.region)
