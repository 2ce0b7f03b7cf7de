"""Status and events: what is written, when nothing is, and what is told once."""

import json
from datetime import timedelta
from typing import Any

import pytest

from speccache_operator.act import events, status
from speccache_operator.decide.conditions import Condition, Reason, head, tail
from speccache_operator.decide.steps import Cause, Write
from speccache_operator.kinds import DEPLOYMENT, Ref


def _condition(state: str = "True", reason: Reason = Reason.SERVING, kind: str = "Ready", text: str = "x") -> Condition:
    return Condition(kind, state, reason, text)  # type: ignore[arg-type]


def test_a_condition_keeps_its_time_while_its_status_is_the_same(raw: Any, now: Any) -> None:
    resource = raw()
    resource["status"] = status.make_status(resource, [_condition("False", Reason.STARTING)], {}, now)
    later = now + timedelta(hours=1)
    same = status.make_status(resource, [_condition("False", Reason.CRASH_LOOPING)], {}, later)["conditions"][0]
    other = status.make_status(resource, [_condition("True")], {}, later)["conditions"][0]
    assert same["lastTransitionTime"] == "2026-11-21T12:00:00Z"
    assert same["reason"] == "CrashLooping"
    assert other["lastTransitionTime"] == "2026-11-21T13:00:00Z"


def test_a_status_is_about_a_generation_and_is_plain_json(raw: Any, now: Any) -> None:
    made = status.make_status(raw(), [_condition()], {"replicas": 1}, now)
    assert made["observedGeneration"] == made["conditions"][0]["observedGeneration"] == 3
    assert json.loads(json.dumps(made)) == made
    assert made["replicas"] == 1


class _Cluster:
    """Keeps what was applied."""

    def __init__(self) -> None:
        self.applied: list[Any] = []

    async def apply(self, obj: Any, *, subresource: str = "") -> Any:
        self.applied.append((obj, subresource))
        return obj


async def test_an_equal_status_is_not_written(raw: Any, now: Any) -> None:
    cluster: Any = _Cluster()
    resource = raw()
    wanted = status.make_status(resource, [_condition()], {}, now)
    assert await status.write(cluster, resource, wanted) is not None
    ((body, subresource),) = cluster.applied
    assert subresource == "status"
    assert body["metadata"] == {"name": "chat", "namespace": "demo", "uid": "u-1"}
    resource["status"] = wanted
    assert await status.write(cluster, resource, wanted) is None
    assert len(cluster.applied) == 1


def _told(old: list[Condition], new: list[Condition], raw: Any, now: Any) -> list[tuple[bool, str]]:
    resource = raw()
    resource["status"] = status.make_status(resource, old, {}, now)
    return [(note.warning, note.reason) for note in events.transitions(status.previous(resource), new)]


STARTING = _condition("False", Reason.STARTING)
SERVING = _condition()
OOM = _condition("False", Reason.OOM_KILLED)
SIZED = _condition("True", Reason.SIZED, "MemorySized")
TOO_BIG = _condition("False", Reason.EXCEEDS_NODE_ALLOCATABLE, "MemorySized")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ([], [STARTING], []),
        ([], [SIZED], [(False, "Sized")]),
        ([STARTING], [SERVING], [(False, "Serving")]),
        ([SERVING], [SERVING], []),
        ([SERVING], [_condition(text="other words")], []),
        ([SERVING], [STARTING], [(False, "Starting")]),
        ([SERVING], [OOM], [(True, "OOMKilled")]),
        ([OOM], [OOM], []),
        ([OOM], [STARTING], []),
        ([SIZED], [TOO_BIG], [(True, "ExceedsNodeAllocatable")]),
        ([TOO_BIG], [SIZED], [(False, "Sized")]),
        (
            [SIZED],
            [TOO_BIG, _condition("False", Reason.EXCEEDS_NODE_ALLOCATABLE)],
            [(True, "ExceedsNodeAllocatable")],
        ),
        ([], [_condition("True", Reason.VALID, "ConfigValid")], []),
        ([], [_condition("True", Reason.ROLLING_OUT, "Progressing")], []),
        ([], [_condition("False", Reason.STOPPED, "Progressing")], []),
        ([], [_condition("False", Reason.OBJECT_NOT_OWNED, "Progressing")], [(True, "ObjectNotOwned")]),
        ([], [_condition("Unknown", Reason.CLAIM_PENDING, "StorageReady")], []),
    ],
)
def test_transitions_are_told_once(old: Any, new: Any, told: Any, raw: Any, now: Any) -> None:
    assert _told(old, new, raw, now) == told


def test_writes_are_told(now: Any, raw: Any) -> None:
    writes = [Write(Ref(DEPLOYMENT, "demo", "chat"), cause, replicas=3) for cause in Cause]
    notes = events.of_writes(writes)
    assert [note.reason for note in notes] == ["Created", "Updated", "Repaired", "Scaled"]
    assert notes[-1].message == "Deployment chat: scaled to 3"


def test_an_event_is_about_the_resource(raw: Any, now: Any) -> None:
    note = events.EventNote(True, "OOMKilled", "text")
    one, two = (events.event_object(raw(), note, "pod-1", now) for _ in range(2))
    assert one["involvedObject"]["uid"] == "u-1"
    assert one["type"] == "Warning"
    assert one["metadata"]["namespace"] == "demo"
    assert one["metadata"]["name"] != two["metadata"]["name"]


def test_long_texts_lose_their_end_or_their_beginning() -> None:
    assert head("  abc \n") == tail("  abc \n") == "abc"
    assert head("abcdef", 4) == "abc…"
    assert tail("abcdef", 4) == "…def"
