"""The conditions Progressing and Ready: what the StatefulSet and its pods are doing, and the sum of everything.

Ready is True when every wanted replica serves. When it is not, its reason is the one thing to look at first: an
aspect that says no, then a pod in trouble, then what is being waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from speccache_api.resource import SpecCacheDeployment
from speccache_operator.decide.conditions import (
    CONFIG_VALID,
    MEMORY_SIZED,
    MODEL_INSPECTED,
    PROGRESSING,
    READY,
    STORAGE_READY,
    Condition,
    Reason,
)
from speccache_operator.decide.pod_trouble import Trouble, is_ready, was_oom_killed, worst_trouble
from speccache_operator.kinds import Object

_ORDER = (CONFIG_VALID, MODEL_INSPECTED, MEMORY_SIZED, STORAGE_READY)
_OOM_REMEDY = (
    "raise spec.memory.overhead (what is not KV or weights took more than it says), or lower spec.kvCache.host"
)
_OOM_REMEDY_MANUAL = "raise resources.limits.memory, or set spec.memory.policy: Auto"


@dataclass(frozen=True, slots=True)
class Pods:
    """The served pods, counted. `wanted` is spec.replicas; the others are what the StatefulSet's controller says.

    `current` is False while its answer is about an older version of the StatefulSet than the one that is planned.
    """

    wanted: int
    exist: int = 0
    updated: int = 0
    ready: int = 0
    current: bool = False

    @property
    def complete(self) -> bool:
        """True when the wanted pods exist, run the newest template and are ready, and no others exist."""
        return self.current and self.exist == self.updated == self.ready == self.wanted


def count(resource: SpecCacheDeployment, live: Object | None, *, changing: bool) -> Pods:
    """Count the pods of the StatefulSet `live`. `changing` says that this very pass is going to change it."""
    if live is None:
        return Pods(wanted=resource.spec.replicas)
    status = live.get("status", {})
    exist = status.get("replicas", 0)
    # While no update is under way the controller may leave out updatedReplicas.
    settled = status.get("currentRevision") == status.get("updateRevision")
    return Pods(
        wanted=resource.spec.replicas,
        exist=exist,
        updated=exist if settled else status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        current=not changing and status.get("observedGeneration", 0) >= live["metadata"]["generation"],
    )


def progressing(pods: Pods, blockers: Sequence[Condition]) -> Condition:
    """Whether anything is on its way, and what stops it. `blockers` are aspects without which no pod may change."""
    for condition in sorted(blockers, key=_rank):
        if condition.status == "False":
            text = f"{condition.type} is False: {condition.message}"
            return Condition(PROGRESSING, "False", Reason.STOPPED, text)
        return Condition(PROGRESSING, "True", Reason.WAITING, f"waiting for {condition.type}: {condition.message}")
    if pods.complete:
        return Condition(PROGRESSING, "False", Reason.COMPLETE, f"{pods.wanted} of {pods.wanted} pods are as planned")
    if pods.exist != pods.wanted and pods.current and pods.updated == pods.exist:
        text = f"{pods.exist} pods exist, {pods.wanted} are wanted"
        return Condition(PROGRESSING, "True", Reason.SCALING, text)
    text = f"{pods.updated} of {pods.wanted} pods have the newest template, {pods.ready} are ready"
    return Condition(PROGRESSING, "True", Reason.ROLLING_OUT, text)


def ready(
    resource: SpecCacheDeployment, pods: Pods, served: Sequence[Object], blockers: Sequence[Condition], now: datetime
) -> Condition:
    """The summary. `served` are the pods of the StatefulSet."""
    refusals = [condition for condition in sorted(blockers, key=_rank) if condition.status == "False"]
    still = f" ({pods.ready} pods of the earlier configuration still serve)" if pods.ready else ""
    if refusals:
        return Condition(READY, "False", refusals[0].reason, refusals[0].message + still)
    if pods.wanted == 0:
        return Condition(READY, "False", Reason.SCALED_TO_ZERO, "spec.replicas is 0; raise it to serve")
    if pods.ready >= pods.wanted and (pods.complete or blockers):
        text = _serving(resource, pods, served)
        if blockers:
            text += f"; a newer configuration waits for {min(blockers, key=_rank).type}"
        return Condition(READY, "True", Reason.SERVING, text, earlier=bool(blockers))
    trouble = worst_trouble(served, now)
    if trouble is not None:
        return Condition(READY, "False", trouble.reason, _explained(resource, trouble))
    return _starting(pods, served, blockers)


def _starting(pods: Pods, served: Sequence[Object], blockers: Sequence[Condition]) -> Condition:
    counted = f"{pods.ready} of {pods.wanted} replicas are ready"
    if blockers:
        first = min(blockers, key=_rank)
        return Condition(READY, "False", Reason.WAITING, f"{counted}; waiting for {first.type}: {first.message}")
    if not served:
        text = f"{counted}; no pod exists yet; if it stays so, see the StatefulSet's events (quota, policies)"
        return Condition(READY, "False", Reason.PODS_MISSING, text)
    if not pods.current or pods.updated < pods.exist:
        return Condition(READY, "False", Reason.ROLLING_OUT, f"{counted}; pods are being replaced")
    waiting = [str(pod["metadata"]["name"]) for pod in served if not is_ready(pod)]
    text = f"{counted}; loading the model: {', '.join(waiting[:5])}" if waiting else counted
    return Condition(READY, "False", Reason.STARTING, text)


def _serving(resource: SpecCacheDeployment, pods: Pods, served: Sequence[Object]) -> str:
    text = f"{pods.ready} of {pods.wanted} replicas are ready"
    killed = [str(pod["metadata"]["name"]) for pod in served if was_oom_killed(pod)]
    if killed:
        text += f"; {', '.join(killed[:5])} had been killed for memory before: {_oom_remedy(resource)}"
    return text


def _explained(resource: SpecCacheDeployment, trouble: Trouble) -> str:
    if trouble.reason is Reason.OOM_KILLED:
        return f"{trouble.message}; {_oom_remedy(resource)}"
    return trouble.message


def _oom_remedy(resource: SpecCacheDeployment) -> str:
    return _OOM_REMEDY if resource.spec.memory.policy == "Auto" else _OOM_REMEDY_MANUAL


def _rank(condition: Condition) -> tuple[bool, int]:
    """Refusals before open answers; among equals, the earlier aspect first; others (a foreign object) last."""
    order = _ORDER.index(condition.type) if condition.type in _ORDER else len(_ORDER)
    return condition.status != "False", order
