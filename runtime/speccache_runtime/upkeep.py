"""What is done to storage without a server: trying it before the first pod, and emptying it after the last."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

from speccache_api import names
from speccache_api.storage_target import BadStorageTarget, BucketTarget, StorageTarget, from_json
from speccache_runtime.cache.storage.base import Backend, BackendError, ObjectName, check_digest
from speccache_runtime.cache.storage.capacity.notes import LEASE, STATE, USAGE
from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.cache.storage.registry import open_backend
from speccache_runtime.errors import ConfigError, StorageError

_AT_ONCE = 1000
"""Names in one call of `delete`, which is what a bucket removes in one request."""
_MORE_ROUNDS = 2
"""Listings after the first, until one finds nothing: what a pod that was ending has written meanwhile goes as well."""


def read_target(text: str) -> StorageTarget:
    """The target in JSON, as the operator writes it. Raises ConfigError."""
    try:
        return from_json(text)
    except BadStorageTarget as error:
        raise ConfigError(f"--target: {error}") from error


def check(target: StorageTarget) -> tuple[bool, str]:
    """(it can be used, the answer for the operator: one line of JSON with a code and a text when it cannot)."""
    try:
        _check_files(target)
        open_backend(target).close()
    except BackendError as error:
        return False, _answer(ok=False, code=error.code, message=" ".join(str(error).split()))
    except StorageError as error:  # it never came back
        return False, _answer(ok=False, code="Timeout", message=" ".join(str(error).split()))
    return True, _answer(ok=True)


def empty(target: StorageTarget, fingerprint: str) -> int:
    """Remove all that lies below `fingerprint`, pages and the pods' notes; answers how many objects. Raises
    StorageError, ConfigError."""
    with _opened(target, fingerprint) as backend:
        removed = last = _remove_once(backend, fingerprint, lambda name: True)
        for _ in range(_MORE_ROUNDS):
            if last:
                last = _remove_once(backend, fingerprint, lambda name: True)
                removed += last
        for kind in (USAGE, STATE, LEASE):
            for note in backend.list_notes(fingerprint, kind):
                backend.delete_note(note)
        return removed


def remove_drafts(target: StorageTarget, fingerprint: str) -> int:
    """Remove all draft halves below `fingerprint`; answers how many. Raises as `empty` does."""
    with _opened(target, fingerprint) as backend:
        return _remove_once(backend, fingerprint, lambda name: name.half is Half.DRAFT)


@contextmanager
def _opened(target: StorageTarget, fingerprint: str) -> Iterator[Backend]:
    try:
        check_digest(fingerprint)
    except ValueError as error:
        raise ConfigError(f"--fingerprint: {error}") from error
    _check_files(target)
    with closing(open_backend(target)) as backend:
        yield backend


def _remove_once(backend: Backend, fingerprint: str, wanted: Callable[[ObjectName], bool]) -> int:
    removed = 0
    found = (stored.name for stored in backend.objects(fingerprint) if wanted(stored.name))
    while several := list(islice(found, _AT_ONCE)):
        backend.delete(several)
        removed += len(several)
    return removed


def _check_files(target: StorageTarget) -> None:
    """Are the files there that Secret and ConfigMap are mounted as? The client library only says that it has none."""
    if not isinstance(target, BucketTarget):
        return
    secret, folder = target.credentials_secret, Path(names.S3_CREDENTIALS_PATH)
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    if secret is not None and not all((folder / key).is_file() for key in keys):
        raise BackendError("NoCredentials", f"Secret {secret} with {' and '.join(keys)} is not there: create it")
    bundle, path = target.ca_bundle_config_map, Path(names.S3_CA_BUNDLE_PATH) / names.CA_BUNDLE_KEY
    if bundle is not None and not path.is_file():
        raise BackendError("TlsFailed", f"ConfigMap {bundle} with {names.CA_BUNDLE_KEY} is not there: create it")


def _answer(**fields: object) -> str:
    return json.dumps(fields) + "\n"
