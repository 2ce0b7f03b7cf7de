"""Multi-head latent attention and experts (DeepSeek-V2, V3) against plain transformers, and what of them is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from speccache_api.geometry import KVGeometry
from speccache_runtime.errors import ModelError
from speccache_runtime.model.inspect import inspect
from speccache_runtime.model.target import load_target

CPU = torch.device("cpu")
VARIANTS = ("v2_lite", "v2", "v3", "v3_halves", "v3_biased")


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_and_paged_equals_plain_transformers(
    variant: str, model_dir: Callable[[str], Path], tools: SimpleNamespace
) -> None:
    """Prefill in chunks, decode and verify rows of two requests, over scattered pages that hold latents."""
    path = model_dir(variant)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    target = load_target(path, device=CPU, dtype=torch.float32, aux_layers=(0, 1))
    packer = tools.Packer(target, tools.make_pool(target.facts))
    one, other = (packer.sequence(tools.random_tokens(count, seed=count)) for count in (100, 70))
    for work in ([(one, 40)], [(one, 17), (other, 60)], [(one, 1), (other, 8)], [(one, 30), (other, 2)], [(one, 12)]):
        packer.step(work)
    for sequence in (one, other):
        with torch.inference_mode():
            out = plain(torch.tensor([sequence.tokens]), output_hidden_states=True)
        logits, features = out.logits[0], torch.cat([out.hidden_states[1], out.hidden_states[2]], dim=-1)[0]
        for ours, theirs in ((packer.logits(sequence), logits), (torch.cat(sequence.features), features)):
            torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_facts(variant: str, model_dir: Callable[[str], Path]) -> None:
    facts = inspect(model_dir(variant), None).target
    plain = AutoModelForCausalLM.from_pretrained(model_dir(variant))
    assert facts.geometry == KVGeometry.latent(3, 16, 8)
    assert facts.parameters == sum(tensor.numel() for tensor in plain.state_dict().values())
    assert facts.model_type == plain.config.model_type
    assert facts.shares == 4, "four heads; the MLP and its experts could be cut further"


def test_a_latent_pool_is_what_was_computed_for_it(model_dir: Callable[[str], Path], tools: SimpleNamespace) -> None:
    """One latent and one key for all heads: 24 numbers a token and layer, where K and V of 4 heads would be 120."""
    facts = inspect(model_dir("v3"), None).target
    pool = tools.make_pool(facts)
    assert pool.layout.page_bytes == tools.PAGE_SIZE * facts.geometry.bytes_per_token("float32")
    assert [tuple(buffer.shape[2:]) for buffer in pool.layer(0)] == [(16,), (8,)]


def test_experts_are_scored_in_float32_whatever_the_model_computes_in(model_dir: Callable[[str], Path]) -> None:
    target = load_target(model_dir("v3"), device=CPU, dtype=torch.bfloat16, aux_layers=())
    states = target.model.state_dict()
    assert {tensor.dtype for name, tensor in states.items() if name.endswith("correction_bias")} == {torch.float32}
    assert {tensor.dtype for name, tensor in states.items() if "experts." in name} == {torch.bfloat16}


def test_layers_that_predict_further_tokens_are_left_out(
    model_dir: Callable[[str], Path], tmp_path: Path, tools: SimpleNamespace
) -> None:
    """V3's files hold one behind the last layer; `num_nextn_predict_layers` says so."""
    plain = model_dir("v3")
    path = tools.make_model(tmp_path / "m", "v3", num_mtp_layers=1)
    tensors = load_file(plain / "model.safetensors")
    extra = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.2." in name
    }
    extra["model.layers.3.eh_proj.weight"] = torch.zeros(4, 8)
    save_file(tensors | extra, path / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert inspect(path, None).target.parameters == inspect(plain, None).target.parameters
    load_target(path, device=CPU, dtype=torch.float32, aux_layers=())
    tools.edit_json(path / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"num_hidden_layers .* is 3, but the weights hold 4 layers"):
        inspect(path, None)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("v3", {"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not served yet"),
    ("v3", {"kv_lora_rank": None}, "kv_lora_rank in config.json must be a whole number above 0, found None"),
    ("v3", {"kv_lora_rank": 17}, r"kv_a_proj_with_mqa.weight has shape \[24, 48\], the config says \[25, 48\]"),
    ("v3", {"v_head_dim": 11}, r"kv_b_proj.weight has shape \[88, 16\], the config says \[92, 16\]"),
    ("v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
    ("v3", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not num_attention_heads 4"),
    ("v3", {"q_lora_rank": 0}, "q_lora_rank .* above 0, found 0"),
    ("v3", {"n_routed_experts": "x"}, "n_routed_experts .* found 'x'"),
    ("v3", {"n_shared_experts": None}, "n_shared_experts .* found None"),
    ("v3", {"first_k_dense_replace": -1}, "first_k_dense_replace .* found -1"),
    ("v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not served for deepseek_v3; only sigmoid is"),
    ("v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not served for deepseek_v3; only noaux_tc is"),
    ("v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not served"),
    ("v3", {"n_group": 3}, "num_experts_per_tok 2 cannot be chosen from 1 of 3 groups of n_routed_experts 8"),
    ("v3", {"topk_group": 3}, "cannot be chosen from 3 of 2 groups"),
    ("v3", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 cannot be chosen"),
    ("v3", {"n_group": 8, "topk_group": 2}, "n_group 8 leaves fewer than 2"),
    ("v3", {"rope_parameters": {"rope_type": "longrope"}}, "rope type longrope is not served"),
    (
        "v3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "mscale": -1}},
        "mscale in config.json must be a number above 0, found -1",
    ),
    ("v2", {"norm_topk_prob": True}, "norm_topk_prob True is not served for deepseek_v2; only False is"),
    ("v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not served for deepseek_v2; only greedy or group"),
]


@pytest.mark.parametrize(("variant", "changes", "message"), REFUSED, ids=[str(row[1])[:50] for row in REFUSED])
def test_what_is_not_served_is_refused_before_a_pod_is_made(
    variant: str, changes: dict[str, Any], message: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also what transformers' modules would silently compute in another way."""
    path = tmp_path / "m"
    path.mkdir()
    (path / "model.safetensors").symlink_to(model_dir(variant) / "model.safetensors")
    written = json.loads((model_dir(variant) / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | changes))
    for read in (
        lambda: inspect(path, None),
        lambda: load_target(path, device=CPU, dtype=torch.float32, aux_layers=()),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.experts.7.up_proj.weight"), "missing .*layers.2.mlp.experts.7.up_proj"),
        (
            lambda t: t.update({"model.layers.2.mlp.experts.8.up_proj.weight": torch.zeros(16, 48)}),
            "experts.8.up_proj.weight is not part of DeepseekV3ForCausalLM",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.experts.3.down_proj.weight": torch.zeros(16, 48)}),
            r"experts.3.down_proj.weight has shape \[16, 48\], the config says \[48, 16\]",
        ),
        (lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"), "missing .*e_score_correction_bias"),
    ],
    ids=["missing", "too many", "shape", "bias"],
)
def test_wrong_experts_stop_the_load(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = load_file(model_dir("v3") / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((model_dir("v3") / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        load_target(tmp_path, device=CPU, dtype=torch.float32, aux_layers=())
