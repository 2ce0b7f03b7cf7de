"""Facts of models: exact bytes per token, a termination message that fits, a table of built-in models."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccache_api.geometry import (
    BUILTIN_NAMES,
    MAX_INSPECTION_BYTES,
    BadInspection,
    Inspection,
    KVBuffer,
    KVDtype,
    KVGeometry,
    ModelFacts,
    builtin_facts,
)

_FACTS = ModelFacts(
    geometry=KVGeometry.heads(layers=32, kv_heads=8, head_dim=128),
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
        (KVGeometry.heads(32, 8, 128), 128),  # Llama-3.1-8B
        (KVGeometry.heads(1, 8, 128), 4),  # its EAGLE-3 head
        (KVGeometry.heads(80, 8, 128), 320),  # Llama-3.3-70B
        (KVGeometry.heads(36, 8, 128), 144),  # Qwen3-8B
        (KVGeometry.latent(61, 512, 64), 68.625),  # DeepSeek-V3: layers * (kv_lora_rank + qk_rope_head_dim) * 2
        (KVGeometry.latent(27, 512, 64), 30.375),  # DeepSeek-V2-Lite
    ],
)
def test_known_models_in_bfloat16(geometry: KVGeometry, kib: float) -> None:
    assert geometry.bytes_per_token("bfloat16") == kib * 1024


@pytest.mark.parametrize("geometry", [_FACTS.geometry, KVGeometry.latent(61, 512, 64)])
@pytest.mark.parametrize("draft", [None, _FACTS])
def test_json_round_trip(draft: ModelFacts | None, geometry: KVGeometry) -> None:
    inspection = Inspection(target=dataclasses.replace(_FACTS, geometry=geometry), draft=draft)
    text = inspection.to_json()
    assert Inspection.from_json(text) == inspection
    assert len(text) < 1000
    assert not inspection.target.declared


def test_json_that_kubernetes_would_cut_off_is_refused() -> None:
    inspection = Inspection(target=dataclasses.replace(_FACTS, model_type="x" * MAX_INSPECTION_BYTES))
    with pytest.raises(ValueError, match="must fit into 4096 bytes"):
        inspection.to_json()


_K = {"name": "k", "shape": [8, 128], "dtype": None}
_WRONG_BUFFERS: tuple[dict[str, object], ...] = (
    {"name": ""},
    {"name": "../k"},
    {"name": "k" * 99},
    {"name": 1},
    {"shape": []},
    {"shape": 8},
    {"shape": "88"},
    {"shape": [8, 0]},
    {"shape": [8, -128]},
    {"shape": [8, 1.5]},
    {"shape": [2**40]},
    {"shape": [1, 1, 1, 1]},
    {"dtype": "fp8"},
    {"dtype": []},
    {"kind": "mha"},
)


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
        _changed(geometry={"layers": 32, "kv_heads": 8, "head_dim": 128}),
        _changed(geometry=None),
        *(_changed(geometry={"layers": layers, "buffers": [_K]}) for layers in (0, 1.5, "32", True, 2**40)),
        *(_changed(geometry={"layers": 32, "buffers": [_K], "shared": shared}) for shared in (1, None, "true")),
        *(_changed(geometry={"layers": 32, "buffers": buffers}) for buffers in ([], {}, None, "k", [1], [_K] * 2)),
        *(_changed(geometry={"layers": 32, "buffers": [_K | change]}) for change in _WRONG_BUFFERS),
    ],
)
def test_what_is_no_inspection(text: str) -> None:
    with pytest.raises(BadInspection, match="not an inspection result"):
        Inspection.from_json(text)


def test_builtin_models() -> None:
    tiny = builtin_facts("tiny")
    assert tiny.target.geometry == KVGeometry.heads(layers=6, kv_heads=2, head_dim=64)
    assert tiny.draft is not None
    assert tiny.draft.geometry == KVGeometry.heads(layers=1, kv_heads=2, head_dim=64)
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


heads = st.tuples(st.integers(1, 64), st.integers(1, 64), st.integers(1, 256)).map(
    lambda shape: KVGeometry.heads(*shape)
)
latents = st.builds(KVGeometry.latent, st.integers(1, 64), st.integers(1, 1024), st.integers(1, 128))
dtypes = st.sampled_from(["float32", "bfloat16"])


@given(latents, dtypes, st.integers(1, 64))
def test_what_all_ranks_hold_alike_is_kept_once(geometry: KVGeometry, dtype: KVDtype, ranks: int) -> None:
    assert geometry.shared
    assert geometry.for_rank(ranks) == geometry
    assert geometry.pod_bytes_per_token(dtype, ranks) == geometry.bytes_per_token(dtype)
    assert {geometry.shard(rank, ranks) for rank in range(ranks)} == {geometry.shard(0, 1)}


@given(heads, dtypes, st.integers(1, 64))
def test_heads_are_shared_or_repeated_but_never_cut(geometry: KVGeometry, dtype: KVDtype, ranks: int) -> None:
    kv_heads = geometry.buffers[0].shape[0]
    if kv_heads % ranks and ranks % kv_heads:
        with pytest.raises(ValueError, match=f"{kv_heads} KV heads cannot be shared evenly by {ranks} ranks"):
            geometry.for_rank(ranks)
        return
    assert not geometry.shared
    assert len({geometry.shard(rank, ranks) for rank in range(ranks)} | {geometry.shard(0, 1)}) == ranks + (ranks > 1)
    one = geometry.for_rank(ranks)
    assert one.bytes_per_token(dtype) * ranks == geometry.pod_bytes_per_token(dtype, ranks)
    assert geometry.pod_bytes_per_token(dtype, ranks) == geometry.bytes_per_token(dtype) * max(1, ranks // kv_heads)


def test_a_buffer_may_have_a_number_format_of_its_own() -> None:
    """A recurrent state, say, that is float32 beside keys in bfloat16."""
    mixed = KVGeometry(2, (KVBuffer("k", (4, 8)), KVBuffer("state", (16,), dtype="float32")))
    assert mixed.bytes_per_token("bfloat16") == 2 * (4 * 8 * 2 + 16 * 4)
    assert KVGeometry.from_dict(json.loads(json.dumps(dataclasses.asdict(mixed)))) == mixed
