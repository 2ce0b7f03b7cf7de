"""From a resource to its children: what is made, kept, put back, rolled, and left alone."""

import json
from typing import Any

import pytest

from speccache_api import names
from speccache_api.geometry import builtin_facts
from speccache_api.quantity import parse_bytes
from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import size_memory
from speccache_api.wire import WireDocument


@pytest.fixture
def created(client: Any, operator: Any, manifest: Any, wait: Any, namespace: str) -> dict[str, Any]:
    """A resource with a created claim whose children are all there."""
    resource = manifest()
    resource["spec"]["kvCache"]["storage"] = {"persistentVolumeClaim": {"size": "1Gi"}}
    made: dict[str, Any] = client.create(resource)
    wait(lambda: client.get("Deployment", namespace, made["metadata"]["name"]))
    return made


def _children(name: str) -> list[tuple[str, str]]:
    """(kind, name) of what goes with its resource."""
    return [
        ("Deployment", name),
        ("Service", name),
        ("Service", f"{name}-pods"),
        ("ConfigMap", f"{name}-wire"),
        ("ServiceAccount", f"{name}-runtime"),
    ]


def test_children_exist_and_are_owned(created: dict[str, Any], client: Any, namespace: str) -> None:
    name = created["metadata"]["name"]
    for kind, child in _children(name):
        obj = client.get(kind, namespace, child)
        assert obj is not None, (kind, child)
        (owner,) = obj["metadata"]["ownerReferences"]
        assert owner["uid"] == created["metadata"]["uid"]
        assert owner["controller"] is True
        assert obj["metadata"]["labels"][names.LABEL_INSTANCE] == name
        managers = {entry["manager"] for entry in obj["metadata"]["managedFields"]}
        assert managers == {names.FIELD_MANAGER}


def test_the_pod_gets_the_computed_memory_and_the_wire_document(
    created: dict[str, Any], client: Any, namespace: str
) -> None:
    name = created["metadata"]["name"]
    template = client.get("Deployment", namespace, name)["spec"]["template"]
    resources = template["spec"]["containers"][0]["resources"]
    limit = size_memory(SpecCacheDeployment.parse(created).spec, builtin_facts("tiny")).limit
    assert parse_bytes(resources["limits"]["memory"]) == parse_bytes(resources["requests"]["memory"]) == limit
    wire = WireDocument.from_json(client.get("ConfigMap", namespace, f"{name}-wire")["data"][names.WIRE_KEY])
    assert template["metadata"]["annotations"][names.ANNOTATION_WIRE_HASH] == wire.digest()
    assert wire.kv_cache.host_pages == 8192 // 64


def test_a_created_claim_is_kept_by_having_no_owner(created: dict[str, Any], client: Any, namespace: str) -> None:
    claim = client.get("PersistentVolumeClaim", namespace, f"{created['metadata']['name']}-kv")
    assert "ownerReferences" not in claim["metadata"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"


def test_a_claim_follows_its_retention(created: dict[str, Any], client: Any, namespace: str, wait: Any) -> None:
    name = created["metadata"]["name"]

    def owners() -> int:
        claim = client.get("PersistentVolumeClaim", namespace, f"{name}-kv")
        return len(claim["metadata"].get("ownerReferences", []))

    for retention, count in (("Delete", 1), ("Retain", 0)):
        patch = {"spec": {"kvCache": {"storage": {"retention": retention}}}}
        client.patch(names.KIND, namespace, name, patch)
        wait(lambda expected=count: owners() == expected)


def test_a_claim_that_is_named_belongs_to_nobody(
    client: Any, operator: Any, manifest: Any, wait: Any, namespace: str
) -> None:
    """Also one that was made for this very resource, to be deleted with it."""
    resource = manifest()
    resource["spec"]["kvCache"]["storage"] = {"persistentVolumeClaim": {"size": "1000M"}, "retention": "Delete"}
    name = client.create(resource)["metadata"]["name"]
    claim = wait(lambda: client.get("PersistentVolumeClaim", namespace, f"{name}-kv"))
    assert claim["metadata"]["ownerReferences"]
    client.patch(names.KIND, namespace, name, {"spec": {"kvCache": {"storage": None}}})
    named = {"persistentVolumeClaim": {"claimName": f"{name}-kv"}}
    client.patch(names.KIND, namespace, name, {"spec": {"kvCache": {"storage": named}}})
    wait(lambda: "ownerReferences" not in client.get("PersistentVolumeClaim", namespace, f"{name}-kv")["metadata"])
    assert client.get("PersistentVolumeClaim", namespace, f"{name}-kv")["metadata"]["uid"] == claim["metadata"]["uid"]


def test_a_claim_grows_with_the_resource_where_its_class_allows(
    client: Any, operator: Any, manifest: Any, wait: Any, namespace: str, condition: Any
) -> None:
    kind = f"{namespace}-growing"
    client.create(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": kind},
            "provisioner": "x/y",
        }
    )
    resource = manifest()
    wanted = {"size": "1Gi", "storageClassName": kind}
    resource["spec"]["kvCache"]["storage"] = {"persistentVolumeClaim": wanted}
    name = client.create(resource)["metadata"]["name"]
    claim = f"{name}-kv"
    wait(lambda: client.get("PersistentVolumeClaim", namespace, claim))
    bound = {"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"]}}
    client.patch("PersistentVolumeClaim", namespace, claim, bound, subresource="status")
    wait(lambda: condition(name, "StorageReady").get("reason") == "ClaimBound")

    def resize(size: str) -> None:
        patch = {"spec": {"kvCache": {"storage": {"persistentVolumeClaim": {"size": size}}}}}
        client.patch(names.KIND, namespace, name, patch)

    def requested() -> str:
        found = client.get("PersistentVolumeClaim", namespace, claim)
        return str(found["spec"]["resources"]["requests"]["storage"])

    resize("2Gi")
    wait(lambda: condition(name, "StorageReady").get("reason") == "ClaimCannotGrow")
    message = condition(name, "StorageReady")["message"]
    assert "only dynamically provisioned pvc can be resized" in message
    assert "set allowVolumeExpansion: true in its StorageClass" in message
    assert condition(name, "Ready")["reason"] == "PodsMissing", "pods go on as they are"
    resize("1Gi")
    wait(lambda: condition(name, "StorageReady").get("reason") == "ClaimBound")
    assert requested() == "1Gi"
    client.patch("StorageClass", None, kind, {"allowVolumeExpansion": True})
    # The admission plugin learns of the class with a delay; what was refused is tried again by itself.
    resize("3Gi")
    wait(lambda: requested() == "3Gi")
    wait(lambda: condition(name, "StorageReady").get("reason") == "ClaimBound")


def test_a_kept_claim_of_other_modes_is_explained(
    client: Any, operator: Any, manifest: Any, wait: Any, namespace: str, condition: Any
) -> None:
    resource = manifest()
    resource["spec"]["kvCache"]["storage"] = {"persistentVolumeClaim": {"size": "1Gi"}}
    name = client.create(resource)["metadata"]["name"]
    wait(lambda: client.get("Deployment", namespace, name))
    client.delete(names.KIND, namespace, name)
    for kind, child in _children(name):
        client.delete(kind, namespace, child)  # what the garbage collector does
    resource["spec"]["kvCache"]["storage"]["persistentVolumeClaim"]["accessModes"] = ["ReadWriteMany"]
    client.create(resource)
    wait(lambda: condition(name, "StorageReady").get("reason") == "ClaimRefused")
    message = condition(name, "StorageReady")["message"]
    assert "accessModes [ReadWriteOnce], which cannot change" in message
    assert "or delete the claim" in message


def test_a_resource_and_its_children_get_no_finalizer(created: dict[str, Any], client: Any, namespace: str) -> None:
    name = created["metadata"]["name"]
    assert "finalizers" not in client.get(names.KIND, namespace, name)["metadata"]
    client.delete(names.KIND, namespace, name)
    assert client.get(names.KIND, namespace, name) is None


@pytest.mark.parametrize(
    ("kind", "suffix", "patch"),
    [
        ("Deployment", "", {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 7}}}}),
        ("Deployment", "", {"spec": {"replicas": 4}}),
        ("Service", "", {"spec": {"selector": {names.LABEL_INSTANCE: "elsewhere"}}}),
        ("Service", "", {"spec": {"selector": {"more": "label"}}}),
        ("Service", "", {"spec": {"ports": [{"name": "http", "port": 9999}]}}),
        ("Service", "-pods", {"spec": {"publishNotReadyAddresses": False}}),
        ("ConfigMap", "-wire", {"data": {names.WIRE_KEY: "{}"}}),
        ("ConfigMap", "-wire", {"metadata": {"labels": {names.LABEL_MANAGED_BY: None}}}),
        ("ServiceAccount", "-runtime", {"automountServiceAccountToken": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_drift_is_put_back(
    kind: str, suffix: str, patch: dict[str, Any], created: dict[str, Any], client: Any, namespace: str, wait: Any
) -> None:
    name = created["metadata"]["name"] + suffix
    before = client.get(kind, namespace, name)
    client.patch(kind, namespace, name, patch)

    def same() -> bool:
        after = client.get(kind, namespace, name)
        keys = ("spec", "data", "automountServiceAccountToken")
        return all(after.get(key) == before.get(key) for key in keys) and (
            after["metadata"]["labels"] == before["metadata"]["labels"]
        )

    wait(same)


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("Deployment", ""), ("Service", ""), ("Service", "-pods"), ("ConfigMap", "-wire"), ("ServiceAccount", "-runtime")],
)
def test_a_deleted_child_is_made_again(
    kind: str, suffix: str, created: dict[str, Any], client: Any, namespace: str, wait: Any
) -> None:
    name = created["metadata"]["name"] + suffix
    before = client.get(kind, namespace, name)["metadata"]["uid"]
    client.delete(kind, namespace, name)
    again = wait(lambda: client.get(kind, namespace, name))
    assert again["metadata"]["uid"] != before


def test_what_others_add_to_a_child_is_left_alone(
    created: dict[str, Any], operator: Any, client: Any, namespace: str, wait: Any
) -> None:
    name = created["metadata"]["name"]
    client.patch("Service", namespace, name, {"metadata": {"annotations": {"mesh": "on"}, "labels": {"team": "a"}}})
    passes = operator.reconciles()
    wait(lambda: operator.reconciles() > passes + 2)
    meta = client.get("Service", namespace, name)["metadata"]
    assert meta["annotations"]["mesh"] == "on"
    assert meta["labels"]["team"] == "a"


def test_a_changed_wire_document_rolls_the_pods(
    created: dict[str, Any], client: Any, namespace: str, wait: Any
) -> None:
    name = created["metadata"]["name"]

    def annotation() -> str:
        template = client.get("Deployment", namespace, name)["spec"]["template"]
        value: str = template["metadata"]["annotations"][names.ANNOTATION_WIRE_HASH]
        return value

    before = annotation()
    client.patch(names.KIND, namespace, name, {"spec": {"kvCache": {"host": {"tokens": 65536}}}})
    wait(lambda: annotation() != before)
    wire = WireDocument.from_json(client.get("ConfigMap", namespace, f"{name}-wire")["data"][names.WIRE_KEY])
    assert wire.kv_cache.host_pages == 1024
    assert annotation() == wire.digest()


def test_a_change_that_pods_need_not_know_rolls_nothing(
    created: dict[str, Any], client: Any, namespace: str, wait: Any
) -> None:
    name = created["metadata"]["name"]
    before = client.get("Deployment", namespace, name)["spec"]["template"]
    client.patch(names.KIND, namespace, name, {"spec": {"kvCache": {"storage": {"retention": "Delete"}}}})
    wait(lambda: "ownerReferences" in client.get("PersistentVolumeClaim", namespace, f"{name}-kv")["metadata"])
    assert client.get("Deployment", namespace, name)["spec"]["template"] == before


def test_the_scale_subresource_reaches_the_deployment(
    operator: Any, manifest: Any, client: Any, namespace: str, wait: Any
) -> None:
    name = client.create(manifest())["metadata"]["name"]
    wait(lambda: client.get("Deployment", namespace, name))
    client.patch(names.KIND, namespace, name, {"spec": {"replicas": 3}}, subresource="scale")
    wait(lambda: client.get("Deployment", namespace, name)["spec"]["replicas"] == 3)
    client.patch(names.KIND, namespace, name, {"spec": {"replicas": 0}}, subresource="scale")
    wait(lambda: client.get("Deployment", namespace, name)["spec"]["replicas"] == 0)


@pytest.mark.parametrize(
    ("kind", "suffix", "body", "stops_pods"),
    [
        ("Service", "", {"spec": {"ports": [{"port": 1}]}}, False),
        ("ConfigMap", "-wire", {"data": {"mine": "yes"}}, True),
        ("ServiceAccount", "-runtime", {}, True),
    ],
)
def test_a_foreign_object_is_not_touched_and_stops_only_what_needs_it(
    kind: str,
    suffix: str,
    body: dict[str, Any],
    stops_pods: bool,
    operator: Any,
    manifest: Any,
    client: Any,
    namespace: str,
    wait: Any,
) -> None:
    resource = manifest()
    name = resource["metadata"]["name"] + suffix
    foreign = client.create(
        {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": namespace}, **body}
    )
    client.create(resource)

    def progressing() -> dict[str, Any]:
        found = client.get(names.KIND, namespace, resource["metadata"]["name"]).get("status", {}).get("conditions", [])
        return {entry["type"]: entry for entry in found}.get("Progressing", {})

    wait(lambda: progressing().get("reason") == "ObjectNotOwned")
    assert f"{kind} {name}" in progressing()["message"]
    assert client.get(kind, namespace, name)["metadata"]["resourceVersion"] == foreign["metadata"]["resourceVersion"]
    assert (client.get("Deployment", namespace, resource["metadata"]["name"]) is None) is stops_pods
    # Nothing wakes the operator: an object without our labels is not watched. The resync finds that the way is free.
    client.delete(kind, namespace, name)
    wait(lambda: progressing().get("reason") == "RollingOut")
    assert client.get(kind, namespace, name)["metadata"]["ownerReferences"]
    assert client.get("Deployment", namespace, resource["metadata"]["name"])


def test_a_child_whose_owner_was_removed_is_not_touched_any_more(
    created: dict[str, Any], client: Any, namespace: str, wait: Any, condition: Any
) -> None:
    name = created["metadata"]["name"]
    client.patch("Service", namespace, name, {"metadata": {"ownerReferences": None}})
    wait(lambda: condition(name, "Ready").get("reason") == "ObjectNotOwned")


def test_a_resource_may_be_called_default(operator: Any, manifest: Any, client: Any, namespace: str, wait: Any) -> None:
    """As the ServiceAccount that every namespace has."""
    resource = manifest()
    resource["metadata"]["name"] = "default"
    client.create(resource)
    account = wait(lambda: client.get("Deployment", namespace, "default"))["spec"]["template"]["spec"]
    assert account["serviceAccountName"] == "default-runtime"
    assert client.get("ServiceAccount", namespace, "default-runtime")["metadata"]["ownerReferences"]
    assert "ownerReferences" not in client.get("ServiceAccount", namespace, "default")["metadata"]
    client.delete(names.KIND, namespace, "default")


def test_events_tell_what_was_made(created: dict[str, Any], client: Any, namespace: str, wait: Any) -> None:
    uid = created["metadata"]["uid"]

    def messages() -> set[str]:
        events = client.list("Event", namespace)
        return {event["message"] for event in events if event["involvedObject"].get("uid") == uid}

    name = created["metadata"]["name"]
    wait(lambda: {f"Deployment {name}: created", f"ConfigMap {name}-wire: created"} <= messages())
    assert json.dumps(sorted(messages())).count(f"Deployment {name}: created") == 1
