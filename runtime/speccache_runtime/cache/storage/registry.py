"""Which kinds of storage there are. A kind's module, and whatever library it needs, is imported only when asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from speccache_api.storage_target import BucketTarget, StorageTarget, VolumeTarget
from speccache_runtime.cache.storage.base import Backend, BackendError
from speccache_runtime.errors import StorageError

logger = logging.getLogger(__name__)

PROBE_S = 60.0
"""A volume that has not answered by then is given up: who opens it gets a reason instead of hanging."""

PATIENCE_S = 5.0
"""After so long the log says what is waited for. A slow volume answers within a second."""

_FULL = frozenset({"ENOSPC", "EDQUOT"})


def _file(target: VolumeTarget) -> Backend:
    from speccache_runtime.cache.storage.file import FileBackend

    return FileBackend(Path(target.path))


def _bucket(target: BucketTarget) -> Backend:
    from speccache_runtime.cache.storage.s3 import S3Backend

    return S3Backend(target)


BACKENDS: dict[type, Callable[[Any], Backend]] = {VolumeTarget: _file, BucketTarget: _bucket}
"""How the backend of each kind of target is made."""


def open_backend(target: StorageTarget) -> Backend:
    """Make the backend and probe it; the caller closes it. Returns or raises after PROBE_S seconds at most.

    Raises StorageError when the place cannot be used. A full place is used all the same, with a warning: its pages are
    still worth reading, and a volume shared by many pods must not keep them all from starting because it filled up.
    """
    backend = BACKENDS[type(target)](target)
    try:
        _probe(backend, target.place)
    except BackendError as error:
        if error.code not in _FULL:
            raise
        logger.warning("%s. Until then stored pages are read and no new ones are written", error)
    return backend


def _probe(backend: Backend, where: str) -> None:
    """In a thread: a call to a volume that hangs does not come back, and cannot be cancelled."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            backend.probe()
        except BaseException as error:  # noqa: BLE001 - raised again where the outcome is read
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, name="storage-probe", daemon=True).start()
    if not wait([outcome], PATIENCE_S).done:
        logger.warning("%s does not answer; it is waited for", where)
    if wait([outcome], PROBE_S - PATIENCE_S).done:
        return outcome.result()
    raise StorageError(
        f"{where} has not answered for {PROBE_S:.0f} s: check that its server is up and can be reached from "
        "this node; without kvCache.storage pods serve without it"
    )
