"""Which kinds of storage there are. A kind's module, and whatever library it needs, is imported only when asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from speccache_runtime.cache.storage.base import Backend, BackendError
from speccache_runtime.errors import ConfigError, StorageError

logger = logging.getLogger(__name__)

PROBE_S = 60.0
"""A volume that has not answered by then is given up: the start fails with a reason instead of hanging."""

PATIENCE_S = 5.0
"""After so long the log says what the start waits for. A slow volume answers within a second."""

_FULL = frozenset({"ENOSPC", "EDQUOT"})


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Where pages are stored. A new kind of storage adds its own fields, each None for the other kinds."""

    kind: str
    """One of `kinds()`."""
    path: Path | None = None
    """kind "file": the existing directory to keep objects in."""


def _file(config: BackendConfig) -> Backend:
    from speccache_runtime.cache.storage.file import FileBackend

    if config.path is None:
        raise ConfigError("storage kind 'file' needs a path: name the directory where the volume is mounted")
    return FileBackend(config.path)


def _null(config: BackendConfig) -> Backend:
    from speccache_runtime.cache.storage.null import NullBackend

    if config.path is not None:
        raise ConfigError("storage kind 'null' keeps nothing and takes no path: remove it or choose kind 'file'")
    return NullBackend()


_FACTORIES: dict[str, Callable[[BackendConfig], Backend]] = {"file": _file, "null": _null}


def kinds() -> tuple[str, ...]:
    """The kinds of storage that can be configured, sorted."""
    return tuple(sorted(_FACTORIES))


def open_backend(config: BackendConfig) -> Backend:
    """Make the backend and probe it; the caller closes it. Returns or raises after PROBE_S seconds at most.

    Raises ConfigError for a kind or field that does not exist or fit, StorageError when the place cannot be used.
    A full place is used all the same, with a warning: its pages are still worth reading, and a volume shared by many
    pods must not keep them all from starting because it filled up.
    """
    factory = _FACTORIES.get(config.kind)
    if factory is None:
        raise ConfigError(f"storage kind {config.kind!r} does not exist: choose one of {', '.join(kinds())}")
    backend = factory(config)
    try:
        _probe(backend, config)
    except BackendError as error:
        if error.code not in _FULL:
            raise
        logger.warning("%s. Until then stored pages are read and no new ones are written", error)
    return backend


def _probe(backend: Backend, config: BackendConfig) -> None:
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
    where = f"storage path {config.path}"
    if not wait([outcome], PATIENCE_S).done:
        logger.warning("%s does not answer; the start waits for it", where)
    if wait([outcome], PROBE_S - PATIENCE_S).done:
        return outcome.result()
    raise StorageError(
        f"{where} has not answered for {PROBE_S:.0f} s: check that the volume's server is up and can be reached from "
        "this node, or remove kvCache.storage to serve without it"
    )
