"""The wire document becomes an EngineConfig in which nothing is left to decide, or one clear line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from speccache_api.geometry import KVGeometry, builtin_facts
from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import size_memory
from speccache_api.storage_target import BucketTarget, VolumeTarget
from speccache_api.wire import WireDocument, build_wire
from speccache_runtime import config
from speccache_runtime.config import AdminConfig, EngineConfig, StorageConfig, from_wire, read_wire
from speccache_runtime.errors import ConfigError


@pytest.fixture
def packaged(monkeypatch, tmp_path):
    """A release that has the built-in pair's folders."""
    for half in ("target", "draft"):
        (tmp_path / "builtin" / "tiny" / half).mkdir(parents=True)
    monkeypatch.setattr(config, "__file__", str(tmp_path / "config.py"))
    return tmp_path / "builtin" / "tiny"


def wire_of(resource: dict) -> WireDocument:
    parsed = SpecCacheDeployment.parse(resource)
    inspection = builtin_facts("tiny")
    return build_wire(parsed, inspection, size_memory(parsed.spec, inspection))


def changed(wire: WireDocument, **parts: dict) -> WireDocument:
    """The document with some fields of some parts replaced."""
    return wire.model_copy(
        update={
            name: value if not isinstance(value, dict) else getattr(wire, name).model_copy(update=value)
            for name, value in parts.items()
        }
    )


def test_builtin_pair(resource, packaged):
    """Every value of the resource arrives, with the directories of the packaged pair."""
    made = from_wire(wire_of(resource))
    assert made == EngineConfig(
        name="chat",
        namespace="default",
        served_name="chat",
        device="cpu",
        kv_dtype="float32",
        target_uri="builtin://tiny",
        target_path=packaged / "target",
        algorithm="EAGLE3",
        draft_uri="builtin://tiny",
        draft_path=packaged / "draft",
        num_steps=5,
        page_size=16,
        device_pages=63,
        device_memory_fraction=None,
        host_pages=125,
        storage=StorageConfig(VolumeTarget(claim="kv", path="/var/lib/speccache/storage"), "Degrade"),
        target_geometry=KVGeometry.heads(6, 2, 64),
        draft_geometry=KVGeometry.heads(1, 2, 64),
        request_timeout=30.0,
        flush_timeout=60.0,
        port=8000,
        host="0.0.0.0",
        max_running=config.MAX_RUNNING,
        max_waiting=config.MAX_WAITING,
        prefill_budget=config.PREFILL_BUDGET_CPU,
    )


def test_frozen(resource, packaged):
    """Nobody adjusts a setting after the start."""
    made = from_wire(wire_of(resource))
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.page_size = 3  # type: ignore[misc]


def test_without_speculation(resource, packaged):
    """No draft, no steps, no bytes for it."""
    resource["spec"]["speculative"] = {"algorithm": "None"}
    del resource["spec"]["kvCache"]["storage"]
    made = from_wire(wire_of(resource))
    assert (made.algorithm, made.draft_uri, made.draft_path, made.num_steps) == ("None", None, None, 0)
    assert (made.draft_geometry, made.storage) == (None, None)


def test_bucket_capacity_salt_and_admin_port(resource, packaged):
    """They arrive as they were said, and survive the way to another process of the pod."""
    storage = {"s3": {"bucket": "pages", "credentialsSecret": "keys"}, "capacity": "1Gi"}
    resource["spec"]["kvCache"] |= {"storage": storage, "requireCacheSalt": True}
    resource["spec"]["admin"] = {"tokenSecret": {"name": "admin"}}
    made = from_wire(wire_of(resource))
    assert made.storage is not None
    assert isinstance(made.storage.target, BucketTarget)
    assert (made.storage.target.bucket, made.storage.target.credentials_secret) == ("pages", "keys")
    assert (made.storage.capacity_bytes, made.require_cache_salt) == (2**30, True)
    assert made.admin == AdminConfig(8081, Path("/var/run/speccache/admin/token"))
    assert EngineConfig.from_json(made.to_json()) == made


def test_gpu_and_volumes(resource):
    """On a GPU: bfloat16, a share of its memory, larger steps; models lie below their claims' mounts."""
    spec = resource["spec"]
    spec["model"]["uri"] = "pvc://models/llama"
    spec["speculative"]["draftModel"]["uri"] = "pvc://models/head"
    spec["kvCache"]["device"] = {"memoryFraction": "0.85"}
    spec["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    made = from_wire(wire_of(resource))
    assert (made.device, made.kv_dtype, made.device_memory_fraction) == ("cuda", "bfloat16", 0.85)
    assert made.device_pages is None
    assert (made.target_path, made.draft_path) == (Path("/models/target/llama"), Path("/models/draft/head"))
    assert made.prefill_budget == config.PREFILL_BUDGET_GPU


WRONG = [
    ({"speculative": {"draft": None}}, "speculative.draft"),
    ({"speculative": {"algorithm": "None"}}, "speculative.draft"),
    ({"speculative": {"num_steps": 0, "num_draft_tokens": 1}}, "speculative.numSteps"),
    ({"speculative": {"num_draft_tokens": 9}}, "speculative.numDraftTokens"),
    ({"geometry": {"draft": None}}, "geometry.draft"),
    ({"kv_cache": {"device_pages": None}}, "exactly one of devicePages"),
    ({"kv_cache": {"device_memory_fraction": "0.5"}}, "exactly one of devicePages"),
    ({"kv_cache": {"device_pages": None, "device_memory_fraction": "0.5"}}, "kvCache.deviceMemoryFraction"),
    ({"kv_cache": {"dtype": "bfloat16"}}, "kvCache.dtype"),
    ({"device": "cuda"}, "kvCache.dtype"),
    ({"target": {"uri": "pvc://models/llama"}}, "target.path"),
    ({"target": {"uri": "builtin://large"}}, "builtin://large is not part of this release"),
]


@pytest.mark.parametrize(("parts", "words"), WRONG, ids=[words for _, words in WRONG])
def test_parts_that_do_not_fit(resource, packaged, parts, words):
    """A document that the operator would never write names its field."""
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")) as caught:
        from_wire(changed(wire_of(resource), **parts))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["0", "1", "1.5", "half", "nan"])
def test_wrong_share_of_the_gpu(resource, packaged, text):
    """Named, with an example of a right one."""
    resource["spec"]["kvCache"]["device"] = {"memoryFraction": "0.85"}
    resource["spec"]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    with pytest.raises(ConfigError, match=r'kvCache\.deviceMemoryFraction.*"0\.85"'):
        from_wire(changed(wire_of(resource), kv_cache={"device_memory_fraction": text}))


def test_read_wire(resource, tmp_path):
    """What the operator's ConfigMap holds."""
    wire = wire_of(resource)
    path = tmp_path / "wire.json"
    path.write_text(wire.to_json())
    assert read_wire(path) == wire
