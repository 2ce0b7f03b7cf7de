"""Planning as transitions: a frozen state in, a frozen plan out."""

import copy
import dataclasses
from typing import Any

import pytest

from speccache_api import names
from speccache_api.status import CONDITION_TYPES, Status
from speccache_operator.decide.conditions import Reason
from speccache_operator.decide.plan import WAIT_FOR_DELETION_SECONDS
from speccache_operator.decide.steps import Cause
from speccache_operator.kinds import (
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    Ref,
)
from speccache_operator.observe.observed import NodeCapacity, Observed

GIB = 2**30
STORAGE = {"spec.kvCache.storage": {"persistentVolumeClaim": {"size": "1Gi"}}}
NAMED = {"spec.kvCache.storage": {"persistentVolumeClaim": {"claimName": "mine"}}}


def _written(plan: Any) -> list[tuple[str, str]]:
    return [(step.obj["kind"], step.obj["metadata"]["name"]) for step in plan.apply]


def test_a_new_resource_gets_its_children_in_the_order_of_need(plan: Any, raw: Any) -> None:
    assert _written(plan(raw(**STORAGE))) == [
        ("ServiceAccount", "chat-runtime"),
        ("Service", "chat"),
        ("Service", "chat-pods"),
        ("PersistentVolumeClaim", "chat-kv"),
        ("ConfigMap", "chat-wire"),
        ("Deployment", "chat"),
    ]
    assert {step.cause for step in plan(raw()).apply} == {Cause.CREATED}


def test_without_storage_there_is_no_claim(plan: Any, raw: Any) -> None:
    assert "PersistentVolumeClaim" not in dict(_written(plan(raw())))


def test_a_named_claim_is_not_made(plan: Any, raw: Any, claim: Any) -> None:
    assert "PersistentVolumeClaim" not in dict(_written(plan(raw(**NAMED), Observed(claims={"mine": claim("mine")}))))


def test_a_state_as_planned_needs_nothing(plan: Any, raw: Any, applied: Any) -> None:
    first = plan(raw(**STORAGE))
    again = plan(raw(**STORAGE), applied(first))
    assert again.apply == ()
    assert again.delete == ()
    assert again.again_after is None


def test_conditions_are_complete_and_in_their_order(plan: Any, raw: Any) -> None:
    for resource in (raw(), raw(**STORAGE), raw(**NAMED), raw(**{"spec.kvCache.pageSize": 7})):
        assert tuple(c.type for c in plan(resource).conditions) == CONDITION_TYPES


def test_facts_fit_the_status_schema(plan: Any, raw: Any) -> None:
    facts = plan(raw(**STORAGE)).facts
    Status.model_validate(facts)
    assert facts["storage"] == "chat-kv"
    assert facts["memory"]["hostPages"] == 8192 // 64
    assert facts["selector"] == ",".join(f"{k}={v}" for k, v in names.selector_labels("chat").items())


def test_the_same_input_gives_the_same_plan(plan: Any, raw: Any, applied: Any) -> None:
    state = applied(plan(raw(**STORAGE)))
    assert plan(raw(), copy.deepcopy(state)) == plan(raw(), state)


def test_the_input_is_not_changed(plan: Any, raw: Any, applied: Any) -> None:
    resource, state = raw(**STORAGE), applied(plan(raw(**STORAGE)))
    before = copy.deepcopy((resource, state))
    plan(resource, state)
    assert (resource, state) == before


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({"spec.kvCache.host": {"tokens": 640}}, {("ConfigMap", "chat-wire"), ("Deployment", "chat")}),
        ({"spec.drain": {"requestTimeoutSeconds": 5}}, {("ConfigMap", "chat-wire"), ("Deployment", "chat")}),
        ({"spec.resources": {"limits": {"cpu": "2"}}}, {("Deployment", "chat")}),
        ({"spec.memory": {"overhead": "3Gi"}}, {("Deployment", "chat")}),
        ({"spec.speculative": None}, {("ConfigMap", "chat-wire"), ("Deployment", "chat")}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_change_writes_what_it_concerns(
    fields: dict[str, Any], written: set[tuple[str, str]], plan: Any, raw: Any, applied: Any
) -> None:
    changed = plan(raw(**fields), applied(plan(raw())))
    assert set(_written(changed)) == written
    assert {step.cause for step in changed.apply} == {Cause.UPDATED}
    assert all(step.uid == f"{step.obj['kind']}-{step.obj['metadata']['name']}" for step in changed.apply)


@pytest.mark.parametrize(
    ("ref", "path", "value"),
    [
        (Ref(SERVICE, "demo", "chat"), ("spec", "selector"), {}),
        (Ref(SERVICE, "demo", "chat"), ("spec", "selector", "more"), "x"),
        (Ref(SERVICE, "demo", "chat"), ("spec", "ports"), [{"name": "http", "port": 9999}]),
        (Ref(SERVICE, "demo", "chat-pods"), ("spec", "clusterIP"), "10.0.0.1"),
        (Ref(CONFIG_MAP, "demo", "chat-wire"), ("data", names.WIRE_KEY), "{}"),
        (Ref(SERVICE_ACCOUNT, "demo", "chat-runtime"), ("automountServiceAccountToken",), True),
        (Ref(DEPLOYMENT, "demo", "chat"), ("spec", "template", "spec", "terminationGracePeriodSeconds"), 1),
        (Ref(DEPLOYMENT, "demo", "chat"), ("metadata", "labels"), {}),
        (Ref(CLAIM, "demo", "chat-kv"), ("spec", "resources", "requests", "storage"), "1Mi"),
    ],
    ids=str,
)
def test_drift_is_repaired(ref: Ref, path: tuple[str, ...], value: Any, plan: Any, raw: Any, applied: Any) -> None:
    state = applied(plan(raw(**STORAGE)))
    at: Any = state.children[ref]
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    (step,) = plan(raw(**STORAGE), state).apply
    assert (Ref.of(step.obj), step.cause) == (ref, Cause.REPAIRED)


def test_a_child_that_is_gone_is_made_again(plan: Any, raw: Any, applied: Any) -> None:
    state = applied(plan(raw()))
    for ref in state.children:
        rest = {other: obj for other, obj in state.children.items() if other != ref}
        (step,) = plan(raw(), dataclasses.replace(state, children=rest)).apply
        assert (Ref.of(step.obj), step.cause, step.uid) == (ref, Cause.CREATED, None)


def test_a_claim_that_somebody_enlarged_stays_large(plan: Any, raw: Any, applied: Any) -> None:
    state = applied(plan(raw(**STORAGE)))
    state.children[Ref(CLAIM, "demo", "chat-kv")]["spec"]["resources"]["requests"]["storage"] = "5Gi"
    after = plan(raw(**STORAGE), state)
    for step in after.apply:
        assert step.obj["spec"]["resources"]["requests"]["storage"] == "5Gi"


FOREIGN = {"ownerReferences": [{"kind": "Other", "name": "x", "uid": "u-9", "controller": True}]}
CHANGED = {"spec.kvCache.host": {"tokens": 640}}  # another wire document, so another template
EVERYTHING = {"spec.podDisruptionBudget": {"maxUnavailable": 1}, "spec.networkPolicy": {}}


@pytest.mark.parametrize("meta", [{"ownerReferences": []}, FOREIGN], ids=["nobody's", "another's"])
@pytest.mark.parametrize(
    ("ref", "stopped"),
    [
        (Ref(SERVICE, "demo", "chat"), {"Service"}),
        (Ref(SERVICE_ACCOUNT, "demo", "chat-runtime"), {"ServiceAccount", "Deployment"}),
        (Ref(CONFIG_MAP, "demo", "chat-wire"), {"ConfigMap", "Deployment"}),
        (Ref(DEPLOYMENT, "demo", "chat"), {"Deployment"}),
    ],
    ids=lambda value: value.kind.name if isinstance(value, Ref) else "",
)
def test_a_foreign_object_stops_its_child_and_pods_that_need_it(
    meta: dict[str, Any], ref: Ref, stopped: set[str], plan: Any, raw: Any, applied: Any, condition: Any
) -> None:
    state = applied(plan(raw()))
    children = {at: obj for at, obj in state.children.items() if at == ref}
    children[ref]["metadata"].update(meta)
    after = plan(raw(), dataclasses.replace(state, children=children))
    everything = [step for step in _written(plan(raw())) if step != (ref.kind.name, ref.name)]
    assert _written(after) == [step for step in everything if step[0] != "Deployment" or "Deployment" not in stopped]
    for kind in ("ChildrenApplied", "Progressing", "Ready"):
        assert condition(after, kind).reason is Reason.OBJECT_NOT_OWNED
        assert str(ref) in condition(after, kind).message
        assert condition(after, kind).status == "False"


@pytest.mark.parametrize("kind", [POD_DISRUPTION_BUDGET, NETWORK_POLICY], ids=lambda kind: kind.name)
def test_a_foreign_object_in_the_place_of_an_optional_child_is_told_and_pods_serve(
    kind: Any, plan: Any, raw: Any, applied: Any, condition: Any
) -> None:
    state = applied(plan(raw(**EVERYTHING)))
    state.children[Ref(kind, "demo", "chat")]["metadata"].update(FOREIGN)
    after = plan(raw(**EVERYTHING), state)
    assert condition(after, "ChildrenApplied").reason is Reason.OBJECT_NOT_OWNED
    assert f"{kind.name} chat" in condition(after, "ChildrenApplied").message
    assert condition(after, "Ready").status == "True"
    assert condition(after, "Progressing").reason is Reason.COMPLETE


def test_children_of_a_deleted_predecessor_are_waited_for(plan: Any, raw: Any, applied: Any, condition: Any) -> None:
    state = applied(plan(raw()))
    after = plan(raw(**{"metadata.uid": "u-2"}), state)
    assert after.apply == ()
    assert condition(after, "Progressing").reason is Reason.WAITING_FOR_DELETION
    assert after.again_after == WAIT_FOR_DELETION_SECONDS


def test_a_child_that_is_being_deleted_is_waited_for(plan: Any, raw: Any, applied: Any, condition: Any) -> None:
    state = applied(plan(raw()))
    state.children[Ref(SERVICE, "demo", "chat")]["metadata"]["deletionTimestamp"] = "2026-11-21T11:00:00Z"
    after = plan(raw(), state)
    assert condition(after, "Progressing").reason is Reason.WAITING_FOR_DELETION


@pytest.mark.parametrize(
    ("field", "kind"),
    [("spec.podDisruptionBudget", POD_DISRUPTION_BUDGET), ("spec.networkPolicy", NETWORK_POLICY)],
)
def test_an_optional_child_is_made_changed_and_deleted_with_its_field(
    field: str, kind: Any, plan: Any, raw: Any, applied: Any
) -> None:
    values: list[Any] = [{"maxUnavailable": 1}, {"minAvailable": "50%"}]
    if kind is NETWORK_POLICY:
        values = [{}, {"egress": "Deny"}]
    on = plan(raw(**{field: values[0]}), applied(plan(raw())))
    assert _written(on) == [(kind.name, "chat")]
    state = applied(plan(raw(**{field: values[0]})))
    changed = plan(raw(**{field: values[1]}), state)
    assert [(step.obj["kind"], step.cause) for step in changed.apply] == [(kind.name, Cause.UPDATED)]
    off = plan(raw(), state)
    assert off.apply == ()
    assert [step.ref for step in off.delete] == [Ref(kind, "demo", "chat")]
    state.children[Ref(kind, "demo", "chat")]["metadata"].update(FOREIGN)
    assert plan(raw(), state).delete == ()


REPLICAS = {"spec.replicas": 2}


def test_another_number_of_replicas_is_a_write_of_that_alone(plan: Any, raw: Any, applied: Any) -> None:
    state = applied(plan(raw()))
    after = plan(raw(**REPLICAS), state)
    assert after.apply == ()
    assert (after.scale.before, after.scale.replicas) == (1, 2)
    state.children[Ref(DEPLOYMENT, "demo", "chat")]["spec"]["replicas"] = 9
    assert (plan(raw(), state).apply, plan(raw(), state).scale.replicas) == ((), 1)


def test_a_new_template_keeps_the_number_of_pods_until_it_is_applied(plan: Any, raw: Any, applied: Any) -> None:
    state = applied(plan(raw(**REPLICAS)))
    for wanted, applied_with in ((5, 2), (2, 2), (0, 0)):
        after = plan(raw(**CHANGED, **{"spec.replicas": wanted}), state)
        (deployment,) = [step.obj for step in after.apply if step.obj["kind"] == "Deployment"]
        assert deployment["spec"]["replicas"] == applied_with
        assert (after.scale.replicas if after.scale else 2) == wanted


def test_without_replicas_one_is_wanted(plan: Any, raw: Any, applied: Any, condition: Any) -> None:
    assert "replicas" not in raw()["spec"]
    (deployment,) = [step.obj for step in plan(raw()).apply if step.obj["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == 1
    assert plan(raw(**{"spec.replicas": 1}), applied(plan(raw()))).scale is None


def test_a_stateful_set_of_an_earlier_operator_goes_when_the_deployment_serves(
    plan: Any, raw: Any, applied: Any, live: Any
) -> None:
    state = applied(plan(raw()), ready=0)
    deployment = state.children[Ref(DEPLOYMENT, "demo", "chat")]
    old = Ref(STATEFUL_SET, "demo", "chat")
    meta = {**deployment["metadata"], "uid": "old"}
    state.children[old] = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": {}}
    assert plan(raw(), state).delete == ()
    deployment["status"]["readyReplicas"] = 1
    assert [step.ref for step in plan(raw(), state).delete] == [old]
    too_big = dataclasses.replace(state, nodes=(NodeCapacity("n", GIB),))
    assert plan(raw(), too_big).delete == (), "a stop leaves what runs"


def test_a_retained_claim_is_taken_up_by_a_new_resource_of_the_name(
    plan: Any, raw: Any, applied: Any, condition: Any
) -> None:
    claim = applied(plan(raw(**STORAGE))).children[Ref(CLAIM, "demo", "chat-kv")]
    state = Observed(children={Ref.of(claim): claim}, claims={"chat-kv": claim})
    after = plan(raw(**STORAGE, **{"metadata.uid": "u-2"}), state)
    assert condition(after, "StorageReady").reason is Reason.CLAIM_BOUND
    assert ("Deployment", "chat") in _written(after)
    assert ("PersistentVolumeClaim", "chat-kv") not in _written(after)


def test_a_foreign_claim_is_left_alone_and_no_pod_is_made(plan: Any, raw: Any, claim: Any, condition: Any) -> None:
    foreign = claim("chat-kv")
    after = plan(raw(**STORAGE), Observed(children={Ref.of(foreign): foreign}, claims={"chat-kv": foreign}))
    assert condition(after, "StorageReady").reason is Reason.CLAIM_NOT_OWNED
    assert not {"PersistentVolumeClaim", "Deployment", "ConfigMap"} & set(dict(_written(after)))


def test_removing_the_storage_tier_never_deletes_its_claim(plan: Any, raw: Any, applied: Any) -> None:
    after = plan(raw(), applied(plan(raw(**STORAGE))))
    assert after.delete == ()
    assert ("Deployment", "chat") in _written(after)


STOPS: list[tuple[str, dict[str, Any], dict[str, Any], str, Reason, str]] = [
    ("unknown field", {"spec.sise": 1}, {}, "ConfigValid", Reason.INVALID_RESOURCE, "spec.sise"),
    ("page size", {"spec.kvCache.pageSize": 48}, {}, "ConfigValid", Reason.INVALID_RESOURCE, "spec.kvCache.pageSize"),
    ("no tier", {"spec.kvCache.host": {}}, {}, "ConfigValid", Reason.INVALID_RESOURCE, "exactly one"),
    ("a float", {"spec.replicas": 1.5}, {}, "ConfigValid", Reason.INVALID_RESOURCE, "spec.replicas"),
    ("no spec", {"spec": None}, {}, "ConfigValid", Reason.INVALID_RESOURCE, "spec"),
    ("a list", {"spec": []}, {}, "ConfigValid", Reason.INVALID_RESOURCE, "spec"),
    ("long name", {"metadata.name": "x" * 60}, {}, "ConfigValid", Reason.INVALID_RESOURCE, "metadata.name"),
    (
        "fraction on the CPU",
        {"spec.kvCache.device": {"memoryFraction": "0.8"}},
        {},
        "ConfigValid",
        Reason.INVALID_RESOURCE,
        "memoryFraction",
    ),
    (
        "memory given while computed",
        {"spec.resources": {"limits": {"memory": "1Gi"}}},
        {},
        "ConfigValid",
        Reason.INVALID_RESOURCE,
        "memory.policy",
    ),
    ("small tier", {"spec.kvCache.host": {"size": "1Ki"}}, {}, "MemorySized", Reason.TIER_TOO_SMALL, "host.size"),
    (
        "small node",
        {},
        {"nodes": (NodeCapacity("n1", GIB),)},
        "MemorySized",
        Reason.EXCEEDS_NODE_ALLOCATABLE,
        "lower spec.kvCache.host, or add",
    ),
    (
        "own limit, small node",
        {"spec.memory": {"policy": "Manual"}, "spec.resources": {"limits": {"memory": "200Gi"}}},
        {"nodes": (NodeCapacity("n1", GIB),)},
        "MemorySized",
        Reason.EXCEEDS_NODE_ALLOCATABLE,
        "200Gi (resources.limits.memory), and the largest node that fits, n1, offers 1Gi; lower spec.res",
    ),
    ("no claim", NAMED, {}, "StorageReady", Reason.CLAIM_NOT_FOUND, "claimName: claim mine"),
    (
        "no model claim",
        {"spec.model": {"uri": "pvc://m/x"}, "spec.speculative": None},
        {},
        "ModelInspected",
        Reason.MODEL_CLAIM_NOT_FOUND,
        "spec.model.uri: claim m",
    ),
]


@pytest.mark.parametrize(("_", "fields", "state", "kind", "reason", "text"), STOPS, ids=[case[0] for case in STOPS])
def test_a_stop_is_a_condition_that_names_the_field_and_no_pod_is_made(
    _: str,
    fields: dict[str, Any],
    state: dict[str, Any],
    kind: str,
    reason: Reason,
    text: str,
    plan: Any,
    raw: Any,
    condition: Any,
) -> None:
    after = plan(raw(**fields), Observed(**state))
    stopped = condition(after, kind)
    assert (stopped.status, stopped.reason) == ("False", reason)
    assert text in stopped.message
    assert condition(after, "Ready").status == "False"
    assert condition(after, "Ready").reason is reason
    assert text in condition(after, "Ready").message
    assert condition(after, "Progressing").reason is Reason.STOPPED
    assert not {"Deployment", "ConfigMap"} & set(dict(_written(after)))


CHANGES = [case for case in STOPS if "metadata.name" not in case[1]]


@pytest.mark.parametrize(("_", "fields", "state", "kind", "reason", "text"), CHANGES, ids=[case[0] for case in CHANGES])
def test_a_stop_leaves_running_pods_as_they_are(
    _: str,
    fields: dict[str, Any],
    state: dict[str, Any],
    kind: str,
    reason: Reason,
    text: str,
    plan: Any,
    raw: Any,
    applied: Any,
    condition: Any,
) -> None:
    running = dataclasses.replace(applied(plan(raw())), **state)
    after = plan(raw(**fields), running)
    assert not {"Deployment", "ConfigMap"} & set(dict(_written(after)))
    assert after.delete == ()
    assert after.scale is None
    assert "1 pods of the earlier configuration still serve" in condition(after, "Ready").message
    assert after.facts["readyReplicas"] == 1


DOWN = [case for case in CHANGES if not {"spec", "spec.replicas"} & set(case[1])]  # where replicas can still be set


@pytest.mark.parametrize(("_", "fields", "state", "kind", "reason", "text"), DOWN, ids=[case[0] for case in DOWN])
@pytest.mark.parametrize("wanted", [0, 1, 3, 5])
def test_no_stop_keeps_replicas_from_going_down_and_every_stop_from_going_up(
    wanted: int,
    _: str,
    fields: dict[str, Any],
    state: dict[str, Any],
    kind: str,
    reason: Reason,
    text: str,
    plan: Any,
    raw: Any,
    applied: Any,
) -> None:
    running = dataclasses.replace(applied(plan(raw(**{"spec.replicas": 3}))), **state)
    after = plan(raw(**fields, **{"spec.replicas": wanted}), running)
    assert not {"Deployment", "ConfigMap"} & set(dict(_written(after)))
    assert (after.scale.replicas if after.scale else 3) == min(wanted, 3)


@pytest.mark.parametrize("wrong", [None, -1, 1.5, "2", True])
def test_replicas_that_cannot_be_read_change_nothing(wrong: Any, plan: Any, raw: Any, applied: Any) -> None:
    resource = raw(**{"spec.kvCache.pageSize": 3})
    resource["spec"]["replicas"] = wrong
    assert plan(resource, applied(plan(raw(**{"spec.replicas": 3})))).scale is None
