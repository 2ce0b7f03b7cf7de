"""Facts of models: exact bytes per token, a termination message that fits, a table of built-in models."""

import dataclasses
import json

import pytest

from speccache_api.geometry import (
    BUILTIN_NAMES,
    MAX_INSPECTION_BYTES,
    BadInspection,
    Inspection,
    KVGeometry,
    ModelFacts,
    builtin_facts,
)

_FACTS = ModelFacts(
    geometry=KVGeometry(layers=32, kv_heads=8, head_dim=128),
    parameters=8_030_261_248,
    hidden_size=4096,
    vocab_size=128256,
    max_positions=131072,
    identity="ab" * 32,
    model_type="llama",
)


@pytest.mark.parametrize(
    ("geometry", "kib"),
    [
        (KVGeometry(32, 8, 128), 128),  # Llama-3.1-8B
        (KVGeometry(1, 8, 128), 4),  # its EAGLE-3 head
        (KVGeometry(80, 8, 128), 320),  # Llama-3.3-70B
        (KVGeometry(36, 8, 128), 144),  # Qwen3-8B
    ],
)
def test_known_models_in_bfloat16(geometry: KVGeometry, kib: int) -> None:
    assert geometry.bytes_per_token(2) == kib * 1024


@pytest.mark.parametrize("draft", [None, _FACTS])
def test_json_round_trip(draft: ModelFacts | None) -> None:
    inspection = Inspection(target=_FACTS, draft=draft)
    text = inspection.to_json()
    assert Inspection.from_json(text) == inspection
    assert len(text) < 1000
    assert not inspection.target.declared


def test_json_that_kubernetes_would_cut_off_is_refused() -> None:
    inspection = Inspection(target=dataclasses.replace(_FACTS, model_type="x" * MAX_INSPECTION_BYTES))
    with pytest.raises(ValueError, match="must fit into 4096 bytes"):
        inspection.to_json()


def _changed(**changes: object) -> str:
    data = json.loads(Inspection(target=_FACTS).to_json())
    data["target"].update(changes)
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        Inspection(target=_FACTS).to_json()[:-20],
        _changed(unknown=1),
        _changed(hidden_size="4096"),
        _changed(parameters=-1),
        _changed(identity=None),
        _changed(geometry={"layers": 0, "kv_heads": 8, "head_dim": 128}),
        _changed(geometry={"layers": 1.5, "kv_heads": 8, "head_dim": 128}),
        _changed(geometry=None),
    ],
)
def test_what_is_no_inspection(text: str) -> None:
    with pytest.raises(BadInspection, match="not an inspection result"):
        Inspection.from_json(text)


def test_builtin_models() -> None:
    tiny = builtin_facts("tiny")
    assert tiny.target.geometry == KVGeometry(layers=6, kv_heads=2, head_dim=64)
    assert tiny.draft is not None
    assert tiny.draft.geometry == KVGeometry(layers=1, kv_heads=2, head_dim=64)
    assert (tiny.target.hidden_size, tiny.target.vocab_size, tiny.target.max_positions) == (256, 2048, 4096)
    for facts in (tiny.target, tiny.draft):
        assert len(facts.identity) == 64
        assert facts.parameters > 1_000_000


@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_every_name_that_the_schema_allows_has_facts(name: str) -> None:
    assert builtin_facts(name).draft is not None


def test_another_name_has_none() -> None:
    with pytest.raises(KeyError):
        builtin_facts("huge")
