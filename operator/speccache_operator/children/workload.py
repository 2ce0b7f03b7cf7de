"""The workload: what runs the replicas, as everybody else sees it. Which kind it is, only this module and its builder
(deployment.py) know; another kind is another builder and another way to count.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from speccache_api import names
from speccache_operator.kinds import DEPLOYMENT, Key, Object, Ref

KIND = DEPLOYMENT


@dataclass(frozen=True, slots=True)
class Counts:
    """Pods of the workload, as its controller says; pods that are being deleted are not counted.

    `current` is False while its answer is about an older version than the one that is there.
    """

    exist: int = 0
    updated: int = 0
    ready: int = 0
    current: bool = False


def ref(key: Key) -> Ref:
    """Where the workload of a resource is; needs no valid spec."""
    return Ref(KIND, key.namespace, names.workload_name(key.name))


def count(live: Object | None) -> Counts:
    """Pods of the workload `live`; zeros without one."""
    if live is None:
        return Counts()
    status = live.get("status", {})
    return Counts(
        exist=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        current=status.get("observedGeneration", 0) >= live["metadata"]["generation"],
    )


def replicas(live: Object) -> int:
    """How many pods it is told to have."""
    value: int = live["spec"].get("replicas", 1)
    return value


def with_replicas(obj: Object, count: int) -> Object:
    """The workload `obj`, told to have so many pods."""
    return {**obj, "spec": {**obj["spec"], "replicas": count}}


def pods(uid: str, seen: Iterable[Object]) -> tuple[Object, ...]:
    """The served pods of the resource with this uid, by name. Between them and their Deployment stands a ReplicaSet, so
    they are told by a label; a predecessor's have another uid in it.
    """
    found = [pod for pod in seen if pod["metadata"].get("labels", {}).get(names.LABEL_RESOURCE_UID) == uid]
    return tuple(sorted(found, key=lambda pod: str(pod["metadata"]["name"])))


def failure(live: Object | None) -> str:
    """Why the controller cannot make pods, in its own words; "" when it can."""
    for condition in (live or {}).get("status", {}).get("conditions", ()):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return str(condition.get("message", ""))
    return ""
