"""Fuses the projections of transformers' decoder layers, where their shape is known, without holding weights twice.

Before loading, the projections that share an input get one tensor, and the modules' own parameters become views of its
parts. Loading fills the views by name as usual; afterwards both the modules and our fused layer use the same memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from speccache_runtime.model.layer import AttentionWeights, LayerWeights, MlpWeights, RmsNorm
from speccache_runtime.model.split import Split

FUSABLE = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
"""Layer classes that compute exactly what `layer.decode_layer` does. Others run as transformers' modules."""


def is_fusable(model: PreTrainedModel) -> bool:
    """True if every decoder layer has the known shape."""
    layers: Any = model.get_decoder().layers
    silu = model.config.hidden_act in ("silu", "swish")
    return silu and all(type(layer).__name__ in FUSABLE for layer in layers)


def share_projections(layer: Any, split: Split, *, device: torch.device, dtype: torch.dtype) -> None:
    """Gives q, k and v, and gate and up, one uninitialised tensor each; their parameters become views of it.

    Afterwards a parameter has the rows of `split` only, whatever its module says of its size.
    """
    attention, mlp = layer.self_attn, layer.mlp
    _share({name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")}, split, device, dtype)
    _share({name: getattr(mlp, name) for name in ("gate_proj", "up_proj")}, split, device, dtype)


def fused_layer(layer: Any, config: Any, split: Split) -> LayerWeights:
    """The layer's weights for `decode_layer`; valid as long as the layer. Its parameters must be loaded and shared."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    head_dim: int = attention.head_dim
    eps = float(config.rms_norm_eps)
    return LayerWeights(
        input_norm=RmsNorm(layer.input_layernorm.weight.detach(), eps),
        attention=AttentionWeights(
            heads=qkv[0].weight.shape[0] // head_dim,
            kv_heads=qkv[1].weight.shape[0] // head_dim,
            head_dim=head_dim,
            scale=float(attention.scaling),
            qkv=_whole(qkv, "weight"),
            qkv_bias=None if qkv[0].bias is None else _whole(qkv, "bias"),
            q_norm=_norm(attention, "q_norm", eps),
            k_norm=_norm(attention, "k_norm", eps),
            o=attention.o_proj.weight.detach(),
            o_bias=_bias(attention.o_proj) if split.keeps_bias() else None,
        ),
        post_norm=RmsNorm(layer.post_attention_layernorm.weight.detach(), eps),
        mlp=MlpWeights(
            gate_up=_whole((mlp.gate_proj, mlp.up_proj), "weight"),
            gate_up_bias=None if mlp.gate_proj.bias is None else _whole((mlp.gate_proj, mlp.up_proj), "bias"),
            down=mlp.down_proj.weight.detach(),
            down_bias=_bias(mlp.down_proj) if split.keeps_bias() else None,
        ),
    )


def _share(parts: dict[str, nn.Linear], split: Split, device: torch.device, dtype: torch.dtype) -> None:
    for kind in ("weight", "bias"):
        old: list[Tensor] = [tensor for part in parts.values() if (tensor := getattr(part, kind)) is not None]
        if not old:
            continue
        rows = [split.rows(f"{name}.{kind}", tensor.shape[0]) for name, tensor in zip(parts, old, strict=True)]
        whole = torch.empty((sum(rows), *old[0].shape[1:]), device=device, dtype=dtype)
        for part, view in zip(parts.values(), whole.split(rows), strict=True):
            setattr(part, kind, nn.Parameter(view, requires_grad=False))


def _whole(parts: tuple[nn.Linear, ...], kind: str) -> Tensor:
    """The tensor whose rows the parts' parameters are, made again from their shared storage."""
    first: Tensor = getattr(parts[0], kind).detach()
    rows = sum(getattr(part, kind).shape[0] for part in parts)
    whole = first.as_strided((rows, *first.shape[1:]), first.stride())
    last: Tensor = getattr(parts[-1], kind)
    assert last.data_ptr() == whole[rows - last.shape[0] :].data_ptr(), "projections were not shared before loading"
    return whole


def _norm(attention: Any, name: str, eps: float) -> RmsNorm | None:
    norm = getattr(attention, name, None)
    return None if norm is None else RmsNorm(norm.weight.detach(), eps)


def _bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.detach()
