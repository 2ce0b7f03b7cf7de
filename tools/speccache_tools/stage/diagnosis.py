"""Everything that explains why a resource is not what it should be, as text."""

from speccache_tools.stage import release
from speccache_tools.stage.kube import SCD, CommandFailed, Object
from speccache_tools.stage.objects import conditions
from speccache_tools.stage.venue import Venue

_OBJECTS = (
    "get",
    "deployments,replicasets,pods,jobs,pvc,configmaps,poddisruptionbudgets,networkpolicies",
    "--output=wide",
)
_EVENTS = (
    "get",
    "events",
    "--sort-by=.metadata.creationTimestamp",
    "--output=custom-columns=TIME:.metadata.creationTimestamp,LAST:.lastTimestamp,TYPE:.type,REASON:.reason,"
    "KIND:.involvedObject.kind,NAME:.involvedObject.name,MESSAGE:.message",
)


def explain(venue: Venue, namespace: str) -> str:
    """Conditions, objects, events and logs of a namespace and of the operator's."""
    parts = {"conditions": _conditions(venue, namespace)}
    for where in (namespace, release.NAMESPACE):
        parts[f"objects of {where}"] = _said(venue, *_OBJECTS, namespace=where)
        parts[f"events of {where}"] = _said(venue, *_EVENTS, namespace=where)
        parts |= _logs(venue, where)
    return "\n".join(f"--- {title}\n{text.rstrip()}" for title, text in parts.items()) + "\n"


def _conditions(venue: Venue, namespace: str) -> str:
    lines = []
    for resource in _listed(venue, SCD, namespace):
        meta = resource["metadata"]
        lines.append(f"{meta['name']} (generation {meta['generation']})")
        for kind, found in conditions(resource).items():
            seen = found.get("observedGeneration")
            lines.append(f"  {kind:15} {found['status']:8} {found['reason']} (of {seen}): {found['message']}")
    return "\n".join(lines) or "no SpecCacheDeployment"


def _logs(venue: Venue, namespace: str) -> dict[str, str]:
    parts = {}
    for pod in _listed(venue, "pods", namespace):
        name = pod["metadata"]["name"]
        parts[f"log of {name}"] = _said(venue, "logs", name, "--tail=60", namespace=namespace)
        restarts = [container["restartCount"] for container in pod.get("status", {}).get("containerStatuses", ())]
        if any(restarts):
            before = _said(venue, "logs", name, "--previous", "--tail=60", namespace=namespace)
            parts[f"log of {name} before its last restart ({restarts})"] = before
    return parts


def _listed(venue: Venue, kind: str, namespace: str) -> list[Object]:
    try:
        return venue.kubectl.list(kind, namespace)
    except CommandFailed:
        return []


def _said(venue: Venue, *arguments: str, namespace: str) -> str:
    """What kubectl says, be it an error: a diagnosis must not fail."""
    try:
        return venue.kubectl(*arguments, namespace=namespace)
    except CommandFailed as error:
        return error.said
