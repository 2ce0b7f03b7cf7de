"""What is wrong with a pod, in one reason and one sentence. Pure, and deaf to what changes every second."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from speccache_operator.decide.conditions import Reason, head, tail
from speccache_operator.kinds import Object

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreStartHookError")
_MOST_DETAIL = 600
SCHEDULING_SECONDS = 15.0
"""A pod without a node is in trouble after this time: a new claim is bound, and a node made, while the pod waits."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One pod's trouble."""

    reason: Reason
    message: str


def worst_trouble(pods: Iterable[Object], now: datetime) -> Trouble | None:
    """The worst trouble of these pods; None when all are well or on their way."""
    found = [trouble for pod in pods if (trouble := pod_trouble(pod, now)) is not None]
    return min(found, key=lambda trouble: trouble.reason.rank, default=None)


def recheck_after(pods: Iterable[Object], now: datetime) -> float | None:
    """Seconds until a pod that waits for a node has waited too long, which no event tells; None without such a pod."""
    ages = [max(0.0, _waiting_for_node(pod, now)) for pod in pods if _unscheduled(pod) is not None]
    return min((SCHEDULING_SECONDS - age for age in ages if age < SCHEDULING_SECONDS), default=None)


def pod_trouble(pod: Object, now: datetime) -> Trouble | None:
    """The trouble of one pod that is not ready; None for one that is ready, starting or being deleted."""
    status = pod.get("status", {})
    if pod["metadata"].get("deletionTimestamp") or is_ready(pod):
        return None
    name = pod["metadata"]["name"]
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        trouble = _container_trouble(name, container)
        if trouble is not None:
            return trouble
    if status.get("phase") == "Failed":
        detail = ": ".join(part for part in (status.get("reason"), status.get("message")) if part)
        return Trouble(Reason.POD_FAILED, f"pod {name} failed: {head(detail, _MOST_DETAIL) or 'no cause given'}")
    unscheduled = _unscheduled(pod)
    if unscheduled is None or _waiting_for_node(pod, now) < SCHEDULING_SECONDS:
        return None
    return Trouble(Reason.UNSCHEDULABLE, f"no node takes pod {name}: {head(unscheduled['message'], _MOST_DETAIL)}")


def is_ready(pod: Object) -> bool:
    """True when the kubelet says so."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", ()))


def was_oom_killed(pod: Object) -> bool:
    """True when the container's last end was the kernel's, for memory."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return any((_last_end(container) or {}).get("reason") == "OOMKilled" for container in statuses)


def termination_message(pod: Object) -> str:
    """The message of a container that has ended; "" when there is none."""
    for container in pod.get("status", {}).get("containerStatuses", ()):
        ended = container.get("state", {}).get("terminated")
        if ended and ended.get("message"):
            return str(ended["message"])
    return ""


def _container_trouble(pod: str, container: Mapping[str, Any]) -> Trouble | None:
    state = container.get("state", {})
    waiting = state.get("waiting", {}).get("reason", "")
    if waiting in _PULL:
        detail = head(state["waiting"].get("message", ""), _MOST_DETAIL)
        return Trouble(
            Reason.IMAGE_PULL_FAILED,
            f"pod {pod} cannot pull image {container.get('image')} ({waiting}): {detail}; check the operator's"
            " runtime.image and its pull secrets",
        )
    if waiting in _CONFIG:
        detail = head(state["waiting"].get("message", ""), _MOST_DETAIL)
        return Trouble(Reason.CONTAINER_CONFIG_ERROR, f"pod {pod} cannot make its container ({waiting}): {detail}")
    return _end_trouble(pod, _last_end(container))


def _end_trouble(pod: str, ended: Mapping[str, Any] | None) -> Trouble | None:
    if ended is None or (ended.get("exitCode") == 0 and ended.get("reason") != "OOMKilled"):
        return None
    if ended.get("reason") == "OOMKilled":
        return Trouble(Reason.OOM_KILLED, f"pod {pod} was killed for using more memory than its limit")
    said = tail(ended.get("message", ""), _MOST_DETAIL)
    how = f"exit code {ended.get('exitCode')}"
    return Trouble(Reason.CRASH_LOOPING, f"the runtime in pod {pod} ended with {how}: {said or 'it said nothing'}")


def _last_end(container: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How the container ended last: it may be ended now, or running or waiting after an earlier end."""
    for state in (container.get("state", {}), container.get("lastState", {})):
        ended: Mapping[str, Any] | None = state.get("terminated")
        if ended is not None:
            return ended
    return None


def _waiting_for_node(pod: Object, now: datetime) -> float:
    """Seconds for which no node has taken the pod, which has none; infinite when that is not known."""
    since = (_unscheduled(pod) or {}).get("lastTransitionTime")
    return (now - datetime.fromisoformat(since)).total_seconds() if since else float("inf")


def _unscheduled(pod: Object) -> Mapping[str, Any] | None:
    """The scheduler's condition that says why the pod has no node; None when it has one, or is held back on purpose."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return None if condition.get("reason") == "SchedulingGated" else {"message": "", **condition}
    return None
