"""Writes and reads the pair in the layouts that other software loads.

Target: a Hugging Face `LlamaForCausalLM` directory. Head: SafeAILab's EAGLE-3 tensor names with a Llama config.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from tinypair.config import END_OF_TEXT, END_OF_TEXT_ID, PairShape
from tinypair.model import Head, Target

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_tokenizer(folder: Path, tokenizer: Tokenizer, shape: PairShape) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_target(folder: Path, target: Target) -> None:
    shape = target.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        **_shared_config(shape),
        "num_hidden_layers": shape.layers,
        "tie_word_embeddings": True,
    }
    _save(folder, target, config)


def save_head(folder: Path, head: Head) -> None:
    shape = head.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_shared_config(shape),
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.hidden,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(shape.aux_layers), "use_aux_hidden_state": True},
    }
    _save(folder, head, config)


def load_pair(folder: Path, device: torch.device) -> tuple[Target, Head]:
    """Reads `target/` and `draft/` under `folder` back in float32."""
    config = json.loads((folder / "target/config.json").read_text())
    draft = json.loads((folder / "draft/config.json").read_text())
    shape = PairShape(
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["intermediate_size"],
        config["vocab_size"],
        draft["draft_vocab_size"],
        config["max_position_embeddings"],
        tuple(draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        config["rope_theta"],
        config["rms_norm_eps"],
    )
    target, head = Target(shape), Head(shape)
    target.load_state_dict(load_file(folder / "target/model.safetensors"))
    head.load_state_dict(load_file(folder / "draft/model.safetensors"))
    return target.to(device), head.to(device)


def _shared_config(shape: PairShape) -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }


def _save(folder: Path, module: nn.Module, config: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous().cpu()
        for name, value in module.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
