"""Each sample is a right resource, teaches, and uses only fields that the schema has."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from speccache_api.crd import root_schema
from speccache_api.geometry import Inspection, KVGeometry, ModelFacts, builtin_facts
from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import known_inspection, size_memory
from speccache_api.wire import WireDocument, build_wire

_FILES = sorted((Path(__file__).parents[2] / "samples").glob("*.yaml"))
_LLAMA = Inspection(
    target=ModelFacts(KVGeometry.heads(32, 8, 128), 8_030_261_248),
    draft=ModelFacts(KVGeometry.heads(1, 8, 128), 424_000_000),
)


def _unknown(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    found = [f"{path}.{key}" for key in value if key not in schema["properties"]]
    for key, node in schema["properties"].items():
        found += _unknown(value.get(key), node, f"{path}.{key}")
    return found


def test_there_are_samples() -> None:
    assert {path.name for path in _FILES} >= {
        "tiny.yaml",
        "tiny-ngram.yaml",
        "tiny-plain.yaml",
        "tiny-standalone.yaml",
        "llama-8b-gpu.yaml",
    }


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name)
def test_a_sample_is_right(path: Path) -> None:
    text = path.read_text()
    assert _unknown(yaml.safe_load(text)["spec"], root_schema()["properties"]["spec"], "spec") == []
    SpecCacheDeployment.from_yaml(text)
    assert text.startswith("#"), "a sample begins by saying what it shows"


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name)
def test_its_wire_document_survives_the_way_to_the_pod(path: Path) -> None:
    resource = SpecCacheDeployment.from_yaml(path.read_text())
    inspection = known_inspection(resource.spec) or _LLAMA
    plan = size_memory(resource.spec, inspection)
    wire = build_wire(resource, inspection, plan)
    arrived = WireDocument.from_json(wire.to_json())
    assert arrived == wire
    assert arrived.digest() == wire.digest()
    assert arrived.kv_cache.host_pages == plan.host_pages
    assert (arrived.geometry.target, arrived.geometry.draft) == (plan.target, plan.draft)


def test_the_tiny_sample_fits_a_small_machine() -> None:
    tiny = next(path for path in _FILES if path.name == "tiny.yaml")
    resource = SpecCacheDeployment.from_yaml(tiny.read_text())
    assert resource.name == "tiny"
    assert known_inspection(resource.spec) == builtin_facts("tiny"), "no inspection Job is needed"
    assert size_memory(resource.spec, builtin_facts("tiny")).limit <= 4 * 2**30
