"""From a resource to its children: what is made, kept and changed."""

from typing import Any

import pytest

from speccache_api import names


@pytest.fixture
def created(client: Any, operator: Any, manifest: Any, wait: Any, namespace: str) -> dict[str, Any]:
    """A resource with a created claim whose children are all there."""
    claim = {"persistentVolumeClaim": {"size": "1Gi"}}
    resource = manifest(kvCache={"device": {"tokens": 4096}, "host": {"tokens": 8192}, "storage": claim})
    made: dict[str, Any] = client.create(resource)
    wait(lambda: client.get("StatefulSet", namespace, made["metadata"]["name"]))
    return made


def test_children_exist_and_are_owned(created: dict[str, Any], client: Any, namespace: str) -> None:
    name = created["metadata"]["name"]
    for kind, child in (
        ("StatefulSet", name),
        ("Service", name),
        ("Service", f"{name}-pods"),
        ("ConfigMap", f"{name}-wire"),
        ("ServiceAccount", name),
    ):
        obj = client.get(kind, namespace, child)
        assert obj is not None, (kind, child)
        (owner,) = obj["metadata"]["ownerReferences"]
        assert owner["uid"] == created["metadata"]["uid"]
        assert owner["controller"] is True
        assert obj["metadata"]["labels"][names.LABEL_INSTANCE] == name
        managers = {entry["manager"] for entry in obj["metadata"]["managedFields"]}
        assert managers == {names.FIELD_MANAGER}
