"""`serve -f` resolves a resource as a cluster would, with directories of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from speccache_api.fingerprint import fingerprint
from speccache_api.geometry import KVGeometry, builtin_facts
from speccache_api.storage_target import BucketTarget, VolumeTarget
from speccache_runtime import config, local
from speccache_runtime.errors import ConfigError
from speccache_runtime.local import LocalOptions, default_storage_dir, parse_resource, plan_locally, read_fingerprint
from speccache_runtime.server.command import memory_table


@pytest.fixture(autouse=True)
def _packaged(monkeypatch, tmp_path):
    for half in ("target", "draft"):
        (tmp_path / "builtin" / "tiny" / half).mkdir(parents=True)
    monkeypatch.setattr(config, "__file__", str(tmp_path / "config.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(resource: dict, **options: object) -> local.LocalPlan:
    return plan_locally(parse_resource(resource, Path("r.yaml")), LocalOptions(**options))


def test_storage_directory_of_its_own(resource, tmp_path):
    """Each resource has its own under the user's cache, made when needed; it answers this machine only."""
    made = plan(resource).config
    assert made.storage is not None
    path = tmp_path / "cache" / "speccache" / "serve" / "default" / "chat"
    assert made.storage.target == VolumeTarget(claim=None, path=str(path))
    assert path.is_dir()
    assert made.storage.missing_draft == "Degrade"
    assert (made.host, made.port) == ("127.0.0.1", 8000)


def test_default_cache_is_in_the_home(monkeypatch):
    """Without XDG_CACHE_HOME."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_storage_dir("a", "b") == Path("/home/somebody/.cache/speccache/serve/a/b")


def test_options(resource, tmp_path):
    """They replace what a cluster would have given."""
    made = plan(resource, storage_dir=tmp_path / "kv", host="0.0.0.0", port=9000).config
    assert made.storage is not None
    assert made.storage.target == VolumeTarget(claim=None, path=str(tmp_path / "kv"))
    assert (made.host, made.port) == ("0.0.0.0", 9000)


BUCKET = {"bucket": "pages", "prefix": "a", "credentialsSecret": "k", "serviceAccountName": "s"}


def test_a_bucket_is_reached_by_the_environments_credentials(resource):
    """Secret, certificates and ServiceAccount are the cluster's; which bucket it is stays the same."""
    resource["spec"]["kvCache"]["storage"] = {"s3": {**BUCKET, "caBundleConfigMap": "c", "endpoint": "https://m:1"}}
    made = plan(resource).config
    assert made.storage is not None
    target = made.storage.target
    assert isinstance(target, BucketTarget)
    assert (target.credentials_secret, target.ca_bundle_config_map, target.service_account) == (None, None, None)
    assert (target.url, target.endpoint) == ("s3://pages/a", "https://m:1")


def test_the_admin_port_is_the_clusters(resource):
    """Its token is in a Secret, which is not here; a port without one would be open to everybody."""
    resource["spec"]["admin"] = {"tokenSecret": {"name": "admin"}}
    assert plan(resource).config.admin is None


def test_a_directory_does_not_stand_for_a_bucket(resource, tmp_path):
    resource["spec"]["kvCache"]["storage"] = {"s3": BUCKET}
    with pytest.raises(ConfigError, match="--storage-dir: the resource keeps its pages in s3://pages/a"):
        plan(resource, storage_dir=tmp_path)


def test_the_fingerprint_is_that_of_the_status(resource):
    """What `bench restart` looks below is what the operator tells."""
    parsed = parse_resource(resource, Path("r.yaml"))
    identity = builtin_facts("tiny").target.identity
    assert read_fingerprint(parsed, {}) == fingerprint(identity, "float32", 16)


def test_claims(resource, tmp_path):
    """A directory stands for a claim; geometry that the resource declares needs no files to be read."""
    shape = {"layers": 2, "kvHeads": 2, "headDim": 8, "parameters": 1000}
    (tmp_path / "data" / "llama").mkdir(parents=True)
    resource["spec"]["model"] = {"uri": "pvc://models/llama", "kvGeometry": shape}
    resource["spec"]["speculative"] = {"algorithm": "None"}
    made = plan(resource, claims={"models": tmp_path / "data"}).config
    assert made.target_path == tmp_path / "data" / "llama"
    assert made.target_geometry == KVGeometry.heads(2, 2, 8)


def test_packaged_model_that_is_missing(resource, monkeypatch):
    """A broken installation is named."""
    monkeypatch.setattr(config, "__file__", "/nowhere/config.py")
    with pytest.raises(ConfigError, match="builtin://tiny is not part of this release"):
        plan(resource)


def test_memory_table(resource):
    """Every term, and the sum that a pod would request."""
    memory = plan(resource).memory
    table = memory_table(memory)
    for term in ("device", "hostTarget", "hostDraft", "sharedMemory", "overhead", "limit"):
        assert f"  {term}" in table
    assert f"{memory.limit / 2**20:.1f} MiB" in table
    assert "125 pages x 98304 bytes" in table
