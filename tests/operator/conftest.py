"""The operator's parts without a cluster: a state goes in, a plan comes out; time is virtual.

In: deciding, building, queueing, electing. Out: what an API server makes of it (tests/apiserver/operator).
"""

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from speccache_api import names
from speccache_api.geometry import Inspection, KVGeometry, ModelFacts
from speccache_api.resource import SpecCacheDeployment
from speccache_operator.children.context import RuntimeImage
from speccache_operator.decide.plan import Plan, judge, make_plan
from speccache_operator.kinds import Key, Object, Ref
from speccache_operator.observe.observed import Observed

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.fixture
def now() -> datetime:
    return NOW


@pytest.fixture
def image() -> RuntimeImage:
    return RuntimeImage("runtime:1")


@pytest.fixture
def raw() -> Callable[..., dict[str, Any]]:
    """`raw(**{"spec.path": value})`: a small valid resource as the API server stores it, with these fields set.

    A value of None removes the field.
    """

    def make(**fields: Any) -> dict[str, Any]:
        resource: dict[str, Any] = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": "chat", "namespace": "demo", "uid": "u-1", "generation": 3, "resourceVersion": "7"},
            "spec": {
                "model": {"uri": "builtin://tiny"},
                "speculative": {"algorithm": "EAGLE3", "draftModel": {"uri": "builtin://tiny"}},
                "kvCache": {"device": {"tokens": 4096}, "host": {"tokens": 8192}},
            },
        }
        for path, value in fields.items():
            at = resource
            *parents, last = path.split(".")
            for parent in parents:
                at = at.setdefault(parent, {})
            at.pop(last, None)
            if value is not None:
                at[last] = copy.deepcopy(value)
        return resource

    return make


@pytest.fixture
def resource(raw: Any) -> Callable[..., SpecCacheDeployment]:
    """The same, parsed."""
    return lambda **fields: SpecCacheDeployment.parse(raw(**fields))


@pytest.fixture
def plan(image: RuntimeImage) -> Callable[..., Plan]:
    """Plan for a plain resource in an observed state."""

    def make(resource: dict[str, Any], observed: Observed | None = None, now: datetime = NOW) -> Plan:
        key = Key(resource["metadata"]["namespace"], resource["metadata"]["name"])
        return make_plan(key, judge(resource), observed or Observed(), image, now)

    return make


@pytest.fixture
def live() -> Callable[..., Object]:
    """What the API server makes of a planned object: `live(obj, uid=..., status=..., **defaults in spec)`."""

    def make(obj: Object, *, uid: str = "", status: Any = None, **spec: Any) -> Object:
        result: dict[str, Any] = copy.deepcopy(dict(obj))
        identity = f"{obj['kind']}-{obj['metadata']['name']}"
        result["metadata"] |= {"uid": uid or identity, "resourceVersion": "1", "generation": 1}
        if spec:
            result["spec"] = {**result.get("spec", {}), **spec}
        if status is not None:
            result["status"] = status
        return result

    return make


@pytest.fixture
def applied(live: Any) -> Callable[..., Observed]:
    """The state after a plan was carried out and the controllers did their work.

    `ready` pods of the StatefulSet are ready; `pods`, `claims` and `nodes` are added as they are.
    """

    def make(
        plan: Plan, *, ready: int = 1, pods: tuple[Object, ...] = (), nodes: Any = None, **claims: Object
    ) -> Observed:
        children: dict[Ref, Object] = {}
        inspections = []
        for step in plan.apply:
            obj = live(step.obj, status=_status(step.obj, ready))
            if obj["metadata"]["labels"][names.LABEL_COMPONENT] == names.COMPONENT_INSPECTION:
                inspections.append(obj)
            else:
                children[Ref.of(obj)] = obj
            if obj["kind"] == "PersistentVolumeClaim":
                claims[obj["metadata"]["name"]] = obj
        return Observed(children, tuple(inspections), pods, claims, nodes)

    return make


def _status(obj: Object, ready: int) -> dict[str, Any]:
    if obj["kind"] == "PersistentVolumeClaim":
        return {"phase": "Bound"}
    if obj["kind"] != "StatefulSet":
        return {}
    wanted = obj["spec"]["replicas"]
    revisions = {"currentRevision": "a", "updateRevision": "a"}
    counts = {"replicas": wanted, "readyReplicas": ready, "updatedReplicas": wanted}
    return {"observedGeneration": 1, **revisions, **counts}


@pytest.fixture
def pod() -> Callable[..., Object]:
    """A pod of the StatefulSet `chat`, or of the object with the uid `owner`."""

    def make(
        name: str = "chat-0",
        *,
        owner: str = "StatefulSet-chat",
        component: str = names.COMPONENT_SERVER,
        ready: bool = False,
        phase: str = "Running",
        conditions: Any = (),
        **container: Any,
    ) -> Object:
        states = [{"type": "Ready", "status": "True" if ready else "False"}, *conditions]
        status: dict[str, Any] = {"phase": phase, "conditions": states}
        if container:
            status["containerStatuses"] = [{"name": "runtime", "image": "runtime:1", **container}]
        labels = names.object_labels("chat", component)
        reference = {"kind": "X", "name": "x", "uid": owner, "controller": True}
        meta = {"name": name, "uid": name, "resourceVersion": "1", "labels": labels, "ownerReferences": [reference]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}

    return make


@pytest.fixture
def claim() -> Callable[..., Object]:
    """A claim that somebody made."""

    def make(name: str, *modes: str, phase: str = "Bound", **meta: Any) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": "demo", "uid": name, "resourceVersion": "1", **meta},
            "spec": {"accessModes": list(modes or ("ReadWriteOnce",)), "resources": {"requests": {"storage": "1Gi"}}},
            "status": {"phase": phase},
        }

    return make


@pytest.fixture
def inspected() -> Inspection:
    """A Llama-3.1-8B-shaped pair."""
    return Inspection(
        target=ModelFacts(KVGeometry.heads(32, 8, 128), 8 * 10**9, 4096, 128256, 8192, "ab" * 32, "llama"),
        draft=ModelFacts(KVGeometry.heads(1, 8, 128), 4 * 10**8, 4096, 32000, 2048, "cd" * 32, "eagle3"),
    )


@pytest.fixture
def condition() -> Callable[[Plan, str], Any]:
    """The condition of a type in a plan."""
    return lambda plan, kind: next(c for c in plan.conditions if c.type == kind)
