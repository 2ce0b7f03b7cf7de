"""The operator's parts without a cluster: a state goes in, a plan comes out; time is virtual.

In: deciding, building, queueing, electing. Out: what an API server makes of it (tests/apiserver/operator).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from speccache_api import names
from speccache_api.geometry import Inspection, KVGeometry, ModelFacts
from speccache_api.resource import SpecCacheDeployment
from speccache_operator.children.context import RuntimeImage
from speccache_operator.decide import verdict
from speccache_operator.decide.conditions import Condition
from speccache_operator.decide.drift import spec_drifted
from speccache_operator.decide.judge import judge
from speccache_operator.decide.plan import Plan, make_plan
from speccache_operator.decide.steps import Apply, Cause, Delete, Outcome, Scale
from speccache_operator.kinds import Object, Ref
from speccache_operator.observe.observed import Observed

LABELLED = (names.COMPONENT_INSPECTION, names.COMPONENT_STORAGE_CHECK, names.COMPONENT_STORAGE_REMOVAL)
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


@dataclass(frozen=True)
class Pass:
    """A plan, and the conditions after an API server took everything as it was sent."""

    plan: Plan
    conditions: tuple[Condition, ...]

    @property
    def apply(self) -> tuple[Apply, ...]:
        return self.plan.apply

    @property
    def scale(self) -> Scale | None:
        return self.plan.scale

    @property
    def delete(self) -> tuple[Delete, ...]:
        return self.plan.delete

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.plan.facts

    @property
    def again_after(self) -> float | None:
        return self.plan.again_after


@pytest.fixture
def plan(image: RuntimeImage) -> Callable[..., Pass]:
    """Plan for a plain resource in an observed state, and what is said of it."""

    def make(resource: dict[str, Any], observed: Observed | None = None, now: datetime = NOW) -> Pass:
        judged, observed = judge(resource), observed or Observed()
        made = make_plan(judged, observed, image, now)
        return Pass(made, verdict.conditions(judged, made, _outcome(made, observed), observed, now))

    return make


def _outcome(plan: Plan, observed: Observed) -> Outcome:
    """An API server raises the generation of what really changes; the status is the controllers' and stays."""
    objects: dict[Ref, Object] = {}
    for step in plan.apply:
        ref = Ref.of(step.obj)
        live = observed.at(ref)
        generation = live["metadata"]["generation"] if live is not None else 0
        if live is None or step.cause is Cause.UPDATED or spec_drifted(live, step.obj):
            generation += 1
        meta = {**step.obj["metadata"], "generation": generation}
        objects[ref] = {**step.obj, "metadata": meta, "status": live.get("status", {}) if live is not None else {}}
    if plan.scale is not None:
        live = objects.get(plan.scale.ref) or observed.at(plan.scale.ref)
        assert live is not None
        meta = {**live["metadata"], "generation": live["metadata"]["generation"] + 1}
        objects[plan.scale.ref] = {**live, "metadata": meta}
    return Outcome(objects)


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

    `ready` pods of the Deployment are ready; `pods`, `claims` and `nodes` are added as they are.
    """

    def make(
        plan: Pass, *, ready: int = 1, pods: tuple[Object, ...] = (), nodes: Any = None, **claims: Object
    ) -> Observed:
        children: dict[Ref, Object] = {}
        labelled = []
        for step in plan.apply:
            obj = live(step.obj, status=_status(step.obj, ready))
            if obj["metadata"]["labels"][names.LABEL_COMPONENT] in LABELLED:
                labelled.append(obj)
            else:
                children[Ref.of(obj)] = obj
            if obj["kind"] == "PersistentVolumeClaim":
                claims[obj["metadata"]["name"]] = obj
        return Observed(children, tuple(labelled), pods, claims, nodes=nodes)

    return make


def _status(obj: Object, ready: int) -> dict[str, Any]:
    if obj["kind"] == "PersistentVolumeClaim":
        return {"phase": "Bound"}
    if obj["kind"] != "Deployment":
        return {}
    wanted = obj["spec"]["replicas"]
    return {"observedGeneration": 1, "replicas": wanted, "readyReplicas": ready, "updatedReplicas": wanted}


@pytest.fixture
def pod() -> Callable[..., Object]:
    """A pod of the resource `chat` with this uid, or one whose controller has the uid `owner`."""

    def make(
        name: str = "chat-0",
        *,
        owner: str = "ReplicaSet-chat",
        resource: str = "u-1",
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
        if component == names.COMPONENT_SERVER:
            labels[names.LABEL_RESOURCE_UID] = resource
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
def condition() -> Callable[[Pass, str], Any]:
    """The condition of a type in a plan."""
    return lambda plan, kind: next(c for c in plan.conditions if c.type == kind)
