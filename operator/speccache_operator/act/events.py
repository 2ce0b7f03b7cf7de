"""Events: what `kubectl describe` tells. On transitions only, so that a state that lasts is told once."""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from speccache_api import names
from speccache_operator.decide.conditions import MEMORY_SIZED, PROGRESSING, READY, Condition
from speccache_operator.decide.steps import Cause, Write
from speccache_operator.kinds import EVENT, Object

_MOST = 1000


@dataclass(frozen=True, slots=True)
class EventNote:
    """One event about an object."""

    warning: bool
    reason: str
    message: str


def transitions(before: Mapping[str, Mapping[str, Any]], after: Iterable[Condition]) -> tuple[EventNote, ...]:
    """An event for each condition that took another status or reason and has something to tell, one for each reason.

    Told are refusals (as warnings), their end, memory that was sized anew, and Ready becoming True or ceasing to be.
    """
    notes: dict[str, EventNote] = {}
    for condition in sorted(after, key=lambda c: c.type in (READY, PROGRESSING)):
        old = before.get(condition.type, {})
        if (old.get("status"), old.get("reason")) == (condition.status, condition.reason.value):
            continue
        if not _worth_telling(condition, old):
            continue
        warning = condition.status == "False" and not condition.reason.quiet
        note = EventNote(warning, condition.reason.value, f"{condition.type}: {condition.message}"[:_MOST])
        notes.setdefault(condition.reason.value, note)
    return tuple(notes.values())


def _worth_telling(condition: Condition, old: Mapping[str, Any]) -> bool:
    if condition.type == PROGRESSING:
        return condition.status == "False" and not condition.reason.quiet
    if condition.status == "False":
        return not condition.reason.quiet or (condition.type == READY and old.get("status") == "True")
    return condition.status == "True" and (condition.type in (READY, MEMORY_SIZED) or old.get("status") == "False")


def of_writes(writes: Iterable[Write]) -> tuple[EventNote, ...]:
    """An event for each child that was really changed."""
    words = {Cause.CREATED: "created", Cause.UPDATED: "updated", Cause.REPAIRED: "put back to the plan"}
    return tuple(
        EventNote(False, write.cause.value, f"{write.ref}: {words.get(write.cause, f'scaled to {write.replicas}')}")
        for write in writes
    )


def event_object(raw: Object, note: EventNote, instance: str, now: datetime) -> Object:
    """The Event about `raw` to create. Its name is unique; the API server deletes it after its time."""
    meta = raw["metadata"]
    stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:16]}", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": raw["apiVersion"],
            "kind": raw["kind"],
            **{key: meta[key] for key in ("name", "namespace", "uid", "resourceVersion")},
        },
        "type": "Warning" if note.warning else "Normal",
        "reason": note.reason,
        "message": note.message,
        "action": "Reconcile",
        "eventTime": f"{stamp}.{now.microsecond:06d}Z",
        "firstTimestamp": f"{stamp}Z",
        "lastTimestamp": f"{stamp}Z",
        "count": 1,
        "reportingComponent": names.FIELD_MANAGER,
        "reportingInstance": instance,
        "source": {"component": names.FIELD_MANAGER},
    }
