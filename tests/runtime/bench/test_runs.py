"""What the benchmark changes between its runs, and what it says when a server does not come up."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from speccache_api.resource import SpecCacheDeployment
from speccache_api.storage_target import BucketTarget, VolumeTarget, resolve
from speccache_runtime.bench.restart import (
    with_algorithm,
    with_degrade,
    with_storage_of_its_own,
    withhold_drafts,
    without_speculation,
)
from speccache_runtime.bench.server import BenchError, Server
from speccache_runtime.cache.storage.base import ObjectName
from speccache_runtime.cache.storage.codec import HEADER_SIZE, Half
from speccache_runtime.cache.storage.registry import open_backend
from speccache_runtime.errors import ConfigError
from speccache_runtime.local import local_bucket

SAMPLE = Path(__file__).parents[3] / "samples" / "tiny.yaml"


def test_changed_resources_are_right():
    """Each is still a resource that could be applied; the original stays as it was."""
    data = yaml.safe_load(SAMPLE.read_text())
    before = yaml.safe_dump(data)
    degraded = SpecCacheDeployment.parse(with_degrade(data)).spec
    assert degraded.kv_cache.storage is not None
    assert degraded.kv_cache.storage.missing_draft == "Degrade"
    plain = SpecCacheDeployment.parse(without_speculation(data)).spec
    assert (plain.draft, plain.kv_cache.storage) == (None, None)
    assert yaml.safe_dump(data) == before


def test_another_algorithm_takes_the_built_in_draft_or_none():
    """The rest of the speculation stays; a model of one's own brings its own draft."""
    data = yaml.safe_load(SAMPLE.read_text())
    before = yaml.safe_dump(data)
    assert with_algorithm(data, None) == with_algorithm(data, "EAGLE3") == data
    ngram = SpecCacheDeployment.parse(with_algorithm(data, "NGram")).spec
    assert (ngram.algorithm, ngram.draft, ngram.speculative.steps) == ("NGram", None, 7)
    own = SpecCacheDeployment.parse(with_algorithm(data, "Standalone")).spec
    assert (own.algorithm, own.draft.uri) == ("Standalone", "builtin://tiny")
    assert yaml.safe_dump(data) == before
    data["spec"]["model"]["uri"] = "pvc://models/llama"
    with pytest.raises(ConfigError, match="pvc://models/llama has no built-in draft"):
        with_algorithm(data, "Standalone")


FINGERPRINT = "ef" * 32


def test_only_draft_objects_of_this_model_are_withheld(tmp_path):
    """Targets stay where they are, and so do other models' drafts."""
    target = VolumeTarget(claim=None, path=str(tmp_path))
    names = [ObjectName(f, half, "ab" * 32, "cd" * 32, "0" * 16) for half in Half for f in (FINGERPRINT, "aa" * 32)]
    backend = open_backend(target)
    for name in names:
        backend.write(name, b"h" * HEADER_SIZE, memoryview(b"page"))
    withhold_drafts(target, FINGERPRINT)
    left = [name for name, there in zip(names, backend.exists(names), strict=True) if there]
    backend.close()
    assert left == [name for name in names if (name.half, name.fingerprint) != (Half.DRAFT, FINGERPRINT)]


def test_nothing_to_withhold(tmp_path):
    """Without draft objects the run would show nothing, and says so."""
    with pytest.raises(BenchError, match="no draft objects"):
        withhold_drafts(VolumeTarget(claim=None, path=str(tmp_path)), FINGERPRINT)


def test_a_bucket_is_used_below_a_prefix_that_nobody_else_has(tmp_path):
    data = yaml.safe_load(SAMPLE.read_text())
    data["spec"]["kvCache"]["storage"] = {"s3": {"bucket": "pages", "prefix": "a", "credentialsSecret": "keys"}}
    before = yaml.safe_dump(data)
    found = [with_storage_of_its_own(data, SpecCacheDeployment.parse(data), tmp_path) for _ in range(2)]
    assert yaml.safe_dump(data) == before
    for changed, target in found:
        assert isinstance(target, BucketTarget)
        assert target == local_bucket(resolve(SpecCacheDeployment.parse(changed)))
        assert target.prefix.startswith("a/bench-")
    assert found[0][1] != found[1][1]


def test_a_volume_is_a_folder_of_its_own(tmp_path):
    data = yaml.safe_load(SAMPLE.read_text())
    found = with_storage_of_its_own(data, SpecCacheDeployment.parse(data), tmp_path / "kv")
    assert found == (data, VolumeTarget(claim=None, path=str(tmp_path / "kv")))


def test_server_that_cannot_start(tmp_path):
    """Its own line is passed on."""
    with pytest.raises(BenchError, match=r"did not start.*no\.yaml"), Server("-f", tmp_path / "no.yaml"):
        pass
