"""May two pods of a resource run at the same time, wherever they are put?

Then a new one can serve before an old one ends.

A bucket is no matter of nodes. Otherwise it depends on every claim that they mount. ReadWriteOnce means one node: a
volume that may be attached to any node keeps the second pod waiting, wherever the scheduler puts it; one that only a
single node can reach brings both pods there.
"""

from collections.abc import Mapping
from typing import Any

from speccache_api.resource import SpecCacheDeployment
from speccache_api.storage_target import VolumeTarget, resolve
from speccache_operator.children.mounts import model_mounts
from speccache_operator.kinds import Object
from speccache_operator.observe.observed import Observed

_HOSTNAME = "kubernetes.io/hostname"
_MANY = {"ReadWriteMany", "ReadOnlyMany"}


def look(resource: SpecCacheDeployment, observed: Observed) -> bool:
    """True when everything that a pod mounts can be mounted by another one too. False while it is not known. Pure."""
    claims = [mount.claim for mount in model_mounts(resource.spec)]
    return all(_shared(name, observed) for name in claims) and _storage_shared(resource, observed)


def _storage_shared(resource: SpecCacheDeployment, observed: Observed) -> bool:
    storage, target = resource.spec.kv_cache.storage, resolve(resource)
    if storage is None or storage.persistent_volume_claim is None or not isinstance(target, VolumeTarget):
        return True
    name, wanted = target.claim, storage.persistent_volume_claim
    if name not in observed.claims and wanted.created:
        return "ReadWriteMany" in wanted.modes
    return _shared(str(name), observed)


def _shared(name: str, observed: Observed) -> bool:
    claim, volume = observed.claims.get(name), observed.volumes.get(name)
    modes = set(claim["spec"].get("accessModes", ())) if claim is not None else set()
    return bool(modes & _MANY) or ("ReadWriteOnce" in modes and volume is not None and _of_one_node(volume))


def _of_one_node(volume: Object) -> bool:
    """True when every way to reach the volume leads to the same, named, node."""
    terms = volume["spec"].get("nodeAffinity", {}).get("required", {}).get("nodeSelectorTerms", ())
    nodes = [_nodes(term) for term in terms]
    return bool(nodes) and all(nodes) and len(set().union(*nodes)) == 1


def _nodes(term: Mapping[str, Any]) -> set[str]:
    """Names of the nodes that one term leaves; empty when it does not name them."""
    named = [set(e.get("values", ())) for e in term.get("matchExpressions", ()) if _names_nodes(e)]
    return set.intersection(*named) if named else set()


def _names_nodes(expression: Mapping[str, Any]) -> bool:
    return bool(expression["key"] == _HOSTNAME and expression["operator"] == "In")
