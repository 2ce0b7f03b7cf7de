"""The wire document: what the operator writes is what the runtime reads, byte for byte, or nothing."""

import json
from typing import Any

import pytest

from speccache_api import names
from speccache_api.geometry import builtin_facts
from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import size_memory
from speccache_api.storage_target import BucketTarget
from speccache_api.wire import BadWireDocument, WireDocument, build_wire


def _wire(name: str = "tiny", **spec: Any) -> WireDocument:
    tiers = {
        "pageSize": 16,
        "device": {"tokens": 65536},
        "host": {"tokens": 131072},
        "storage": {"persistentVolumeClaim": {"size": "2Gi"}},
    }
    resource = SpecCacheDeployment.parse(
        {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": name, "namespace": "chat"},
            "spec": {
                "model": {"uri": "builtin://tiny"},
                "speculative": {"algorithm": "EAGLE3", "draftModel": {"uri": "builtin://tiny"}},
                "kvCache": tiers,
                **spec,
            },
        }
    )
    inspection = builtin_facts("tiny")
    return build_wire(resource, inspection, size_memory(resource.spec, inspection))


def _heads(layers: int) -> dict[str, Any]:
    buffers = [{"name": name, "shape": [2, 64], "dtype": None} for name in ("k", "v")]
    return {"layers": layers, "buffers": buffers, "shared": False}


def test_the_whole_document() -> None:
    assert json.loads(_wire().to_json()) == {
        "version": 2,
        "name": "tiny",
        "namespace": "chat",
        "servedName": "tiny",
        "device": "cpu",
        "target": {"uri": "builtin://tiny", "path": None},
        "speculative": {
            "algorithm": "EAGLE3",
            "draft": {"uri": "builtin://tiny", "path": None},
            "numSteps": 7,
            "numDraftTokens": 8,
        },
        "kvCache": {
            "dtype": "float32",
            "pageSize": 16,
            "devicePages": 4096,
            "deviceMemoryFraction": None,
            "hostPages": 8192,
            "storage": {
                "target": {"kind": "Volume", "claim": "tiny-kv", "path": "/var/lib/speccache/storage"},
                "missingDraft": "Recompute",
                "capacityBytes": None,
            },
            "requireCacheSalt": False,
        },
        "parallelism": {"tensor": 1},
        "drain": {"requestTimeoutSeconds": 30, "flushTimeoutSeconds": 60},
        "geometry": {"target": _heads(layers=6), "draft": _heads(layers=1)},
        "port": 8000,
        "admin": None,
    }


def test_a_bucket_a_capacity_a_required_salt_and_an_admin_port() -> None:
    wire = _wire(
        kvCache={
            "device": {"tokens": 64},
            "host": {"tokens": 64},
            "storage": {"s3": {"bucket": "pages", "credentialsSecret": "keys"}, "capacity": "1Gi"},
            "requireCacheSalt": True,
        },
        admin={"tokenSecret": {"name": "admin"}},
    )
    cache, arrived = wire.kv_cache, WireDocument.from_json(wire.to_json())
    assert cache.storage is not None
    assert cache.storage.target == BucketTarget(
        bucket="pages",
        prefix="",
        endpoint=None,
        region=None,
        force_path_style=False,
        credentials_secret="keys",
        ca_bundle_config_map=None,
        service_account=None,
    )
    assert (cache.storage.capacity_bytes, cache.require_cache_salt) == (2**30, True)
    assert json.loads(wire.to_json())["admin"] == {"port": 8081, "tokenPath": "/var/run/speccache/admin/token"}
    assert arrived == wire


def test_models_on_claims_and_a_gpu() -> None:
    wire = _wire(
        model={"uri": "pvc://models/a", "servedName": "big"},
        speculative={"algorithm": "EAGLE3", "draftModel": {"uri": "pvc://models/b"}, "numSteps": 3},
        kvCache={"device": {"memoryFraction": "0.85"}, "host": {"tokens": 64}},
        resources={"limits": {"nvidia.com/gpu": "1"}},
    )
    assert (wire.device, wire.served_name, wire.kv_cache.dtype) == ("cuda", "big", "bfloat16")
    assert wire.target.path == f"{names.TARGET_MODEL_PATH}/a"
    assert wire.speculative.draft is not None
    assert wire.speculative.draft.path == f"{names.DRAFT_MODEL_PATH}/b"
    assert (wire.speculative.num_steps, wire.speculative.num_draft_tokens) == (3, 4)
    assert (wire.kv_cache.device_pages, wire.kv_cache.device_memory_fraction) == (None, "0.85")
    assert wire.kv_cache.storage is None


@pytest.mark.parametrize("speculative", [None, {"algorithm": "None"}])
def test_no_speculation(speculative: dict[str, Any] | None) -> None:
    more = {} if speculative is None else {"speculative": speculative}
    wire = _wire(**({"speculative": {"algorithm": "None"}} | more))
    assert wire.speculative.draft is None
    assert (wire.speculative.algorithm, wire.speculative.num_steps, wire.speculative.num_draft_tokens) == ("None", 0, 1)
    assert wire.geometry.draft is None


def test_json_is_canonical_and_the_digest_is_of_it() -> None:
    wire = _wire()
    text = wire.to_json()
    assert WireDocument.from_json(text) == wire
    assert WireDocument.from_json(text).to_json() == text
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert _wire().digest() == wire.digest()
    assert len(wire.digest()) == 64


@pytest.mark.parametrize(
    "spec",
    [{"replicas": 0}, {"memory": {"overhead": "3Gi"}}, {"resources": {"limits": {"cpu": "2"}}}],
    ids=["replicas", "overhead", "cpu"],
)
def test_what_a_running_engine_need_not_know_rolls_no_pods(spec: dict[str, Any]) -> None:
    assert _wire(**spec).digest() == _wire().digest()


@pytest.mark.parametrize(
    "spec",
    [
        {"speculative": {"algorithm": "None"}},
        {"model": {"uri": "builtin://tiny", "servedName": "other"}},
        {"drain": {"flushTimeoutSeconds": 61}},
        {"kvCache": {"pageSize": 32, "device": {"tokens": 65536}, "host": {"tokens": 131072}}},
        {"parallelism": {"tensor": 2}},
        {"admin": {"tokenSecret": {"name": "admin"}}},
    ],
    ids=["speculation", "served name", "drain", "page size", "ranks", "admin"],
)
def test_what_it_must_know_changes_the_digest(spec: dict[str, Any]) -> None:
    assert _wire(**spec).digest() != _wire().digest()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("version", 1, "version"),
        ("kvCache.storage.target.kind", "Tape", "kvCache.storage.target"),
        ("kvCache.storage.target.bucket", "pages", "kvCache.storage.target.Volume.bucket"),
        ("kvCache.storage.capacityBytes", 0, "kvCache.storage.capacityBytes"),
        ("kvCache.requireCacheSalt", "yes", "kvCache.requireCacheSalt"),
        ("admin", {"port": 8081}, "admin.tokenPath"),
        ("port", "8000", "port"),
        ("unknown", 1, "unknown"),
        ("kvCache.pageSize", 0, "kvCache.pageSize"),
        ("kvCache.hostPages", 1.5, "kvCache.hostPages"),
        ("kvCache.dtype", "fp8", "kvCache.dtype"),
        ("speculative.algorithm", None, "speculative.algorithm"),
        ("target.path", 5, "target.path"),
        ("geometry.target", None, "geometry.target"),
        ("geometry.target.layers", 0, "geometry.target"),
        ("geometry.target.layers", "6", "geometry.target.layers"),
        ("geometry.target.kind", "mha", "geometry.target.kind"),
        ("geometry.target.buffers", [], "geometry.target"),
        ("geometry.draft.buffers.0.shape", [2, -64], "geometry.draft.buffers.0"),
        ("geometry.draft.buffers.0.dtype", "fp8", "geometry.draft.buffers.0.dtype"),
        ("geometry.draft.buffers.0.name", "../k", "geometry.draft.buffers.0"),
    ],
)
def test_a_wrong_document_names_the_field(path: str, value: object, said: str) -> None:
    document = json.loads(_wire().to_json())
    *parents, last = path.split(".")
    target = document
    for parent in parents:
        target = target[int(parent) if parent.isdigit() else parent]
    target[last] = value
    with pytest.raises(BadWireDocument, match=rf"not a wire document of version 2: {said}: "):
        WireDocument.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}"])
def test_what_is_no_document(text: str) -> None:
    with pytest.raises(BadWireDocument, match="not a wire document"):
        WireDocument.from_json(text)
