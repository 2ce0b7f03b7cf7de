"""What the CRD does on a real API server: defaults, columns, scale, and what cannot change."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from speccache_api import names
from speccache_api.geometry import builtin_facts
from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import size_memory
from speccache_api.status import CONDITION_TYPES, summary

_NUMBERS = itertools.count()
_SAMPLES = sorted((Path(__file__).parents[2] / "samples").glob("*.yaml"))


def _resource(name: str, **kv_cache: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "builtin://tiny"},
            "kvCache": {"device": {"tokens": 4096}, "host": {"tokens": 4096}, **kv_cache},
        },
    }


@pytest.fixture
def stored(api: Any, apply: Any) -> Iterator[str]:
    """Name of a resource with a created claim, deleted after the test."""
    name = f"case-{next(_NUMBERS)}"
    manifest = _resource(name, storage={"persistentVolumeClaim": {"size": "1Gi", "accessModes": ["ReadWriteMany"]}})
    answer = apply(stdin=yaml.safe_dump(manifest))
    assert answer.returncode == 0, answer.stderr
    yield name
    api("delete", names.PLURAL, name)


def _get(api: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(api("get", names.PLURAL, name, "-o", "json").stdout)
    return found


@pytest.mark.parametrize("path", _SAMPLES, ids=lambda path: path.name)
def test_a_sample_is_accepted_with_strict_validation(path: Path, apply: Any) -> None:
    answer = apply("--dry-run=server", stdin=path.read_text())
    assert answer.returncode == 0, answer.stderr
    assert "arning" not in answer.stderr


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kvCache.storage": {"persistentVolumeClaim": {"claimName": "kv"}}},
        {"speculative": {"algorithm": "EAGLE3", "draftModel": {"uri": "builtin://tiny"}}},
        {"drain": {"flushTimeoutSeconds": 5}, "memory": {}},
        {"kvCache.storage": {"s3": {"bucket": "pages"}}, "admin": {"tokenSecret": {"name": "admin"}}},
    ],
    ids=["minimal", "storage", "speculation", "half of a group", "bucket and admin"],
)
def test_defaults_are_those_of_the_models(more: dict[str, Any], apply: Any) -> None:
    manifest = _resource("defaults")
    for path, value in more.items():
        group = manifest["spec"]
        for part in path.split(".")[:-1]:
            group = group[part]
        group[path.split(".")[-1]] = value
    answer = apply("--dry-run=server", "-o", "json", stdin=yaml.safe_dump(manifest))
    assert answer.returncode == 0, answer.stderr
    ours = SpecCacheDeployment.parse(manifest).spec.model_dump(by_alias=True, exclude_none=True)
    assert json.loads(answer.stdout)["spec"] == ours


def test_a_null_where_a_default_exists_becomes_the_default(apply: Any) -> None:
    answer = apply("--dry-run=server", "-o", "json", stdin=json.dumps(_resource("nulls", pageSize=None)))
    assert json.loads(answer.stdout)["spec"]["kvCache"]["pageSize"] == 64


@pytest.mark.parametrize(
    "claim",
    [
        {"claimName": "other"},
        {"size": "1Gi"},
        {"size": "1Gi", "accessModes": ["ReadWriteMany"], "storageClassName": "fast"},
    ],
    ids=["named instead of created", "modes", "class"],
)
def test_the_claim_cannot_change(claim: dict[str, Any], stored: str, api: Any) -> None:
    patch = [{"op": "replace", "path": "/spec/kvCache/storage/persistentVolumeClaim", "value": claim}]
    answer = api("patch", names.PLURAL, stored, "--type=json", "-p", json.dumps(patch))
    assert answer.returncode != 0
    assert "spec.kvCache.storage.persistentVolumeClaim" in answer.stderr
    assert "the claim of the storage tier cannot change" in answer.stderr


def _size(api: Any, name: str, size: Any) -> Any:
    patch = {"spec": {"kvCache": {"storage": {"persistentVolumeClaim": {"size": size}}}}}
    return api("patch", names.PLURAL, name, "--type=merge", "-p", json.dumps(patch))


@pytest.mark.parametrize("size", ["1Gi", "2Gi", 2**30 + 1])
def test_a_created_claim_may_grow(size: Any, stored: str, api: Any) -> None:
    assert _size(api, stored, size).returncode == 0


@pytest.mark.parametrize("size", ["1023Mi", 2**30 - 1])
def test_a_created_claim_never_shrinks(size: Any, stored: str, api: Any) -> None:
    answer = _size(api, stored, size)
    assert answer.returncode != 0
    assert "spec.kvCache.storage.persistentVolumeClaim.size" in answer.stderr
    assert "a claim can grow and never shrink" in answer.stderr


def test_a_size_that_the_claim_could_not_grow_to_can_be_taken_back(stored: str, api: Any) -> None:
    assert _size(api, stored, "9Gi").returncode == 0
    assert _size(api, stored, "1Gi").returncode != 0
    told = {"type": "StorageReady", "status": "False", "reason": names.CLAIM_CANNOT_GROW, "message": "no expansion"}
    patch = {"status": {"conditions": [{**told, "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}
    answer = api("patch", names.PLURAL, stored, "--subresource=status", "--type=merge", "-p", json.dumps(patch))
    assert answer.returncode == 0, answer.stderr
    assert _size(api, stored, "1Gi").returncode == 0


def test_a_volume_in_use_cannot_become_a_bucket_at_once(stored: str, api: Any) -> None:
    patch = {"spec": {"kvCache": {"storage": {"persistentVolumeClaim": None, "s3": {"bucket": "pages"}}}}}
    answer = api("patch", names.PLURAL, stored, "--type=merge", "-p", json.dumps(patch))
    assert answer.returncode != 0
    assert "remove kvCache.storage first" in answer.stderr


def test_a_bucket_can_become_another_one_and_a_volume(api: Any, apply: Any) -> None:
    manifest = _resource("moving", storage={"s3": {"bucket": "pages"}, "retention": "Delete"})
    assert apply(stdin=yaml.safe_dump(manifest)).returncode == 0
    changes: list[dict[str, Any]] = [
        {"s3": {"bucket": "others", "prefix": "a"}},
        {"s3": None, "persistentVolumeClaim": {"size": "1Gi"}},
    ]
    for storage in changes:
        patch = {"spec": {"kvCache": {"storage": storage}}}
        answer = api("patch", names.PLURAL, "moving", "--type=merge", "-p", json.dumps(patch))
        assert answer.returncode == 0, answer.stderr


def test_the_rest_can_change_beside_an_unchanged_claim(stored: str, api: Any) -> None:
    changes = {"replicas": 3, "kvCache": {"pageSize": 16, "storage": {"missingDraft": "Degrade"}}}
    answer = api("patch", names.PLURAL, stored, "--type=merge", "-p", json.dumps({"spec": changes}))
    assert answer.returncode == 0, answer.stderr


def test_the_storage_tier_can_be_removed_and_another_one_added(stored: str, api: Any) -> None:
    for storage in (None, {"persistentVolumeClaim": {"claimName": "other"}}):
        patch = {"spec": {"kvCache": {"storage": storage}}}
        answer = api("patch", names.PLURAL, stored, "--type=merge", "-p", json.dumps(patch))
        assert answer.returncode == 0, answer.stderr


def _status(manifest: dict[str, Any]) -> dict[str, Any]:
    resource = SpecCacheDeployment.parse(manifest)
    plan = size_memory(resource.spec, builtin_facts("tiny"))
    return {
        **summary(resource),
        "observedGeneration": 1,
        "replicas": 2,
        "readyReplicas": 1,
        "selector": ",".join(f"{key}={value}" for key, value in names.selector_labels(resource.name).items()),
        "fingerprint": "0" * 64,
        "memory": plan.to_status(),
        "conditions": [
            {
                "type": kind,
                "status": "False",
                "reason": "ReplicasStarting",
                "message": "1 of 2 replicas serve",
                "observedGeneration": 1,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for kind in CONDITION_TYPES
        ],
    }


def test_status_columns_and_scale(stored: str, api: Any, apply: Any) -> None:
    status = _status(_get(api, stored))
    manifest = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": stored}, "status": status}
    answer = apply("--subresource=status", "--field-manager", names.FIELD_MANAGER, stdin=yaml.safe_dump(manifest))
    assert answer.returncode == 0, answer.stderr
    assert _get(api, stored)["status"] == status

    header, row = api("get", names.SHORT_NAME, stored).stdout.splitlines()
    assert header.split() == ["NAME", "READY", "REASON", "MODEL", "DRAFT", "REPLICAS", "MEMORY", "STORAGE", "AGE"]
    memory = status["memory"]["limit"]
    assert row.split()[:-1] == [stored, "False", "ReplicasStarting", "tiny", "2", memory, f"{stored}-kv"]

    assert api("scale", names.PLURAL, stored, "--replicas=1").returncode == 0
    scale = json.loads(_read_scale(api, stored).stdout)
    assert scale["spec"]["replicas"] == 1
    assert scale["status"] == {"replicas": 2, "selector": status["selector"]}


def _read_scale(api: Any, name: str) -> Any:
    return api("get", "--raw", f"/apis/{names.API_VERSION}/namespaces/default/{names.PLURAL}/{name}/scale")


def test_without_replicas_the_scale_can_be_written_and_not_read(stored: str, api: Any) -> None:
    """An autoscaler reads it before it writes: the field's description says to give a number then."""
    assert "replicas" not in _get(api, stored)["spec"]
    answer = _read_scale(api, stored)
    assert answer.returncode != 0
    assert ".spec.replicas" in answer.stderr
    assert api("scale", names.PLURAL, stored, "--replicas=0").returncode == 0
    assert _get(api, stored)["spec"]["replicas"] == 0
    assert _read_scale(api, stored).returncode == 0


def test_scaling_by_the_subresource(stored: str, api: Any) -> None:
    answer = api("scale", names.PLURAL, stored, "--replicas=5")
    assert answer.returncode == 0, answer.stderr
    assert _get(api, stored)["spec"]["replicas"] == 5


def test_the_scale_subresource_is_bound_by_the_rules(api: Any, apply: Any) -> None:
    manifest = _resource("single", storage={"persistentVolumeClaim": {"size": "1Gi"}})
    assert apply(stdin=yaml.safe_dump(manifest)).returncode == 0
    answer = api("scale", names.PLURAL, "single", "--replicas=2")
    assert answer.returncode != 0
    assert "accessModes: [ReadWriteMany]" in answer.stderr


def test_a_status_write_cannot_change_the_spec(stored: str, api: Any) -> None:
    assert api("scale", names.PLURAL, stored, "--replicas=1").returncode == 0
    patch = {"spec": {"replicas": 9}, "status": {"replicas": 1}}
    answer = api("patch", names.PLURAL, stored, "--subresource=status", "--type=merge", "-p", json.dumps(patch))
    assert answer.returncode == 0, answer.stderr
    found = _get(api, stored)
    assert (found["spec"]["replicas"], found["status"]["replicas"]) == (1, 1)


def test_explain_tells_unit_and_consequence(api: Any) -> None:
    text = " ".join(api("explain", f"{names.SHORT_NAME}.spec.kvCache.host.size").stdout.split())
    assert "the TOTAL of the pod with the draft's half included" in text
