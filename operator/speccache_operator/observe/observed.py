"""What one look at the cluster found: the only input of planning besides the resource, the image and the time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from speccache_api import names
from speccache_operator.kinds import Kind, Object, Ref, kind_of


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What pods can have of one node. `memory` is in bytes, `gpus` counts whole GPUs."""

    name: str
    memory: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Observed:
    """Objects as the API server gave them, all read after the resource was.

    `children` holds what stands at the names of children, whoever made it. `labelled` are the Jobs and records of the
    resource whose names change: inspections of any model, checks and removals of any bucket. `pods` are all pods with
    its labels. `claims` are those of storage and models that exist, by name. `volumes` are those of claims with
    ReadWriteOnce, by the claim's name, as far as they may be read. `nodes` is None when they may not be read.
    """

    children: Mapping[Ref, Object] = field(default_factory=dict)
    labelled: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    claims: Mapping[str, Object] = field(default_factory=dict)
    volumes: Mapping[str, Object] = field(default_factory=dict)
    nodes: tuple[NodeCapacity, ...] | None = None

    def at(self, ref: Ref) -> Object | None:
        """The object at a child's name, also at one that changes."""
        if ref in self.children:
            return self.children[ref]
        return next((obj for obj in self.labelled if Ref.of(obj) == ref), None)

    def named_by_label(self, kind: Kind, component: str) -> tuple[Object, ...]:
        """Objects of children that are found by their label, as their names change."""
        return tuple(obj for obj in self.labelled if kind_of(obj) is kind and _component(obj) == component)

    def pods_of(self, owner: Object | None, component: str) -> tuple[Object, ...]:
        """Pods of the component whose controller is `owner`, by name; a predecessor's pods have the same labels."""
        if owner is None:
            return ()
        uid = owner["metadata"]["uid"]
        found = [pod for pod in self.pods if _component(pod) == component and _controller_uid(pod) == uid]
        return tuple(sorted(found, key=lambda pod: str(pod["metadata"]["name"])))

    def versions(self) -> frozenset[tuple[str, str]]:
        """(uid, resourceVersion) of everything that was seen."""
        seen = (*self.children.values(), *self.labelled, *self.pods, *self.claims.values())
        return frozenset(version(obj) for obj in seen)


def version(obj: Object) -> tuple[str, str]:
    """(uid, resourceVersion): names one state of one object."""
    meta = obj["metadata"]
    return meta["uid"], meta["resourceVersion"]


def _component(obj: Object) -> str | None:
    value: str | None = obj["metadata"].get("labels", {}).get(names.LABEL_COMPONENT)
    return value


def _controller_uid(obj: Object) -> str | None:
    owners = obj["metadata"].get("ownerReferences", ())
    return next((str(ref["uid"]) for ref in owners if ref.get("controller")), None)
