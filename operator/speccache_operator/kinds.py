"""The kinds this operator talks about, and where they live in the API.

A fixed table instead of discovery: the set is closed, the paths never change, and start-up needs no extra requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speccache_api import names

Object = Mapping[str, Any]
"""A Kubernetes object as the API server gave it, or as a builder made it; never changed in place."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One resource type. `plural` is its name in URLs."""

    api_version: str
    name: str
    plural: str
    namespaced: bool = True

    @property
    def group_version(self) -> tuple[str, str]:
        """("apps", "v1"); the core group is ""."""
        group, _, version = self.api_version.rpartition("/")
        return group, version

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """URL path of one object, or of the collection when `name` is None (of all namespaces when `namespace` is)."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


RESOURCE = Kind(f"{names.API_GROUP}/{names.VERSION}", names.KIND, names.PLURAL)
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
JOB = Kind("batch/v1", "Job", "jobs")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SERVICE = Kind("v1", "Service", "services")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
POD_DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
POD = Kind("v1", "Pod", "pods")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
VOLUME = Kind("v1", "PersistentVolume", "persistentvolumes", namespaced=False)
EVENT = Kind("v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")

_BY_TYPE = {(kind.api_version, kind.name): kind for kind in list(globals().values()) if isinstance(kind, Kind)}


def kind_of(obj: Object) -> Kind:
    """The kind of an object that carries `apiVersion` and `kind`. KeyError for one outside the table: a bug here."""
    return _BY_TYPE[obj["apiVersion"], obj["kind"]]


@dataclass(frozen=True, slots=True)
class Key:
    """Names one SpecCacheDeployment; what the work queue holds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Ref:
    """Names one object."""

    kind: Kind
    namespace: str | None
    name: str

    def __str__(self) -> str:
        return f"{self.kind.name} {self.name}"

    @classmethod
    def of(cls, obj: Object) -> "Ref":
        """The name of an object that carries `apiVersion`, `kind` and `metadata`."""
        meta = obj["metadata"]
        return cls(kind_of(obj), meta.get("namespace"), meta["name"])
