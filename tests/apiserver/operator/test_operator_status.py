"""What the operator says about a resource, and that it says nothing when there is nothing new."""

from typing import Any

import pytest

from speccache_api import names


@pytest.fixture
def served(client: Any, operator: Any, manifest: Any, wait: Any, namespace: str) -> str:
    """Name of a resource with a Deployment."""
    # Amounts that the API server keeps in another spelling: that is no drift.
    amounts = {"requests": {"cpu": "0.1"}, "limits": {"cpu": "1000m"}}
    name: str = client.create(manifest(resources=amounts, replicas=1))["metadata"]["name"]
    wait(lambda: client.get("Deployment", namespace, name))
    return name


@pytest.fixture
def controller(client: Any, namespace: str) -> Any:
    """Plays the Deployment's controller: `controller(name, ready=1)` reports that the newest version has such pods."""

    def report(name: str, *, ready: int, wanted: int = 1) -> None:
        live = client.get("Deployment", namespace, name)
        status = {
            "observedGeneration": live["metadata"]["generation"],
            "replicas": wanted,
            "readyReplicas": ready,
            "updatedReplicas": wanted,
        }
        client.patch("Deployment", namespace, name, {"status": status}, subresource="status")

    return report


@pytest.fixture
def pod(client: Any, namespace: str) -> Any:
    """Plays scheduler and kubelet: `pod(name, status)` makes the pod NAME-0 of the resource with this status."""

    def make(name: str, status: dict[str, Any]) -> None:
        live = client.get("Deployment", namespace, name)
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": f"{name}-x", "uid": f"{name}-x"}
        template = live["spec"]["template"]
        meta = {
            "name": f"{name}-0",
            "namespace": namespace,
            "labels": template["metadata"]["labels"],
            "ownerReferences": [owner | {"controller": True}],
        }
        client.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]})
        client.patch("Pod", namespace, f"{name}-0", {"status": status}, subresource="status")

    return make


def test_a_new_resource_says_what_it_waits_for(
    served: str, condition: Any, wait: Any, client: Any, namespace: str
) -> None:
    wait(lambda: condition(served, "Ready"))
    assert condition(served, "ConfigValid")["status"] == "True"
    assert condition(served, "ModelInspected")["reason"] == "BuiltIn"
    assert condition(served, "MemorySized")["reason"] == "Sized"
    assert condition(served, "StorageReady")["reason"] == "NoStorageTier"
    assert condition(served, "Progressing")["status"] == "True"
    assert condition(served, "Ready")["status"] == "False"
    status = client.get(names.KIND, namespace, served)["status"]
    assert status["model"] == status["draft"] == "tiny"
    assert status["memory"]["hostDraft"] == "8Mi"
    assert status["observedGeneration"] == 1
    assert "fingerprint" in status


def test_ready_follows_the_pods(
    served: str, condition: Any, wait: Any, controller: Any, client: Any, namespace: str
) -> None:
    controller(served, ready=1)
    wait(lambda: condition(served, "Ready").get("status") == "True")
    assert condition(served, "Ready")["reason"] == "Serving"
    assert condition(served, "Progressing")["reason"] == "Complete"
    scale = client.http.get(client.path(names.KIND, namespace, served) + "/scale").json()
    assert scale["status"]["replicas"] == 1
    assert scale["status"]["selector"] == ",".join(f"{k}={v}" for k, v in names.selector_labels(served).items())
    controller(served, ready=0)
    wait(lambda: condition(served, "Ready").get("status") == "False")
    client.patch(names.KIND, namespace, served, {"spec": {"kvCache": {"host": {"tokens": 640}}}})
    wait(lambda: condition(served, "Ready").get("observedGeneration") == 2)
    assert condition(served, "Progressing")["reason"] == "RollingOut"


TROUBLES = {
    "OOMKilled": (
        {"lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "state": {"running": {}}},
        "spec.memory.overhead",
    ),
    "CrashLooping": (
        {
            "lastState": {"terminated": {"reason": "Error", "exitCode": 3, "message": "draft is too narrow"}},
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        },
        "draft is too narrow",
    ),
    "ImagePullFailed": (
        {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}},
        "runtime.image",
    ),
}


@pytest.mark.parametrize("reason", TROUBLES)
def test_a_pod_in_trouble_is_explained(
    reason: str, served: str, pod: Any, condition: Any, wait: Any, client: Any, namespace: str
) -> None:
    container, text = TROUBLES[reason]
    entry = {"name": "runtime", "image": "x", "imageID": "", "ready": False, "restartCount": 1, **container}
    pod(served, {"phase": "Running", "containerStatuses": [entry]})
    wait(lambda: condition(served, "Ready").get("reason") == reason)
    assert text in condition(served, "Ready")["message"]

    def warned() -> list[Any]:
        warnings = [e for e in client.list("Event", namespace) if e["reason"] == reason and e["type"] == "Warning"]
        return [e for e in warnings if e["involvedObject"]["name"] == served]

    wait(warned)  # the event comes after the condition


def test_an_unschedulable_pod_is_explained(served: str, pod: Any, condition: Any, wait: Any) -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no GPU"}
    pod(served, {"phase": "Pending", "conditions": [scheduled]})
    wait(lambda: condition(served, "Ready").get("reason") == "Unschedulable")
    assert "0/1 nodes: no GPU" in condition(served, "Ready")["message"]


def test_nothing_is_written_while_nothing_changes(
    served: str,
    operator: Any,
    look_again: Any,
    controller: Any,
    condition: Any,
    wait: Any,
    client: Any,
    namespace: str,
) -> None:
    controller(served, ready=1)
    wait(lambda: condition(served, "Ready").get("status") == "True")

    def versions() -> dict[str, str]:
        objects = [client.get(names.KIND, namespace, served), client.get("Deployment", namespace, served)]
        objects += client.list("Service", namespace) + client.list("ConfigMap", namespace)
        objects += client.list("ServiceAccount", namespace) + client.list("Event", namespace)
        return {obj["metadata"]["uid"]: obj["metadata"]["resourceVersion"] for obj in objects}

    for resource in client.list(names.KIND, namespace):
        look_again(operator, resource["metadata"]["name"], 2)  # nothing is left to do
    before = versions()
    writes = _sum(operator, "speccache_operator_writes_total")
    _resynced(operator, wait)
    assert versions() == before
    assert _sum(operator, "speccache_operator_writes_total") == writes


def _resynced(operator: Any, wait: Any) -> None:
    """Returns after a whole resync."""
    passes = operator.reconciles()
    wait(lambda: operator.reconciles() >= passes + 2 * _sum(operator, "speccache_operator_resources"), seconds=60)


def _sum(operator: Any, prefix: str) -> float:
    return sum(value for name, value in operator.metrics().items() if name.startswith(prefix))


def test_a_missing_claim_stops_and_its_creation_goes_on(
    manifest: Any, operator: Any, condition: Any, wait: Any, client: Any, namespace: str
) -> None:
    resource = manifest()
    name = resource["metadata"]["name"]
    resource["spec"]["kvCache"]["storage"] = {"persistentVolumeClaim": {"claimName": f"{name}-mine"}}
    client.create(resource)
    wait(lambda: condition(name, "StorageReady").get("reason") == "ClaimNotFound")
    assert condition(name, "Ready")["reason"] == "ClaimNotFound"
    assert client.get("Deployment", namespace, name) is None
    _claim(client, namespace, f"{name}-mine", "ReadWriteOnce")
    wait(lambda: client.get("Deployment", namespace, name), seconds=4)  # woken by the claim, not by the resync
    client.patch("PersistentVolumeClaim", namespace, f"{name}-mine", {"status": {"phase": "Bound"}}, "status")
    wait(lambda: condition(name, "StorageReady").get("reason") == "ClaimBound")
    owners = client.get("PersistentVolumeClaim", namespace, f"{name}-mine")["metadata"].get("ownerReferences")
    assert owners is None


def test_several_replicas_need_a_shared_claim(
    manifest: Any, operator: Any, condition: Any, wait: Any, client: Any, namespace: str
) -> None:
    resource = manifest(replicas=2)
    name = resource["metadata"]["name"]
    _claim(client, namespace, f"{name}-mine", "ReadWriteOnce")
    resource["spec"]["kvCache"]["storage"] = {"persistentVolumeClaim": {"claimName": f"{name}-mine"}}
    client.create(resource)
    wait(lambda: condition(name, "StorageReady").get("reason") == "AccessModeNotShared")
    assert client.get("Deployment", namespace, name) is None
    client.patch(names.KIND, namespace, name, {"spec": {"replicas": 1}})
    wait(lambda: client.get("Deployment", namespace, name))


def _claim(client: Any, namespace: str, name: str, mode: str) -> None:
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    meta = {"name": name, "namespace": namespace}
    client.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec})


def test_a_refused_child_is_told_and_tried_again(
    manifest: Any, operator: Any, condition: Any, wait: Any, client: Any, namespace: str
) -> None:
    """A quota is a refusal that goes away: the condition says it, and the pass is repeated with growing pauses."""
    resource = manifest()
    name = resource["metadata"]["name"]
    resource["spec"]["kvCache"]["storage"] = {"persistentVolumeClaim": {"size": "1Gi", "storageClassName": "dear"}}
    key = "dear.storageclass.storage.k8s.io/requests.storage"
    quota = {"metadata": {"name": "dear", "namespace": namespace}, "spec": {"hard": {key: "0"}}}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    client.http.post(path, json=quota).raise_for_status()
    client.http.patch(
        f"{path}/dear/status",
        json={"status": {"hard": {key: "0"}, "used": {key: "0"}}},
        headers={"Content-Type": "application/merge-patch+json"},
    ).raise_for_status()
    client.create(resource)
    wait(lambda: condition(name, "StorageReady").get("reason") == "ClaimRefused")
    assert "exceeded quota" in condition(name, "Ready")["message"]
    client.http.delete(f"{path}/dear").raise_for_status()
    wait(lambda: client.get("Deployment", namespace, name))


def test_a_resource_stored_under_looser_rules_is_a_condition_and_a_stop(
    manifest: Any, operator: Any, condition: Any, wait: Any, client: Any, namespace: str
) -> None:
    resource = manifest()
    name = resource["metadata"]["name"]
    resource["spec"]["kvCache"]["pageSize"] = 48
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.CRD_NAME}"
    strict = client.http.get(path).json()["spec"]["versions"]
    loose = [{**strict[0], "schema": {"openAPIV3Schema": {**strict[0]["schema"]["openAPIV3Schema"]}}}]
    properties = loose[0]["schema"]["openAPIV3Schema"]["properties"]
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    loose[0]["schema"]["openAPIV3Schema"]["properties"] = {**properties, "spec": anything}
    loose[0]["schema"]["openAPIV3Schema"].pop("x-kubernetes-validations")  # rules name fields, and there are none now
    merge = {"Content-Type": "application/merge-patch+json"}
    client.http.patch(path, json={"spec": {"versions": loose}}, headers=merge).raise_for_status()
    try:
        wait(lambda: client.http.post(client.path(names.KIND, namespace), json=resource).is_success)
    finally:
        client.http.patch(path, json={"spec": {"versions": strict}}, headers=merge).raise_for_status()
    wait(lambda: condition(name, "ConfigValid").get("reason") == "InvalidResource")
    assert "spec.kvCache.pageSize" in condition(name, "Ready")["message"]
    assert client.get("Deployment", namespace, name) is None
