"""Writes a target and an EAGLE-3 head with made-up weights to disk, so that benchmarks load them like real ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PairShape:
    """Dimensions of a Llama target; its head has the same ones with one layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    max_positions: int


LLAMA_8B = PairShape(4096, 32, 32, 8, 128, 14336, 128256, 32000, 131072)
"""Llama-3.1-8B and a head in the published format."""


def write_pair(shape: PairShape, directory: Path, device: torch.device) -> tuple[Path, Path]:
    """Target and draft directories under `directory`, made on `device`, bfloat16; kept if they are there already."""
    target, draft = directory / "target", directory / "draft"
    if not (draft / "model.safetensors").exists():
        for path in (target, draft):
            path.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(_config(shape)))
        _write_target(shape, target, device)
        (draft / "config.json").write_text(json.dumps(_config(shape) | _head_config(shape)))
        save_file(dict(_head_tensors(shape, device)), draft / "model.safetensors")
    return target, draft


def _config(shape: PairShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _head_config(shape: PairShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": shape.draft_vocab,
    }


def _layer(shape: PairShape, width: int, make: _Maker) -> Iterator[tuple[str, Tensor]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "self_attn.q_proj.weight", make(queries, width)
    yield "self_attn.k_proj.weight", make(keys, width)
    yield "self_attn.v_proj.weight", make(keys, width)
    yield "self_attn.o_proj.weight", make(shape.hidden, queries)
    yield "mlp.gate_proj.weight", make(shape.intermediate, shape.hidden)
    yield "mlp.up_proj.weight", make(shape.intermediate, shape.hidden)
    yield "mlp.down_proj.weight", make(shape.hidden, shape.intermediate)
    yield "input_layernorm.weight", make.ones(shape.hidden)
    yield "post_attention_layernorm.weight", make.ones(shape.hidden)


class _Maker:
    """Normal weights of the usual scale, repeatable."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        made = torch.randn(shape, generator=self._generator, device=self._device, dtype=torch.bfloat16)
        return made.mul_(0.02).cpu()

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)


def _write_target(shape: PairShape, path: Path, device: torch.device) -> None:
    """One shard per layer and one for the rest, with the usual index."""
    make = _Maker(device)
    weight_map: dict[str, str] = {}
    for layer in range(shape.layers):
        tensors = {f"model.layers.{layer}.{name}": t for name, t in _layer(shape, shape.hidden, make)}
        _save(path, f"model-{layer:03}.safetensors", tensors, weight_map)
    rest = {
        "model.norm.weight": make.ones(shape.hidden),
        "model.embed_tokens.weight": make(shape.vocab, shape.hidden),
        "lm_head.weight": make(shape.vocab, shape.hidden),
    }
    _save(path, "model-rest.safetensors", rest, weight_map)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _save(path: Path, file: str, tensors: dict[str, Tensor], weight_map: dict[str, str]) -> None:
    save_file(tensors, path / file)
    weight_map.update(dict.fromkeys(tensors, file))


def _head_tensors(shape: PairShape, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    make = _Maker(device)
    yield "fc.weight", make(shape.hidden, 3 * shape.hidden)
    for name, tensor in _layer(shape, 2 * shape.hidden, make):
        yield f"midlayer.{name}", tensor
    yield "midlayer.hidden_norm.weight", make.ones(shape.hidden)
    yield "norm.weight", make.ones(shape.hidden)
    yield "lm_head.weight", make(shape.draft_vocab, shape.hidden)
    kept = torch.arange(shape.draft_vocab) * (shape.vocab // shape.draft_vocab)
    yield "d2t", kept - torch.arange(shape.draft_vocab)
    yield "t2d", torch.zeros(shape.vocab, dtype=torch.bool).index_fill_(0, kept, True)
