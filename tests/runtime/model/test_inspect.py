"""Inspection: facts without torch, identities that tell models apart, and broken directories in one clear line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from speccache_api.geometry import Inspection, KVGeometry
from speccache_runtime.errors import ModelError
from speccache_runtime.model.families import TARGET_ARCHITECTURES, check_target
from speccache_runtime.model.inspect import inspect, target_facts
from speccache_runtime.model.target import load_target

CPU = torch.device("cpu")
FAMILY_NAMES = ["llama", "llama_tied_biased", "llama3_rope", "mistral", "qwen2", "qwen3", "heads_not_grouped"]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_facts_equal_the_loaded_model(family: str, model_dir: Callable[[str], Path]) -> None:
    path = model_dir(family)
    facts = inspect(path, None).target
    plain = AutoModelForCausalLM.from_pretrained(path)
    attention = plain.model.layers[0].self_attn
    assert facts.geometry == KVGeometry.heads(
        len(plain.model.layers), attention.k_proj.out_features // attention.head_dim, attention.head_dim
    )
    assert facts.parameters == sum(p.numel() for p in plain.parameters())
    assert facts.hidden_size == plain.get_input_embeddings().weight.shape[1]
    assert facts.vocab_size == plain.get_input_embeddings().weight.shape[0]
    assert facts.max_positions == plain.config.max_position_embeddings
    assert facts.model_type == plain.config.model_type
    assert load_target(path, device=CPU, dtype=torch.float32, aux_layers=()).facts == facts
    assert Inspection.from_json(Inspection(facts).to_json()).target == facts


def test_no_torch_is_imported(model_dir: Callable[[str], Path]) -> None:
    """The inspection Job must start in moments and in little memory."""
    code = (
        "import sys; from pathlib import Path; from speccache_runtime.model.inspect import inspect;"
        "inspect(Path(sys.argv[1]), None);"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(model_dir("llama"))], check=True)


def shard(path: Path) -> None:
    """Splits model.safetensors in two with an index, as large models are published."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, path / file)
    (path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def copy(model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir("llama"), tmp_path / "copy"))


def test_shards_load_like_one_file(copy: Path, model_dir: Callable[[str], Path]) -> None:
    shard(copy)
    whole, parts = target_facts(model_dir("llama")), target_facts(copy)
    assert parts.parameters == whole.parameters
    one = load_target(model_dir("llama"), device=CPU, dtype=torch.float32, aux_layers=())
    two = load_target(copy, device=CPU, dtype=torch.float32, aux_layers=())
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, two.model.get_parameter(name)), name


def test_identity_follows_content_not_place(copy: Path, model_dir: Callable[[str], Path]) -> None:
    same = target_facts(copy).identity
    assert same == target_facts(model_dir("llama")).identity
    (copy / "README.md").write_text("not part of the model")
    assert target_facts(copy).identity == same


@pytest.mark.parametrize("layer", [0, 4])
def test_identity_sees_a_fine_tune(layer: int, copy: Path) -> None:
    """A small change of one matrix, as a short training of one layer would make."""
    before = target_facts(copy).identity
    tensors = load_file(copy / "model.safetensors")
    tensors[f"model.layers.{layer}.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert target_facts(copy).identity != before


def test_identity_sees_the_config(copy: Path, tools: SimpleNamespace) -> None:
    """Other rope settings give other KV for the same weights."""
    before = target_facts(copy).identity
    tools.edit_json(copy / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    assert target_facts(copy).identity != before


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def extend(path: Path) -> None:
    with (path / "model.safetensors").open("ab") as stream:
        stream.write(b"more")


def header(path: Path, text: bytes) -> None:
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def lose_shard(path: Path) -> None:
    shard(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def escape(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')


def retensor(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def config(**changes: Any) -> Callable[[Path, SimpleNamespace], None]:
    return lambda path, tools: tools.edit_json(path / "config.json", **changes)


def files(do: Callable[[Path], Any]) -> Callable[[Path, SimpleNamespace], None]:
    return lambda path, tools: do(path)


Q = "model.layers.2.self_attn.q_proj.weight"
# What is wrong, and what the message must say. `inspected`: found without loading, before a pod is made.
INSPECTED = [
    ("no_directory", files(shutil.rmtree), "model directory not found"),
    ("no_config", files(lambda p: (p / "config.json").unlink()), "no config.json found"),
    ("config_not_json", files(lambda p: (p / "config.json").write_text("{")), "config.json: not valid JSON"),
    ("config_not_utf8", files(lambda p: (p / "config.json").write_bytes(b'{"a": "\xff"}')), "not valid JSON"),
    ("config_list", files(lambda p: (p / "config.json").write_text("[]")), "must hold a JSON object, found list"),
    ("architecture", config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not served; supported: LlamaFor"),
    ("no_architecture", config(architectures=None), "architecture none is not served"),
    ("no_layers", config(num_hidden_layers=None), "num_hidden_layers in config.json must be a whole number above 0"),
    ("negative_layers", config(num_hidden_layers=-1), "num_hidden_layers .* found -1"),
    ("heads", config(num_key_value_heads=3), "4 is not a multiple of num_key_value_heads 3"),
    ("head_dim", config(head_dim=None, hidden_size=50), "hidden_size 50 does not divide"),
    ("quantised", config(quantization_config={"quant_method": "awq"}), "quantised weights are not served yet"),
    ("softcap", config(attn_logit_softcapping=30.0), "soft-capping is not served"),
    (
        "dynamic_rope",
        config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "rope type dynamic is not served",
    ),
    ("layer_types", config(layer_types=["linear_attention"] * 5), "type linear_attention are not served"),
    ("model_type", config(model_type="gpt2"), "model_type .* is 'gpt2', but architecture LlamaForCausalLM has 'llama'"),
    ("no_model_type", config(model_type=None), "model_type in config.json is None"),
    ("architectures_of_lists", config(architectures=[["LlamaForCausalLM"]]), "is not served"),
    ("config_nested", files(lambda p: (p / "config.json").write_text("[" * 100_000)), "config.json: not valid JSON"),
    ("layers_without_weights", config(num_hidden_layers=10**12), "is 1000000000000, but the weights hold 5 layers"),
    ("layers_left_over", config(num_hidden_layers=4), "num_hidden_layers .* is 4, but the weights hold 5 layers"),
    ("vocab", config(vocab_size=10**12), r"embed_tokens.weight has shape \[96, 48\], the config says \[10+, 48\]"),
    ("large_heads", config(head_dim=10**12), r"q_proj.weight has shape \[48, 48\], the config says \[40+, 48\]"),
    ("intermediate_text", config(intermediate_size="x"), "intermediate_size .* whole number above 0, found 'x'"),
    ("eps_text", config(rms_norm_eps="x"), "rms_norm_eps in config.json must be a number above 0, found 'x'"),
    ("eps_infinite", config(rms_norm_eps=float("inf")), "rms_norm_eps .* found inf"),
    ("activation", config(hidden_act="nope"), "hidden_act 'nope' is not served; supported: silu"),
    ("eos_text", config(eos_token_id="x"), "eos_token_id in config.json must be a token .* found 'x'"),
    ("eos_beyond", config(eos_token_id=99999), "eos_token_id in config.json .* from 0 to 95, found 99999"),
    (
        "generation_eos",
        files(lambda p: (p / "generation_config.json").write_text('{"eos_token_id": [2, -1]}')),
        r"eos_token_id in generation_config.json .* found \[2, -1\]",
    ),
    ("rope_theta", config(rope_theta=0), "rope_theta in config.json must be a number above 0, found 0"),
    (
        "rope_parameters_theta",
        config(rope_parameters={"rope_type": "default", "rope_theta": 0}),
        "rope_theta in config.json must be a number above 0, found 0",
    ),
    (
        "partial_linear_rope",
        config(rope_parameters={"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor 0.5 is not served; only 1 is",
    ),
    ("partial_rope", config(partial_rotary_factor=0.25), "partial_rotary_factor 0.25 is not served"),
    ("window_text", config(sliding_window="x"), "sliding_window .* whole number or null, found 'x'"),
    ("layer_types_number", config(layer_types=5), "layer_types in config.json must be a list, found 5"),
    ("no_weights", files(lambda p: (p / "model.safetensors").unlink()), "no weights found"),
    ("empty_weights", files(lambda p: (p / "model.safetensors").write_bytes(b"")), "truncated or not a safetensors"),
    ("truncated", files(truncate), "model.safetensors: truncated: .* bytes where the header needs"),
    ("longer", files(extend), "longer than its header says"),
    ("header_not_json", files(lambda p: header(p, b"{nonsense")), "broken safetensors header"),
    ("header_nested", files(lambda p: header(p, b"[" * 100_000)), "broken safetensors header"),
    ("header_fields", files(lambda p: header(p, b'{"a": {"dtype": "F32"}}')), "broken safetensors header"),
    ("lost_shard", files(lose_shard), "model-00002-of-00002.safetensors is named in .* but missing"),
    ("shard_elsewhere", files(escape), "must be a file name without a folder"),
]
LOADED = [
    ("missing_tensor", lambda t: t.pop(Q), f"tensors are missing from the weights: {Q}$"),
    ("many_missing", lambda t: [t.pop(n) for n in list(t) if ".3." in n], "and 6 more"),
    ("unknown_tensor", lambda t: t.update(extra=torch.zeros(1)), "tensor extra is not part of LlamaForCausalLM"),
    ("shape", lambda t: t.update({Q: torch.zeros(3, 3)}), r"has shape \[3, 3\], the config says \[48, 48\]"),
    ("fp8", lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), "stored as F8_E4M3; quantised"),
    ("integers", lambda t: t.update({Q: t[Q].to(torch.int8)}), "stored as torch.int8; quantised"),
]


@pytest.mark.parametrize(("breaking", "message"), [row[1:] for row in INSPECTED], ids=[row[0] for row in INSPECTED])
def test_broken_directory_is_one_clear_line(breaking: Any, message: str, copy: Path, tools: SimpleNamespace) -> None:
    breaking(copy, tools)
    for read in (
        lambda: inspect(copy, None),
        lambda: load_target(copy, device=CPU, dtype=torch.float32, aux_layers=()),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value)
        assert str(copy) in str(caught.value)


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in LOADED], ids=[row[0] for row in LOADED])
def test_wrong_tensors_stop_the_load(change: Any, message: str, copy: Path) -> None:
    retensor(copy, change)
    with pytest.raises(ModelError, match=message):
        load_target(copy, device=CPU, dtype=torch.float32, aux_layers=())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 128}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2}),
    ],
)
def test_short_sliding_windows_are_refused(
    family: str, changes: dict[str, Any], tmp_path: Path, tools: SimpleNamespace
) -> None:
    path = tools.make_model(tmp_path / "m", family, **changes)
    with pytest.raises(ModelError, match=r"sliding-window attention is not served yet .*128 is below .* 512"):
        inspect(path, None)


ABSENT = "absent"
WINDOWS = {
    "model_type": ["llama", "mistral", "qwen2", "qwen3"],
    "sliding_window": [ABSENT, None, 128, 511, 512, 4096],
    "use_sliding_window": [ABSENT, False, True],
    "max_window_layers": [ABSENT, 0, 2, 3],
    "layer_types": [ABSENT, None, ["full_attention"] * 3, ["full_attention", "sliding_attention"] * 2],
    "max_position_embeddings": [512, 4096, 8192],
}


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({key: st.sampled_from(values) for key, values in WINDOWS.items()}))
def test_what_is_served_has_full_attention_in_transformers_too(written: dict[str, Any]) -> None:
    """Whatever the keys say or leave out, and whatever transformers takes for those that are left out."""
    keys = {key: value for key, value in written.items() if value is not ABSENT}
    longest, layers = keys["max_position_embeddings"], len(keys.get("layer_types") or [None] * 3)
    model = {"num_hidden_layers": layers, "intermediate_size": 8}
    architecture = next(name for name, family in TARGET_ARCHITECTURES.items() if family == keys["model_type"])
    resolved = AutoConfig.for_model(**keys, num_hidden_layers=layers)
    window = None if keys["model_type"] == "llama" else resolved.sliding_window
    kinds = getattr(resolved, "layer_types", None) or ["full_attention"] * layers
    slides = [True] * layers if keys["model_type"] == "mistral" else [kind == "sliding_attention" for kind in kinds]
    full = window is None or window >= longest or not any(slides)
    # A layer that slides without a window, or in a family without any, cannot be built or does not say what it means.
    strange = "sliding_attention" in (keys.get("layer_types") or []) and window is None
    refused = None
    try:
        check_target(Path("model"), keys | model | {"architectures": [architecture]})
    except ModelError as error:
        refused = str(error)
    assert (refused is None) == (full and not strange), refused


@pytest.mark.parametrize(
    ("family", "absent", "changes"),
    [
        ("mistral", ["sliding_window"], {}),
        ("mistral", [], {"sliding_window": 4096, "use_sliding_window": False}),
        ("qwen2", ["sliding_window"], {"use_sliding_window": True, "max_window_layers": 2}),
    ],
    ids=["no width", "a switch that Mistral does not have", "switched on without a width"],
)
def test_windows_that_transformers_fills_in_are_refused(
    family: str, absent: list[str], changes: dict[str, Any], tmp_path: Path, tools: SimpleNamespace
) -> None:
    path = tools.make_model(tmp_path / "m", family, max_position_embeddings=8192)
    written = json.loads((path / "config.json").read_text()) | changes
    written = {key: value for key, value in written.items() if key not in (*absent, "layer_types")}
    (path / "config.json").write_text(json.dumps(written))
    for refuse in (
        lambda: inspect(path, None),
        lambda: load_target(path, device=CPU, dtype=torch.float32, aux_layers=()),
    ):
        with pytest.raises(ModelError, match=r"sliding-window .* \(sliding_window 4096 is below .* 8192\)"):
            refuse()


def test_window_as_long_as_the_context_is_full_attention(tmp_path: Path, tools: SimpleNamespace) -> None:
    path = tools.make_model(tmp_path / "m", "mistral", sliding_window=512)
    assert inspect(path, None).target.model_type == "mistral"
    load_target(path, device=CPU, dtype=torch.float32, aux_layers=())


def test_tied_head_stored_twice_is_still_tied(tmp_path: Path, tools: SimpleNamespace) -> None:
    """Some tools save the output head beside the embedding although they are one."""
    path = tools.make_model(tmp_path / "m", "llama_tied_biased")
    retensor(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    target = load_target(path, device=CPU, dtype=torch.float32, aux_layers=())
    assert target.facts.parameters == sum(p.numel() for p in target.model.parameters())
    assert target.lm_head.data_ptr() == target.embed.weight.data_ptr()


def test_missing_features_layer_is_refused(model_dir: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="features of layer 5 are wanted, but there are 5 layers"):
        load_target(model_dir("llama"), device=CPU, dtype=torch.float32, aux_layers=(1, 5))
