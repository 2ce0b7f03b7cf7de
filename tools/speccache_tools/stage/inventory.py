"""All objects of a cluster, so that "nothing is left behind" can be said of kinds that nobody thought of."""

from speccache_tools.stage.kube import Kubectl

_PASSING = {"events", "events.events.k8s.io", "componentstatuses"}
"""Kinds that come and go by themselves."""

_CONTROL_PLANE = ("kube-system", "kube-node-lease")
"""Their Leases belong to API servers and nodes, which may be started anew at any time."""


def inventory(kubectl: Kubectl) -> frozenset[str]:
    """Every object as `kind namespace/name`."""
    kinds = set(kubectl("api-resources", "--verbs=list", "--output=name").split()) - _PASSING
    columns = "custom-columns=KIND:.kind,GROUP:.apiVersion,NAMESPACE:.metadata.namespace,NAME:.metadata.name"
    text = kubectl("get", ",".join(sorted(kinds)), "--all-namespaces", f"--output={columns}", "--no-headers")
    found = set()
    for line in text.splitlines():
        kind, group, namespace, name = line.split()
        if kind == "Lease" and namespace in _CONTROL_PLANE:
            continue
        found.add(f"{kind}.{group} {namespace}/{name}".replace("<none>/", ""))
    return frozenset(found)
