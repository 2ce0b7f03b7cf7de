"""Models on claims: the inspection Job, its result, and what becomes of both."""

from typing import Any

import pytest

from speccache_api import names
from speccache_api.geometry import Inspection, KVGeometry, ModelFacts

RESULT = Inspection(
    target=ModelFacts(KVGeometry.heads(32, 8, 128), 8 * 10**8, 4096, 128256, 8192, "ab" * 32, "llama"),
    draft=ModelFacts(KVGeometry.heads(1, 8, 128), 4 * 10**7, 4096, 32000, 2048, "cd" * 32, "eagle3"),
)
MODELS = {
    "model": {"uri": "pvc://models/target"},
    "speculative": {"algorithm": "EAGLE3", "draftModel": {"uri": "pvc://models/draft"}},
}
COMMAND = (
    "speccache-runtime inspect --target /models/target/target --draft /models/draft/draft"
    " --algorithm EAGLE3 --termination-message"
)
SELECTOR = f"{names.LABEL_COMPONENT}={names.COMPONENT_INSPECTION}"


@pytest.fixture(scope="module")
def models(client: Any, namespace: str) -> None:
    spec = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}}}
    meta = {"name": "models", "namespace": namespace}
    client.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec})


@pytest.fixture
def of(client: Any, namespace: str) -> Any:
    """`of(kind, name)`: inspection objects of a resource."""
    return lambda kind, name: client.list(kind, namespace, f"{SELECTOR},{names.LABEL_INSTANCE}={name}")


@pytest.fixture
def job(models: None, operator: Any, manifest: Any, client: Any, wait: Any, of: Any) -> dict[str, Any]:
    """The inspection Job of a new resource."""
    name = client.create(manifest(**MODELS))["metadata"]["name"]
    (found,) = wait(lambda: of("Job", name))
    result: dict[str, Any] = found
    return result


def _resource(job: dict[str, Any]) -> str:
    name: str = job["metadata"]["labels"][names.LABEL_INSTANCE]
    return name


def test_the_job_reads_both_models_and_writes_nothing(job: dict[str, Any], client: Any, namespace: str) -> None:
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == COMMAND.split()
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    for path in ("/models/target", "/models/draft"):
        assert mounts[path]["readOnly"] is True
    assert [v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v] == [
        "models"
    ]
    assert client.get("Deployment", namespace, _resource(job)) is None


def test_a_result_is_recorded_used_and_outlives_the_job(
    job: dict[str, Any], finish: Any, of: Any, client: Any, namespace: str, wait: Any, condition: Any
) -> None:
    name = _resource(job)
    wait(lambda: condition(name, "ModelInspected").get("reason") == "InspectionRunning")
    finish(job, RESULT.to_json(), complete=True)
    wait(lambda: client.get("Deployment", namespace, name))
    wait(lambda: not of("Job", name))
    (record,) = of("ConfigMap", name)
    assert Inspection.from_json(record["data"]["inspection.json"]) == RESULT
    wait(lambda: condition(name, "ModelInspected").get("reason") == "Inspected")
    status = client.get(names.KIND, namespace, name)["status"]
    assert status["memory"]["targetBytesPerToken"] == 32 * 8 * 128 * 2 * 4
    assert len(status["fingerprint"]) == 64


def test_another_model_is_inspected_anew_while_the_old_one_serves(
    job: dict[str, Any], finish: Any, of: Any, client: Any, namespace: str, wait: Any
) -> None:
    name = _resource(job)
    finish(job, RESULT.to_json(), complete=True)
    serving = wait(lambda: client.get("Deployment", namespace, name))
    client.patch(names.KIND, namespace, name, {"spec": {"model": {"uri": "pvc://models/other"}}})
    (second,) = wait(lambda: [j for j in of("Job", name) if j["metadata"]["uid"] != job["metadata"]["uid"]])
    assert second["metadata"]["name"] != job["metadata"]["name"]
    assert client.get("Deployment", namespace, name)["spec"] == serving["spec"]
    finish(second, RESULT.to_json(), complete=True)
    wait(lambda: client.get("Deployment", namespace, name)["spec"] != serving["spec"])
    wait(lambda: [r["metadata"]["name"] for r in of("ConfigMap", name)] == [second["metadata"]["name"]])


def test_a_failed_inspection_says_what_the_pod_said(
    job: dict[str, Any], finish: Any, of: Any, client: Any, namespace: str, wait: Any, condition: Any
) -> None:
    name = _resource(job)
    finish(job, "config.json: hidden_size 4096, draft 2048", complete=False)
    wait(lambda: condition(name, "ModelInspected").get("reason") == "InspectionFailed")
    assert "hidden_size 4096, draft 2048" in condition(name, "Ready")["message"]
    assert client.get("Deployment", namespace, name) is None
    client.delete("Pod", namespace, f"{job['metadata']['name']}-x")
    client.delete("Job", namespace, job["metadata"]["name"])
    wait(lambda: [j for j in of("Job", name) if j["metadata"]["uid"] != job["metadata"]["uid"]])


def test_deleting_the_record_inspects_again(
    job: dict[str, Any], finish: Any, of: Any, client: Any, namespace: str, wait: Any
) -> None:
    name = _resource(job)
    finish(job, RESULT.to_json(), complete=True)
    wait(lambda: of("ConfigMap", name) and not of("Job", name))
    client.delete("Pod", namespace, f"{job['metadata']['name']}-x")
    client.delete("ConfigMap", namespace, job["metadata"]["name"])
    wait(lambda: of("Job", name))


def test_no_job_is_made_for_a_claim_that_is_missing(
    operator: Any, manifest: Any, client: Any, namespace: str, wait: Any, condition: Any, of: Any
) -> None:
    name = client.create(manifest(**MODELS | {"model": {"uri": "pvc://nowhere/x"}}))["metadata"]["name"]
    wait(lambda: condition(name, "ModelInspected").get("reason") == "ModelClaimNotFound")
    assert "spec.model.uri: claim nowhere" in condition(name, "Ready")["message"]
    assert of("Job", name) == []
