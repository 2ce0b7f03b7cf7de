"""Reading Kubernetes objects: conditions, readiness, and one line that tells a person what state an object is in."""

from collections.abc import Mapping
from typing import Any

Object = Mapping[str, Any]


def conditions(obj: Object) -> dict[str, Mapping[str, Any]]:
    """Conditions by type."""
    return {condition["type"]: condition for condition in obj.get("status", {}).get("conditions", ())}


def holds(obj: Object, kind: str) -> bool:
    """The condition is True, and about the object as it is now (where conditions say so)."""
    found = conditions(obj).get(kind, {})
    seen = found.get("observedGeneration", obj["metadata"].get("generation", 0))
    return found.get("status") == "True" and seen >= obj["metadata"].get("generation", 0)


def has_reason(obj: Object, kind: str, status: str, reason: str) -> bool:
    """The condition has this status and reason, and is about the object as it is now."""
    found = conditions(obj).get(kind, {})
    current = found.get("observedGeneration", 0) >= obj["metadata"].get("generation", 0)
    return current and (found.get("status"), found.get("reason")) == (status, reason)


def is_settled(obj: Object) -> bool:
    """A SpecCacheDeployment that serves as its spec says, with nothing on its way."""
    return holds(obj, "Ready") and has_reason(obj, "Progressing", "False", "Complete")


def is_leaving(obj: Object) -> bool:
    """Somebody has deleted it, and it is not gone yet."""
    return "deletionTimestamp" in obj["metadata"]


def summary(obj: Object) -> str:
    """The state in one line."""
    parts = [str(obj.get("status", {}).get("phase", ""))]
    for kind, condition in conditions(obj).items():
        text = f"{kind}={condition['status']}"
        if condition.get("reason"):
            text += f" ({condition['reason']}: {condition.get('message', '')})"
        parts.append(text)
    return "; ".join(part for part in parts if part) or "no status"


def pod_state(pod: Object) -> str:
    """What `kubectl get pods` would call the state of a pod."""
    if is_leaving(pod):
        return "Terminating"
    for container in pod.get("status", {}).get("containerStatuses", ()):
        for state in ("waiting", "terminated"):
            reason = container.get("state", {}).get(state, {}).get("reason")
            if reason:
                return str(reason)
    phase = str(pod.get("status", {}).get("phase", "Unknown"))
    return f"{phase}, ready" if holds(pod, "Ready") else phase
