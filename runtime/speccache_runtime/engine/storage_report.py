"""What is told of the storage tier while the engine serves."""

from __future__ import annotations

from dataclasses import dataclass

from speccache_runtime.cache.storage.store import StoreState
from speccache_runtime.config import StorageConfig


@dataclass(frozen=True, slots=True)
class StorageReport:
    """What is attached, None for nothing, and how it is: `unstored` pages on the host are not known to be there whole.
    `ending` storages were detached and have operations under way."""

    config: StorageConfig | None
    state: StoreState | None
    unstored: int
    ending: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """Pages that were written, and that storage still lacks."""

    written: int
    left: int
