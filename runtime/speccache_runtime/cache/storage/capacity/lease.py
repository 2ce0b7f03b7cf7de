"""Who sweeps a store: one pod at a time, by a note that it renews and that expires.

Taking the lease is making the note with the next number, which the store lets one pod do. The holder rewrites its own
note to stay; a note that has not been rewritten for TTL_S seconds, by the store's clock, may be succeeded. So nobody
needs to compare and swap, or a clock that agrees with another pod's.
"""

from __future__ import annotations

from speccache_runtime.cache.storage.base import Backend, NoteName
from speccache_runtime.cache.storage.capacity.notes import LEASE

TTL_S = 30.0

_RELEASED = b"released"
_EPOCH_DIGITS = 16


class SweeperLease:
    """One pod's part in it. Not thread-safe. Every method raises BackendError when storage fails."""

    def __init__(self, backend: Backend, fingerprint: str, holder: str) -> None:
        """`holder` is a name for people who look into the store."""
        self._backend = backend
        self._fingerprint = fingerprint
        self._body = holder.encode()
        self._mine: NoteName | None = None

    def hold(self) -> bool:
        """Renews the lease, or takes it when nobody has it; whether it is ours for the next TTL_S seconds."""
        latest = self._latest()
        if latest is not None and latest == self._mine:
            self._backend.write_note(latest, self._body)
            return True
        self._mine = None
        if latest is not None and not self._over(latest):
            return False
        number = 0 if latest is None else int(latest.id, 16) + 1
        note = NoteName(self._fingerprint, LEASE, f"{number:0{_EPOCH_DIGITS}x}")
        if not self._backend.create_note(note, self._body):
            return False
        self._mine = note
        for old in self._backend.list_notes(self._fingerprint, LEASE):
            if old.id < note.id:
                self._backend.delete_note(old)
        return True

    def held(self) -> bool:
        """Whether nobody has succeeded us meanwhile: ask before removing something."""
        return self._mine is not None and self._latest() == self._mine

    def release(self) -> None:
        """Lets another pod take it at once."""
        if self._mine is not None and self.held():
            self._backend.write_note(self._mine, _RELEASED)
        self._mine = None

    def _latest(self) -> NoteName | None:
        notes = self._backend.list_notes(self._fingerprint, LEASE)
        return notes[-1] if notes else None

    def _over(self, note: NoteName) -> bool:
        found = self._backend.read_note(note)
        return found is None or found.body == _RELEASED or self._backend.now() - found.changed_at > TTL_S
