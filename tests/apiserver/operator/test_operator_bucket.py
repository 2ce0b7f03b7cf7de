"""Storage in a bucket: the check before the first pod, and what is done when the resource is gone."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from speccache_api import names

S3 = {"bucket": "pages", "endpoint": "https://minio:9000", "credentialsSecret": "keys", "caBundleConfigMap": "ca"}
GOOD = '{"ok": true}\n'


def _answer(code: str, message: str) -> str:
    return json.dumps({"ok": False, "code": code, "message": message})


@pytest.fixture
def of(client: Any, namespace: str) -> Any:
    """`of(kind, name, component)`: objects of a resource."""

    def found(kind: str, name: str, component: str = names.COMPONENT_STORAGE_CHECK) -> Any:
        return client.list(kind, namespace, f"{names.LABEL_COMPONENT}={component},{names.LABEL_INSTANCE}={name}")

    return found


@pytest.fixture
def create(operator: Any, manifest: Any, client: Any) -> Callable[..., str]:
    """Makes a resource on the bucket; answers its name."""

    def make(**more: Any) -> str:
        resource = manifest()
        resource["spec"]["kvCache"]["storage"] = {"s3": S3, **more}
        name: str = client.create(resource)["metadata"]["name"]
        return name

    return make


@pytest.fixture
def served(create: Any, client: Any, namespace: str, wait: Any, of: Any, finish: Any) -> str:
    """A resource with retention Delete whose bucket was found good."""
    name: str = create(retention="Delete")
    (job,) = wait(lambda: of("Job", name))
    finish(job, GOOD, complete=True)
    wait(lambda: client.get("Deployment", namespace, name))
    return name


def _delete(client: Any, namespace: str, name: str) -> None:
    """The resource, and what the garbage collector deletes with it."""
    client.delete(names.KIND, namespace, name)
    for kind in ("Deployment", "Job", "ConfigMap", "Pod"):
        for obj in client.list(kind, namespace, f"{names.LABEL_INSTANCE}={name}"):
            if obj["metadata"].get("ownerReferences"):
                client.delete(kind, namespace, obj["metadata"]["name"])


def test_a_check_that_fails_is_told_and_tried_again_and_pods_follow_when_it_succeeds(
    create: Any, client: Any, namespace: str, wait: Any, of: Any, finish: Any, condition: Any
) -> None:
    name = create()
    (job,) = wait(lambda: of("Job", name))
    finish(job, _answer("BucketNotFound", "there is no bucket pages; create it"), complete=False)
    wait(lambda: condition(name, "StorageReady").get("reason") == "BucketNotFound")
    assert "there is no bucket pages; create it" in condition(name, "Ready")["message"]
    assert client.get("Deployment", namespace, name) is None
    client.delete("Pod", namespace, f"{job['metadata']['name']}-x")
    client.delete("Job", namespace, job["metadata"]["name"])
    again = wait(lambda: [j for j in of("Job", name) if j["metadata"]["uid"] != job["metadata"]["uid"]])
    finish(again[0], GOOD, complete=True)
    wait(lambda: client.get("Deployment", namespace, name))
    wait(lambda: condition(name, "StorageReady").get("reason") == "BucketReady")
    wait(lambda: not of("Job", name))
    assert of("ConfigMap", name)[0]["data"] == {"storage-check.json": GOOD.strip()}


def test_the_pods_are_told_of_the_bucket_and_get_what_it_takes(served: str, client: Any, namespace: str) -> None:
    wire = json.loads(client.get("ConfigMap", namespace, f"{served}-wire")["data"][names.WIRE_KEY])
    assert wire["kvCache"]["storage"]["target"]["bucket"] == "pages"
    spec = client.get("Deployment", namespace, served)["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["s3-credentials"]["secret"]["secretName"] == "keys"
    assert volumes["s3-certificates"]["configMap"]["name"] == "ca"
    status = client.get(names.KIND, namespace, served)["status"]
    assert status["storage"] == "s3://pages"


def test_an_unchanged_resource_on_a_bucket_is_written_once(
    served: str, operator: Any, client: Any, namespace: str, wait: Any, of: Any
) -> None:
    wait(lambda: not of("Job", served))

    def versions() -> dict[str, str]:
        found = [client.get(names.KIND, namespace, served), client.get("Deployment", namespace, served)]
        found += [*of("ConfigMap", served), *of("ConfigMap", served, names.COMPONENT_STORAGE_REMOVAL)]
        return {obj["metadata"]["uid"]: obj["metadata"]["resourceVersion"] for obj in found}

    wait(lambda: client.get(names.KIND, namespace, served)["status"]["conditions"][4]["reason"] == "BucketReady")
    before, passes = versions(), operator.reconciles()
    assert len(before) == 4
    client.patch(names.KIND, namespace, served, {"metadata": {"labels": {"woken": "1"}}})
    wait(lambda: operator.reconciles() > passes)
    client.patch(names.KIND, namespace, served, {"metadata": {"labels": None}})
    wait(lambda: operator.reconciles() > passes + 1)
    after = versions()
    del before[client.get(names.KIND, namespace, served)["metadata"]["uid"]]
    assert before.items() <= after.items()


def test_what_was_stored_is_removed_when_the_resource_is_gone(
    served: str, client: Any, namespace: str, wait: Any, of: Any, finish: Any
) -> None:
    (record,) = of("ConfigMap", served, names.COMPONENT_STORAGE_REMOVAL)
    fingerprint = client.get(names.KIND, namespace, served)["status"]["fingerprint"]
    assert record["data"]["fingerprint"] == fingerprint
    assert "finalizers" not in client.get(names.KIND, namespace, served)["metadata"]
    _delete(client, namespace, served)
    (job,) = wait(lambda: of("Job", served, names.COMPONENT_STORAGE_REMOVAL))
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--fingerprint") + 1] == fingerprint
    finish(job, "removed 12 objects", complete=True)
    wait(lambda: not of("ConfigMap", served, names.COMPONENT_STORAGE_REMOVAL))
    wait(lambda: [e for e in client.list("Event", namespace) if e["reason"] == "StorageRemoved"])


def test_an_operator_that_was_away_removes_what_was_left_meanwhile(
    start: Any, new_namespace: Any, manifest: Any, client: Any, wait: Any
) -> None:
    namespace = new_namespace()
    record = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "gone-remove-1",
            "namespace": namespace,
            "labels": {
                **names.object_labels("gone", names.COMPONENT_STORAGE_REMOVAL),
                names.LABEL_RESOURCE_UID: "of-a-resource-that-is-gone",
            },
        },
        "data": {
            "target.json": json.dumps(
                {
                    "kind": "Bucket",
                    "bucket": "pages",
                    "prefix": "",
                    "endpoint": None,
                    "region": None,
                    "forcePathStyle": False,
                    "credentialsSecret": None,
                    "caBundleConfigMap": None,
                    "serviceAccount": None,
                }
            ),
            "fingerprint": "ab" * 32,
        },
    }
    client.create(record)
    operator = start("removing", namespace)
    job = wait(lambda: client.get("Job", namespace, "gone-remove-1"))
    kept = client.get("ConfigMap", namespace, "gone-remove-1")
    assert [owner["uid"] for owner in job["metadata"]["ownerReferences"]] == [kept["metadata"]["uid"]]
    assert operator.stop() == 0


def test_a_removal_that_fails_is_told(
    served: str, client: Any, namespace: str, wait: Any, of: Any, finish: Any
) -> None:
    _delete(client, namespace, served)
    (job,) = wait(lambda: of("Job", served, names.COMPONENT_STORAGE_REMOVAL))
    finish(job, _answer("AccessDenied", "may not delete"), complete=False)
    wait(lambda: of("ConfigMap", served, names.COMPONENT_STORAGE_REMOVAL)[0]["data"].get("attempts") == "1")
    events = wait(lambda: [e for e in client.list("Event", namespace) if e["reason"] == "StorageNotRemoved"])
    assert "may not delete" in events[0]["message"]
    assert events[0]["involvedObject"]["kind"] == "ConfigMap"


def test_retained_pages_have_no_record(
    create: Any, client: Any, namespace: str, wait: Any, of: Any, finish: Any
) -> None:
    name = create()
    (job,) = wait(lambda: of("Job", name))
    finish(job, GOOD, complete=True)
    wait(lambda: client.get("Deployment", namespace, name))
    assert of("ConfigMap", name, names.COMPONENT_STORAGE_REMOVAL) == []
    client.patch(names.KIND, namespace, name, {"spec": {"kvCache": {"storage": {"retention": "Delete"}}}})
    wait(lambda: of("ConfigMap", name, names.COMPONENT_STORAGE_REMOVAL))
    client.patch(names.KIND, namespace, name, {"spec": {"kvCache": {"storage": {"retention": "Retain"}}}})
    wait(lambda: not of("ConfigMap", name, names.COMPONENT_STORAGE_REMOVAL))
