"""Python and the API server judge alike: hundreds of random resources, right and wrong, one verdict each.

The table of wrong resources shows the messages; this shows that no rule is stricter on one side than on the other.
"""

import json
import random
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from speccache_api.resource import InvalidResource, SpecCacheDeployment

_RESOURCES = 300
_SEED = 20261121
_BASES = list(
    yaml.safe_load((Path(__file__).parents[1] / "api" / "wrong_resources.yaml").read_text())["bases"].values()
)
_REMOVED = object()

_SIZES: list[Any] = ["1Gi", "0", 0, 1, "0.5Gi", "1.5k", "40m", "1Pi", "1025Ti", "2E", "9999999999999999999", "0.0Gi"]
_SIZES += [2**50, 2**50 + 1, "-1Gi", 1.5, "1 Gi", "", "1e3"]
_SHARES: list[Any] = ["0.85", "0.1", "0.95", "0.9501", "0.0999", "0.0", "1.0", "0.12345", 0.5]
_RATIOS: list[Any] = ["2", "1.5", "0", "0.000", "0.001", "1000", ".5", "1.", 2]
_HEADS = {"kvHeads": 2, "headDim": 64}
_LATENT = {"kvLoraRank": 512, "qkRopeHeadDim": 64}
_FORMS: list[dict[str, int]] = [_HEADS, _LATENT, {"kvHeads": 2}, {"qkRopeHeadDim": 64}, _HEADS | _LATENT, {}]
_GEOMETRIES = [{"layers": 1} | form | more for form in _FORMS for more in ({}, {"parameters": 10})]
_URIS = [
    "builtin://tiny",
    "pvc://models/a",
    "pvc://models",
    "pvc://m.o-d/a/b_c",
    "pvc://models/",
    "pvc://m/.a",
    "hf://a",
]
_AMOUNTS: list[Any] = ["1", 1, "2", "500m", "1.5", "1e3", "two", True]
_CIDRS = ["10.0.0.0/8", "10.0.0.1/8", "0.0.0.0/0", "10.0.0.0/33", "010.0.0.0/8", "10.0.0/8", "256.0.0.0/8", "10.0.0.1"]
_CIDRS += [
    "fd00::/8",
    "::/0",
    "fd00::1::/64",
    "::ffff:10.0.0.0/104",
    "fd00::/129",
    "1:2:3:4:5:6:7:8/64",
    "1:2/64",
    ":/8",
]
_LABELS = ["app", "a.b/c", "kubernetes.io/metadata.name", "-app", "a b", "x" * 63, "x" * 64, "a/b/c", "/a", "A.b/c", ""]

_BUCKET_NAMES = [
    "pages",
    "a.b-c",
    "a-.b",
    "a.-b",
    "a..b",
    ".ab",
    "ab.",
    "-ab",
    "ab",
    "abc",
    "a" * 63,
    "a" * 64,
    "A" * 3,
]
_BUCKET_NAMES += [
    "a_b",
    "1.2.3.4",
    "1.2.3",
    "1.2.3.4.5",
    "1.2.3.a",
    "xn--a",
    "sthree-a",
    "a--x-s3",
    "a-s3alias",
    "a.mrap",
]
_BUCKET_NAMES += ["pages\n", "pägés"]
_PREFIXES = [
    "",
    "a",
    "a/b.c/_d-e",
    "a//b",
    "/a",
    "a/",
    ".",
    "..",
    "a/..",
    "a/.b",
    "a..b",
    "-a",
    "a b",
    "a" * 128,
    "a" * 129,
]
_ENDPOINTS = [
    "https://s3.eu-central-1.amazonaws.com",
    "http://minio:9000",
    "http://10.0.0.1:1",
    "http://[fd00::1]:9000",
]
_ENDPOINTS += [
    "http://a:0",
    "http://a:65535",
    "http://a:65536",
    "http://a:",
    "https://u:p@a",
    "https://u@a",
    "http://a/",
    "",
]
_ENDPOINTS += [
    "http://a?b",
    "http://a#b",
    "HTTP://a",
    "http://A",
    "ftp://a",
    "http://",
    "http://a b",
    "http://[::1",
    "//a",
]
_BUCKETS = [{"bucket": name} for name in ("pages", "P")]
_BUCKETS += [{"bucket": "pages", "endpoint": f"{scheme}://a", "caBundleConfigMap": "c"} for scheme in ("http", "https")]

_CHANGES: dict[str, list[Any]] = {
    "model.uri": _URIS,
    "model.servedName": ["chat", "a/b.c-d", "-a", "a b", "x" * 128, "x" * 129],
    "model.kvGeometry": _GEOMETRIES,
    "speculative.algorithm": ["EAGLE3", "None"],
    "speculative.draftModel.uri": _URIS,
    "speculative.draftModel.kvGeometry": _GEOMETRIES,
    "speculative.draftModel": [_REMOVED],
    "speculative.numSteps": [1, 7, 15, 0, 16, "7"],
    "speculative.numDraftTokens": [8, 2, 16, 1],
    "speculative": [_REMOVED],
    "kvCache.dtype": ["Auto", "Float32", "BFloat16"],
    "kvCache.pageSize": [16, 64, 256, 8],
    "kvCache.device.tokens": [1, 10**10, 0, 10**10 + 1, _REMOVED],
    "kvCache.device.size": _SIZES,
    "kvCache.device": [{"size": size} for size in _SIZES] + [{"memoryFraction": share} for share in _SHARES],
    "kvCache.device.memoryFraction": _SHARES,
    "kvCache.host": [{"size": size} for size in _SIZES] + [{"ratio": ratio} for ratio in _RATIOS],
    "kvCache.host.tokens": [1, -1, _REMOVED],
    "kvCache.host.size": _SIZES,
    "kvCache.host.ratio": _RATIOS,
    "kvCache.storage.persistentVolumeClaim": [{"claimName": name} for name in ("kv", "a.b", "A", "a..b", "")],
    "kvCache.storage.persistentVolumeClaim.size": _SIZES,
    "kvCache.storage.persistentVolumeClaim.storageClassName": ["fast"],
    "kvCache.storage.persistentVolumeClaim.accessModes": [["ReadWriteMany"], ["ReadWriteOnce", "ReadWriteMany"], []],
    "kvCache.storage": [_REMOVED, *({"s3": s3} for s3 in _BUCKETS)],
    "kvCache.storage.capacity": _SIZES,
    "kvCache.storage.s3": _BUCKETS,
    "kvCache.storage.s3.bucket": _BUCKET_NAMES,
    "kvCache.storage.s3.prefix": _PREFIXES,
    "kvCache.storage.s3.endpoint": _ENDPOINTS,
    "kvCache.storage.s3.region": ["eu-central-1", "garage", "a" * 63, "a" * 64, "-eu", "", "eu/1"],
    "kvCache.storage.s3.caBundleConfigMap": ["authorities", "A"],
    "kvCache.requireCacheSalt": [True, False, "true"],
    "kvCache.storage.missingDraft": ["Recompute", "Degrade", "Auto"],
    "kvCache.storage.retention": ["Retain", "Delete"],
    "admin": [
        {"tokenSecret": {"name": "a"}},
        {"tokenSecret": {"name": "A"}},
        {"tokenSecret": {"name": "a", "key": "/"}},
    ],
    "memory.policy": ["Auto", "Manual"],
    "memory.overhead": _SIZES,
    "parallelism.tensor": [1, 2, 3],
    "replicas": [0, 2, 1000, 1001],
    "podDisruptionBudget": [
        {"minAvailable": value} for value in (0, 1, 1000, 1001, -1, "0%", "100%", "101%", "1", "%", 1.5, True)
    ],
    "podDisruptionBudget.maxUnavailable": [1, "50%", -1],
    "networkPolicy": [{}, {"egress": "Deny"}, {"egress": "deny"}],
    "networkPolicy.allowFrom": [
        *([{"ipBlock": {"cidr": cidr}}] for cidr in _CIDRS),
        *([{"podSelector": {"matchLabels": {key: "x"}}}] for key in _LABELS),
        *([{"namespaceSelector": {"matchLabels": {"a": value}}}] for value in ("", "x", "-x", "x" * 63, "x" * 64)),
        [{"podSelector": {}, "namespaceSelector": {}}],
        [{}],
        [],
        [{"podSelector": {}}] * 8,
        [{"podSelector": {}}] * 9,
    ],
    "drain.flushTimeoutSeconds": [0, 3600, 3601],
    "resources.limits.cpu": _AMOUNTS,
    "resources.limits.memory": ["8Gi", 2**30],
    "resources.limits.nvidia~com/gpu": ["1", 1, "2", "1.0", _REMOVED],
    "resources.requests.cpu": _AMOUNTS,
    "resources.requests.nvidia~com/gpu": ["1", 1, "2"],
    "resources.requests.memory": ["8Gi", "9Gi"],
}


def _change(spec: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = (part.replace("~", ".") for part in path.split("."))
    for parent in parents:
        spec = spec.setdefault(parent, {})
    if value is _REMOVED:
        spec.pop(last, None)
    else:
        spec[last] = deepcopy(value)


def _resource(number: int, choose: random.Random) -> dict[str, Any]:
    """A right resource with one or two changes."""
    resource: dict[str, Any] = deepcopy(choose.choice(_BASES))
    resource["metadata"] = {"name": f"random-{number}", "namespace": "default"}
    for path in choose.sample(sorted(_CHANGES), choose.randint(1, 2)):
        _change(resource["spec"], path, choose.choice(_CHANGES[path]))
    return resource


def _is_right(resource: dict[str, Any]) -> bool:
    try:
        SpecCacheDeployment.parse(resource)
    except InvalidResource:
        return False
    return True


def _single(number: int, path: str, value: Any) -> dict[str, Any]:
    """The first right resource with one change."""
    resource: dict[str, Any] = deepcopy(_BASES[0])
    resource["metadata"] = {"name": f"random-{number}", "namespace": "default"}
    _change(resource["spec"], path, value)
    return resource


def test_one_verdict_for_every_value(apply: Any) -> None:
    changes = [(path, value) for path, values in _CHANGES.items() for value in values]
    _judge_alike([_single(number, *change) for number, change in enumerate(changes)], apply)


def test_one_verdict_for_every_resource(apply: Any) -> None:
    choose = random.Random(_SEED)
    accepted = _judge_alike([_resource(number, choose) for number in range(_RESOURCES)], apply)
    assert _RESOURCES / 5 < len(accepted) < _RESOURCES * 3 / 4, "the mix of right and wrong is too one-sided"


def _judge_alike(resources: list[dict[str, Any]], apply: Any) -> set[str]:
    """Names of the accepted ones."""
    answer = apply("--dry-run=server", stdin="\n---\n".join(map(json.dumps, resources)))
    accepted = set(re.findall(r"/(random-\d+) serverside-applied", answer.stdout))
    ours = {resource["metadata"]["name"] for resource in resources if _is_right(resource)}
    by_name = {resource["metadata"]["name"]: resource["spec"] for resource in resources}
    assert [by_name[name] for name in sorted(accepted ^ ours)] == []
    return accepted
