"""What the benchmark changes between its runs, and what it says when a server does not come up."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from speccache_api.resource import SpecCacheDeployment
from speccache_runtime.bench.restart import with_algorithm, with_degrade, withhold_drafts, without_speculation
from speccache_runtime.bench.server import BenchError, Server
from speccache_runtime.cache.storage.base import ObjectName
from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.errors import ConfigError

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


def test_only_draft_objects_are_withheld(tmp_path):
    """Targets stay where they are."""
    names = {half: ObjectName("99" * 32, half, "ab" * 32, "cd" * 32, "0" * 16) for half in Half}
    for name in names.values():
        (tmp_path / name.path).parent.mkdir(parents=True)
        (tmp_path / name.path).write_bytes(b"page")
    withhold_drafts(tmp_path)
    assert (tmp_path / names[Half.TARGET].path).read_bytes() == b"page"
    assert not (tmp_path / names[Half.DRAFT].path).exists()


def test_nothing_to_withhold(tmp_path):
    """Without draft objects the run would show nothing, and says so."""
    with pytest.raises(BenchError, match="no draft objects"):
        withhold_drafts(tmp_path)


def test_server_that_cannot_start(tmp_path):
    """Its own line is passed on."""
    with pytest.raises(BenchError, match=r"did not start.*no\.yaml"), Server("-f", tmp_path / "no.yaml"):
        pass
