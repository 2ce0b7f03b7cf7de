"""What is done with the objects of one bucket, by key: one request each, and one kind of error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from threading import BoundedSemaphore
from typing import IO, TYPE_CHECKING, TypeVar, cast

from botocore.exceptions import BotoCoreError, ClientError

from speccache_runtime.cache.storage.base import NOTE_BYTES, BackendError, Note, Read
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.s3_body import Upload, receive
from speccache_runtime.cache.storage.s3_client import CONNECTIONS, Link
from speccache_runtime.cache.storage.s3_errors import error_code, explain, explain_code

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef, ObjectIdentifierTypeDef

    from speccache_api.storage_target import BucketTarget

T = TypeVar("T")

DELETED_AT_ONCE = 1000
"""S3 takes no more in one request."""

_EXISTS = frozenset({"PreconditionFailed", "412"})
_BEING_WRITTEN = frozenset({"ConditionalRequestConflict", "409"})
_MISSING = frozenset({"NoSuchKey", "404"})
_CLOCK_STEP = timedelta(seconds=2)  # dates are whole seconds, and two machines may have dated one answer


class Bucket:
    """Thread-safe. Every method but `close` raises BackendError when it fails, and nothing else."""

    def __init__(self, target: BucketTarget, link: Link) -> None:
        self._name = target.bucket
        self._place = target.place
        self._link = link
        self._slots = BoundedSemaphore(CONNECTIONS)

    def error(self, code: str, text: str) -> BackendError:
        """An error that names the bucket."""
        return BackendError(code, f"{self._place} {text}")

    def has(self, key: str) -> bool:
        """Whether an object is there, by HEAD; False as well when the whole bucket is missing."""

        def head(client: S3Client) -> bool:
            try:
                client.head_object(Bucket=self._name, Key=key)
            except ClientError as error:
                status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                if status == 404:
                    return False
                if status >= 500:
                    raise
                return self._look(client, key)  # an answer to HEAD has no text that says what is wrong
            return True

        return self._ask(head)

    def surely_has(self, key: str) -> bool:
        """Whether an object is there, by GET; an error when the bucket is missing."""
        return self._ask(lambda client: self._look(client, key))

    def fetch(self, key: str, buffers: Sequence[memoryview]) -> Read:
        """Fill the buffers with the object."""

        def get(client: S3Client) -> Read:
            answer = client.get_object(Bucket=self._name, Key=key)
            try:
                if answer["ContentLength"] != sum(map(len, buffers)):
                    return Read(Outcome.CORRUPT)
                if not receive(answer["Body"], buffers):
                    raise HTTPException("the answer ended early")
            finally:
                answer["Body"].close()
            return Read(Outcome.HIT, answer["LastModified"].timestamp())

        return self._ask(_or_missing(get, Read(Outcome.MISS)))

    def create(self, key: str, *content: memoryview) -> bool:
        """Put an object unless there is one; False when there is, or somebody else is just putting it."""

        def put(client: S3Client) -> bool:
            for _ in range(2):
                try:
                    client.put_object(Bucket=self._name, Key=key, Body=_body(content), IfNoneMatch="*")
                    return True
                except ClientError as error:
                    if error_code(error) in _EXISTS:
                        return False
                    if error_code(error) not in _BEING_WRITTEN:
                        raise
            return False

        return self._ask(put)

    def put(self, key: str, content: bytes) -> None:
        """Put a small object, whatever is there."""
        self._ask(lambda client: client.put_object(Bucket=self._name, Key=key, Body=_body([memoryview(content)])))

    def get(self, key: str) -> Note | None:
        """A small object."""

        def get(client: S3Client) -> Note | None:
            answer = client.get_object(Bucket=self._name, Key=key)
            with answer["Body"] as body:
                return Note(body.read(NOTE_BYTES), answer["LastModified"].timestamp())

        return self._ask(_or_missing(get, None))

    def touch(self, key: str) -> bool:
        """Give an object the date of now; False when there is none."""

        def copy(client: S3Client) -> bool:
            asked = time.monotonic()
            answer = client.copy_object(
                Bucket=self._name,
                Key=key,
                CopySource={"Bucket": self._name, "Key": key},
                MetadataDirective="REPLACE",  # S3 copies nothing onto itself without a reason; new metadata is one
            )
            took = timedelta(seconds=time.monotonic() - asked)
            date = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
            if answer["CopyObjectResult"]["LastModified"] >= date - took - _CLOCK_STEP:
                return True
            return self._rewrite(client, key)

        return self._ask(_or_missing(copy, False))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove at most DELETED_AT_ONCE objects; missing ones are fine."""
        if len(keys) == 1:
            self._ask(lambda client: client.delete_object(Bucket=self._name, Key=keys[0]))
            return
        wanted: list[ObjectIdentifierTypeDef] = [{"Key": key} for key in keys]
        answer = self._ask(
            lambda client: client.delete_objects(Bucket=self._name, Delete={"Objects": wanted, "Quiet": True})
        )
        for failure in answer.get("Errors", ()):
            if failure.get("Code") not in _MISSING:
                raise self.error(*explain_code(failure.get("Code", "")))

    def pages(self, prefix: str) -> Iterator[ListObjectsV2OutputTypeDef]:
        """The answers to a listing, a thousand objects each; the next is asked for when it is needed."""
        more: dict[str, str] = {}

        def ask(client: S3Client) -> ListObjectsV2OutputTypeDef:
            return client.list_objects_v2(Bucket=self._name, Prefix=prefix, **more)  # type: ignore[arg-type]

        while True:
            page = self._ask(ask)
            yield page
            if not page["IsTruncated"]:
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def close(self) -> None:
        """Close the idle connections."""
        self._link.close()

    def _ask(self, action: Callable[[S3Client], T]) -> T:
        with self._slots:
            try:
                return action(self._link.client())
            except (BotoCoreError, ClientError, HTTPException, OSError) as error:
                code, text = explain(error)
                self._link.failed(code)
                raise self.error(code, text) from error

    def _look(self, client: S3Client, key: str) -> bool:
        """Whether an object is there, by a request whose answer says why not."""

        def get(client: S3Client) -> bool:
            client.get_object(Bucket=self._name, Key=key, Range="bytes=0-0")["Body"].close()
            return True

        return _or_missing(get, False)(client)

    def _rewrite(self, client: S3Client, key: str) -> bool:
        """Read an object and put it again: for servers that leave the date of what is copied onto itself (versitygw).
        Not if it was changed or removed meanwhile."""
        answer = client.get_object(Bucket=self._name, Key=key)
        body = answer["Body"].read()
        try:
            client.put_object(Bucket=self._name, Key=key, Body=body, IfMatch=answer["ETag"])
        except ClientError as error:
            if error_code(error) not in _EXISTS | _BEING_WRITTEN:
                raise
            return self._look(client, key)
        return True


def _body(content: Sequence[memoryview]) -> IO[bytes]:
    return cast("IO[bytes]", Upload(content))


def _or_missing(action: Callable[[S3Client], T], missing: T) -> Callable[[S3Client], T]:
    """The action, with an answer for an object that is not there."""

    def run(client: S3Client) -> T:
        try:
            return action(client)
        except ClientError as error:
            if error_code(error) in _MISSING:
                return missing
            raise

    return run
