"""Conditions as values.

A condition type says which aspect, its status whether it holds, its reason which of the known cases it is (for
programs), its message what to do about it (for people). Aspects decide conditions, `plan` collects them, `status`
writes them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from speccache_api.status import (
    CHILDREN_APPLIED,
    CONDITION_TYPES,
    CONFIG_VALID,
    MEMORY_SIZED,
    MODEL_INSPECTED,
    PROGRESSING,
    READY,
    STORAGE_READY,
)
from speccache_operator.decide.reasons import Reason, Weight

__all__ = [
    "CHILDREN_APPLIED",
    "CONDITION_TYPES",
    "CONFIG_VALID",
    "MEMORY_SIZED",
    "MODEL_INSPECTED",
    "PROGRESSING",
    "READY",
    "STORAGE_READY",
    "Condition",
    "Reason",
    "Status",
    "Weight",
    "earliest",
    "head",
    "tail",
]

Status = Literal["True", "False", "Unknown"]
_MOST = 1024


@dataclass(frozen=True, slots=True)
class Condition:
    """One aspect's answer. `earlier` says that it is about the configuration before the newest one."""

    type: str
    status: Status
    reason: Reason
    message: str
    earlier: bool = False

    @property
    def holds(self) -> bool:
        """True when the status is True."""
        return self.status == "True"


def earliest(conditions: Iterable[Condition]) -> Condition | None:
    """What is to be looked at first: a refusal before an open answer, and then the order of the types."""
    return min(conditions, key=lambda c: (c.status != "False", CONDITION_TYPES.index(c.type)), default=None)


def head(text: str, most: int = _MOST) -> str:
    """`text` without surrounding blanks, and without its end when it is longer than `most` characters."""
    text = text.strip()
    return text if len(text) <= most else text[: most - 1] + "…"


def tail(text: str, most: int = _MOST) -> str:
    """`text` without surrounding blanks, and without its beginning when it is too long: ends of logs say more."""
    text = text.strip()
    return text if len(text) <= most else "…" + text[1 - most :]
