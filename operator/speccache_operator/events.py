"""Events: what `kubectl describe` tells. On transitions only, so that a state that lasts is told once."""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from speccache_api import names
from speccache_operator.apply import Write
from speccache_operator.conditions import PROGRESSING, READY, Condition, Reason
from speccache_operator.kinds import EVENT, Object
from speccache_operator.plan import Cause

_QUIET = (Reason.SCALED_TO_ZERO, Reason.COMPLETE, Reason.WAITING, Reason.STARTING, Reason.ROLLING_OUT, Reason.SCALING)
"""Reasons of a False condition that are no cause for a warning."""
_MOST = 1000


@dataclass(frozen=True, slots=True)
class EventNote:
    """One event about the resource."""

    warning: bool
    reason: str
    message: str


def transitions(before: Mapping[str, Mapping[str, Any]], after: Iterable[Condition]) -> tuple[EventNote, ...]:
    """An event for each condition that took another status or reason, and only one for each reason.

    Ready and Progressing repeat the reason of the aspect that decided them; what is only "not known yet" is no event.
    """
    notes: dict[str, EventNote] = {}
    for condition in sorted(after, key=lambda c: c.type in (READY, PROGRESSING)):
        old = before.get(condition.type, {})
        if (old.get("status"), old.get("reason")) == (condition.status, condition.reason.value):
            continue
        if condition.status == "Unknown" or (condition.type == PROGRESSING and condition.reason is Reason.STOPPED):
            continue
        warning = condition.status == "False" and condition.reason not in _QUIET
        note = EventNote(warning, condition.reason.value, f"{condition.type}: {condition.message}"[:_MOST])
        notes.setdefault(condition.reason.value, note)
    return tuple(notes.values())


def of_writes(writes: Iterable[Write]) -> tuple[EventNote, ...]:
    """An event for each child that was really changed."""
    words = {Cause.CREATED: "created", Cause.UPDATED: "updated", Cause.REPAIRED: "put back to the plan"}
    return tuple(EventNote(False, write.cause.value, f"{write.ref}: {words[write.cause]}") for write in writes)


def event_object(raw: Object, note: EventNote, instance: str, now: datetime) -> Object:
    """The Event to create. Its name is unique; the API server deletes it after its time."""
    meta = raw["metadata"]
    stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:16]}", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
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
