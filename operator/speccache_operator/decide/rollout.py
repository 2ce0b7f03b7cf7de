"""The conditions Progressing and Ready: what the workload and its pods are doing, and the sum of everything.

Ready is True when every wanted replica serves. When it is not, its reason is the one thing to look at first: an
aspect or a child that says no, then a pod in trouble, then what is being waited for.
"""

from dataclasses import dataclass
from datetime import datetime

from speccache_api.resource import SpecCacheDeployment
from speccache_operator.children import workload
from speccache_operator.children.workload import Counts
from speccache_operator.decide.conditions import (
    CHILDREN_APPLIED,
    PROGRESSING,
    READY,
    Condition,
    Reason,
    earliest,
)
from speccache_operator.decide.pod_trouble import Trouble, is_ready, was_oom_killed, worst_trouble
from speccache_operator.kinds import Object

_OOM_REMEDY = (
    "raise spec.memory.overhead (what is not KV or weights took more than it says), or lower spec.kvCache.host"
)
_OOM_REMEDY_MANUAL = "raise resources.limits.memory, or set spec.memory.policy: Auto"


@dataclass(frozen=True, slots=True)
class State:
    """What both conditions look at: the workload after this pass, its pods, and the conditions without which no pod may
    be made or changed.
    """

    resource: SpecCacheDeployment
    live: Object | None
    served: tuple[Object, ...]
    blockers: tuple[Condition, ...]
    pods: Counts
    now: datetime

    @property
    def wanted(self) -> int:
        """The wanted replicas."""
        return self.resource.spec.wanted_replicas

    @property
    def complete(self) -> bool:
        """True when the wanted pods exist, run the newest template and are ready, and no others exist."""
        pods = self.pods
        return pods.current and pods.exist == pods.updated == pods.ready == self.wanted


def progressing(state: State) -> Condition:
    """Whether anything is on its way, and what stops it."""
    pods, first = state.pods, _first(state)
    if first is not None and first.type == CHILDREN_APPLIED:
        waiting = first.status == "Unknown"
        return Condition(PROGRESSING, "True" if waiting else "False", first.reason, first.message)
    if first is not None and first.status == "False":
        return Condition(PROGRESSING, "False", Reason.STOPPED, f"{first.type} is False: {first.message}")
    if first is not None:
        text = f"waiting for {first.type}: {first.message}"
        return Condition(PROGRESSING, "True", Reason.WAITING, text)
    if state.complete:
        return Condition(PROGRESSING, "False", Reason.COMPLETE, f"{state.wanted} of {state.wanted} pods are as planned")
    if pods.exist != state.wanted and pods.current and pods.updated == pods.exist:
        text = f"{pods.exist} pods exist, {state.wanted} are wanted"
        return Condition(PROGRESSING, "True", Reason.SCALING, text)
    text = f"{pods.updated} of {state.wanted} pods have the newest template, {pods.ready} are ready"
    return Condition(PROGRESSING, "True", Reason.ROLLING_OUT, text)


def ready(state: State) -> Condition:
    """The summary."""
    first = earliest(state.blockers)
    if first is not None and first.status == "False":
        return stopped(first, state.pods)
    if state.wanted == 0:
        return Condition(READY, "False", Reason.SCALED_TO_ZERO, "spec.replicas is 0; raise it to serve")
    if state.pods.ready >= state.wanted and (state.complete or first is not None):
        text = _serving(state)
        if first is not None:
            text += f"; a newer configuration waits for {first.type}"
        return Condition(READY, "True", Reason.SERVING, text, earlier=first is not None)
    trouble = worst_trouble(state.served, state.now)
    if trouble is not None:
        return Condition(READY, "False", trouble.reason, _explained(state, trouble))
    return _starting(state, first)


def stopped(blocker: Condition, pods: Counts) -> Condition:
    """Ready, when this condition says no."""
    earlier = pods.ready and blocker.type != CHILDREN_APPLIED
    still = f" ({pods.ready} pods of the earlier configuration still serve)" if earlier else ""
    return Condition(READY, "False", blocker.reason, blocker.message + still)


def _first(state: State) -> Condition | None:
    """What stops a rollout: a child that cannot be made before anything else, as nothing happens by itself then."""
    children = [blocker for blocker in state.blockers if blocker.type == CHILDREN_APPLIED]
    return children[0] if children else earliest(state.blockers)


def _starting(state: State, first: Condition | None) -> Condition:
    counted = f"{state.pods.ready} of {state.wanted} replicas are ready"
    if first is not None:
        return Condition(READY, "False", Reason.WAITING, f"{counted}; waiting for {first.type}: {first.message}")
    if not state.served:
        why = workload.failure(state.live) or "if it stays so, the ReplicaSet's events say why (quota, policies)"
        return Condition(READY, "False", Reason.PODS_MISSING, f"{counted}; no pod exists yet; {why}")
    if not state.pods.current or state.pods.updated < state.pods.exist:
        return Condition(READY, "False", Reason.ROLLING_OUT, f"{counted}; pods are being replaced")
    waiting = [str(pod["metadata"]["name"]) for pod in state.served if not is_ready(pod)]
    text = f"{counted}; loading the model: {', '.join(waiting[:5])}" if waiting else counted
    return Condition(READY, "False", Reason.STARTING, text)


def _serving(state: State) -> str:
    text = f"{state.pods.ready} of {state.wanted} replicas are ready"
    killed = [str(pod["metadata"]["name"]) for pod in state.served if was_oom_killed(pod)]
    if killed:
        text += f"; {', '.join(killed[:5])} had been killed for memory before: {_oom_remedy(state)}"
    return text


def _explained(state: State, trouble: Trouble) -> str:
    if trouble.reason is Reason.OOM_KILLED:
        return f"{trouble.message}; {_oom_remedy(state)}"
    if trouble.reason is Reason.UNSCHEDULABLE and state.pods.ready:
        return (
            f"{trouble.message}; {state.pods.ready} earlier pods serve until it is ready. Free room for one pod more,"
            " or scale to 0 and back"
        )
    return trouble.message


def _oom_remedy(state: State) -> str:
    return _OOM_REMEDY if state.resource.spec.memory.policy == "Auto" else _OOM_REMEDY_MANUAL
