"""What the cache needs of the other ranks of a replica: that they do with their pages what is done with the pages here.

Each rank has pages of its own under the same numbers: its share of the heads, or what every rank has alike. One rank
keeps the index and decides; an operation has ended when it has ended on all of them. So a half that ranks share is not
read by one before rank 0 has filled it, and not filled anew while one reads it.
"""

from __future__ import annotations

from typing import Protocol

from speccache_runtime.cache.shared_memory import SharedMemory
from speccache_runtime.cache.storage_io import Storage
from speccache_runtime.cache.transfer import Transfer


class OtherRanks(Protocol):
    """The other ranks, as the rank that decides sees them."""

    @property
    def memory(self) -> SharedMemory | None:
        """Holds the host halves that ranks share; None when they share none."""

    def transfer(self, local: Transfer) -> Transfer:
        """Moves pages here and on all others."""

    def storage(self, local: Storage) -> Storage:
        """Reads and writes pages here and on all others; the answer is the worst of theirs."""

    def poll(self) -> bool:
        """Takes the answers that have come; True if there were any. Raises RankError when a rank is gone."""


class NoOtherRanks:
    """A replica of one process."""

    memory: SharedMemory | None = None

    def transfer(self, local: Transfer) -> Transfer:
        return local

    def storage(self, local: Storage) -> Storage:
        return local

    def poll(self) -> bool:
        return False
