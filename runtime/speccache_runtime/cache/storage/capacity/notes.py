"""What pods that share a store tell each other through it. Anybody may write there: what is no such note is ignored.

usage/<writer>   from each writer: how much it has written since its start, what it obeys, and what was read of late
state/0          from the sweeper: what is used, and how far each writer may go on
lease/<epoch>    who sweeps (see lease.py)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from speccache_runtime.cache.storage.capacity.recent import FILTER_BYTES

USAGE, STATE, LEASE = "usage", "state", "lease"

_MOST = 1 << 62
_USAGE = ("written", "largest", "until", "heard")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one writer: bytes that it has written since its start, its largest page, up to how many bytes it goes on until
    it hears more, the number of the state that said so, and what it has read of late (see `recent.Recent.filter`)."""

    written: int
    largest: int
    until: int
    heard: int
    recent: bytes

    def to_bytes(self) -> bytes:
        head = {name: getattr(self, name) for name in _USAGE}
        return json.dumps(head).encode() + b"\n" + self.recent

    @classmethod
    def from_bytes(cls, body: bytes) -> Usage | None:
        """What `to_bytes` made; None for anything else."""
        head, _, recent = body.partition(b"\n")
        data = _numbers(head, _USAGE)
        if data is None or len(recent) != FILTER_BYTES:
            return None
        return cls(**data, recent=recent)


@dataclass(frozen=True, slots=True)
class State:
    """Of the whole store: bytes under the fingerprint, objects as of the last listing, and for each writer by its id up
    to how many bytes, counted from its start, it may write. Without a capacity `until` is None: everybody may. Each
    state has a `number` above those before."""

    used: int
    objects: int
    number: int
    until: Mapping[str, int] | None = field(default=None)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> State | None:
        """What `to_bytes` made; None for anything else."""
        data = _numbers(body, ("used", "objects", "number"))
        if data is None:
            return None
        until = json.loads(body).get("until")
        if until is None:
            return cls(data["used"], data["objects"], data["number"])
        if not isinstance(until, dict) or not all(_is_count(value) for value in until.values()):
            return None
        return cls(data["used"], data["objects"], data["number"], until)


def _numbers(body: bytes, names: tuple[str, ...]) -> dict[str, int] | None:
    try:
        data: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not all(_is_count(data.get(name)) for name in names):
        return None
    return {name: data[name] for name in names}


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST
