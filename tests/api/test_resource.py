"""Parsing: defaults, problems listed one per line, and values that cannot be changed afterwards."""

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from speccache_api.resource import InvalidResource, SpecCacheDeployment

_MINIMAL = """
apiVersion: speccache.io/v1alpha1
kind: SpecCacheDeployment
metadata: {name: tiny, namespace: chat, resourceVersion: "7", creationTimestamp: null}
spec:
  model: {uri: "builtin://tiny"}
  kvCache:
    device: {tokens: 4096}
    host: {size: 1Gi}
"""


def _with(**spec: Any) -> dict[str, Any]:
    resource: dict[str, Any] = yaml.safe_load(_MINIMAL)
    resource["spec"].update(spec)
    return resource


def _problems(resource: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidResource) as caught:
        SpecCacheDeployment.parse(resource)
    return str(caught.value).splitlines()


def test_defaults() -> None:
    resource = SpecCacheDeployment.from_yaml(_MINIMAL)
    spec = resource.spec
    assert (resource.name, resource.namespace, resource.served_name) == ("tiny", "chat", "tiny")
    assert (spec.device, spec.replicas, spec.wanted_replicas, spec.draft) == ("cpu", None, 1, None)
    assert (spec.kv_cache.dtype, spec.kv_cache.page_size, spec.kv_cache.storage) == ("Auto", 64, None)
    assert spec.kv_cache.host.size == 2**30
    assert (spec.memory.policy, spec.memory.overhead) == ("Auto", None)
    assert (spec.drain.request_timeout_seconds, spec.drain.flush_timeout_seconds) == (30, 60)


def test_latents_are_served_by_two_ranks() -> None:
    latent = {"layers": 27, "kvLoraRank": 512, "qkRopeHeadDim": 64, "parameters": 10}
    resource = _with(model={"uri": "pvc://m/x", "kvGeometry": latent}, parallelism={"tensor": 2})
    assert SpecCacheDeployment.parse(resource).spec.parallelism.tensor == 2


def test_defaults_of_optional_parts() -> None:
    spec = SpecCacheDeployment.parse(
        _with(
            speculative={"algorithm": "EAGLE3", "draftModel": {"uri": "builtin://tiny"}},
            kvCache={
                "device": {"tokens": 4096},
                "host": {"tokens": 4096},
                "storage": {"persistentVolumeClaim": {"size": "1Gi"}},
            },
        )
    ).spec
    assert spec.speculative is not None
    assert (spec.speculative.steps, spec.speculative.draft_tokens) == (7, 8)
    storage = spec.kv_cache.storage
    assert storage is not None
    assert (storage.missing_draft, storage.retention) == ("Recompute", "Retain")
    assert storage.persistent_volume_claim is not None
    assert storage.persistent_volume_claim.created
    assert storage.persistent_volume_claim.modes == ("ReadWriteOnce",)


def test_a_gpu_in_the_limits_chooses_the_gpu() -> None:
    assert SpecCacheDeployment.parse(_with(resources={"limits": {"nvidia.com/gpu": 1}})).spec.device == "cuda"
    assert SpecCacheDeployment.parse(_with(resources={"limits": {"cpu": 4}})).spec.device == "cpu"


def test_no_speculation_said_or_unsaid() -> None:
    assert SpecCacheDeployment.parse(_with(speculative={"algorithm": "None"})).spec.draft is None


def test_the_status_and_foreign_metadata_do_not_matter() -> None:
    resource = _with()
    resource["status"] = {"conditions": [], "anything": None}
    resource["metadata"]["managedFields"] = [{}]
    assert SpecCacheDeployment.parse(resource).spec == SpecCacheDeployment.from_yaml(_MINIMAL).spec


def test_all_problems_are_listed_one_per_line() -> None:
    kv_cache = {"device": {"tokens": 0}, "host": {"size": "1GB", "sise": 1}, "pageSize": 48}
    assert _problems(_with(kvCache=kv_cache, replicas="2")) == [
        "spec.kvCache.pageSize: must be one of 16, 32, 64, 128 or 256; found 48",
        "spec.kvCache.device.tokens: must be at least 1; found 0",
        "spec.kvCache.host.size: give a size such as 512Mi or 40Gi, found '1GB'",
        "spec.kvCache.host.sise: is not a field; check the spelling, or remove it",
        "spec.replicas: must be a whole number; found '2'",
    ]


def test_all_broken_rules_are_listed() -> None:
    kv_cache = {"device": {"memoryFraction": "0.85"}, "host": {"size": "1Gi", "tokens": 5}}
    assert _problems(_with(kvCache=kv_cache, memory={"policy": "Manual"})) == [
        "spec.kvCache.device.memoryFraction: memoryFraction is a share of a GPU's memory; give size or tokens,"
        " or set resources.limits nvidia.com/gpu: 1",
        "spec.memory.policy: memory.policy Manual needs resources.limits.memory; give it, or set memory.policy: Auto",
        "spec.kvCache.host: give exactly one of size, tokens, ratio; found size and tokens",
    ]


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({"kvCache": []}, "spec.kvCache: must be an object; found []"),
        ({"model": {"uri": 5}}, "spec.model.uri: must be text; put it in quotes; found 5"),
        ({"model": {"uri": None}}, "spec.model.uri: has no value (null); give one, or remove the field"),
        ({"model": {"uri": "builtin://tiny", "servedName": "x" * 129}}, "spec.model.servedName: must have at most 128"),
        ({"resources": {"limits": {"cpu": True}}}, "spec.resources.limits.cpu: give an amount such as 500m, 2 or 4Gi"),
        ({"replicas": 1001}, "spec.replicas: must be at most 1000; found 1001"),
        ({"replicas": True}, "spec.replicas: must be a whole number; found True"),
    ],
)
def test_the_line_of_a_problem(spec: dict[str, Any], line: str) -> None:
    lines = _problems(_with(**spec))
    assert len(lines) == 1
    assert lines[0].startswith(line)


@pytest.mark.parametrize("resource", [None, [], "text", 5])
def test_what_is_no_object(resource: Any) -> None:
    with pytest.raises(InvalidResource, match="give one object of kind SpecCacheDeployment"):
        SpecCacheDeployment.parse(resource)


@pytest.mark.parametrize("text", ["", "{", "a: 1\n---\nb: 2\n", "- 1", "spec: *nowhere"])
def test_yaml_that_is_not_one_resource(text: str) -> None:
    with pytest.raises(InvalidResource, match=r"^\(document\): "):
        SpecCacheDeployment.from_yaml(text)


def test_another_kind_is_refused() -> None:
    resource = _with()
    resource.update(apiVersion="v1", kind="Pod")
    assert _problems(resource) == [
        "apiVersion: must be one of 'speccache.io/v1alpha1'; found 'v1'",
        "kind: must be one of 'SpecCacheDeployment'; found 'Pod'",
    ]


def test_a_parsed_resource_cannot_be_changed() -> None:
    resource = SpecCacheDeployment.from_yaml(_MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        resource.spec.replicas = 2
