"""What one look at the cluster found: the only input of planning besides the resource, the image and the time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from speccache_api import names
from speccache_operator.kinds import Object, Ref


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What pods can have of one node. `memory` is in bytes, `gpus` counts whole GPUs."""

    name: str
    memory: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Observed:
    """Objects as the API server gave them, all read after the resource was.

    `children` holds what stands at the names of children, whoever made it. `inspections` are inspection Jobs and
    records of the resource, of any model. `pods` are all pods with its labels. `claims` are those of storage and models
    that exist, by name. `volumes` are those of claims with ReadWriteOnce, by the claim's name, as far as they may be
    read. `nodes` is None when they may not be read.
    """

    children: Mapping[Ref, Object] = field(default_factory=dict)
    inspections: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    claims: Mapping[str, Object] = field(default_factory=dict)
    volumes: Mapping[str, Object] = field(default_factory=dict)
    nodes: tuple[NodeCapacity, ...] | None = None

    def at(self, ref: Ref) -> Object | None:
        """The object at a child's name, inspections included."""
        if ref in self.children:
            return self.children[ref]
        return next((obj for obj in self.inspections if Ref.of(obj) == ref), None)

    def pods_of(self, owner: Object | None, component: str) -> tuple[Object, ...]:
        """Pods of the component whose controller is `owner`, by name; a predecessor's pods have the same labels."""
        if owner is None:
            return ()
        uid = owner["metadata"]["uid"]
        found = [pod for pod in self.pods if _component(pod) == component and _controller_uid(pod) == uid]
        return tuple(sorted(found, key=lambda pod: str(pod["metadata"]["name"])))

    def versions(self) -> frozenset[tuple[str, str]]:
        """(uid, resourceVersion) of everything that was seen."""
        seen = (*self.children.values(), *self.inspections, *self.pods, *self.claims.values())
        return frozenset(version(obj) for obj in seen)


def version(obj: Object) -> tuple[str, str]:
    """(uid, resourceVersion): names one state of one object."""
    meta = obj["metadata"]
    return meta["uid"], meta["resourceVersion"]


def _component(pod: Object) -> str | None:
    value: str | None = pod["metadata"].get("labels", {}).get(names.LABEL_COMPONENT)
    return value


def _controller_uid(obj: Object) -> str | None:
    owners = obj["metadata"].get("ownerReferences", ())
    return next((str(ref["uid"]) for ref in owners if ref.get("controller")), None)
