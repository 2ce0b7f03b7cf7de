"""A Llama-shaped decoder layer as plain functions over plain tensors, with the projections that share an input fused.

The target's layers, if they have this shape, and the EAGLE-3 head run through here. A layer of a small model takes
less time than the Python of the modules around it, and on a GPU every operation saved is a launch saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from speccache_runtime.model.attention import AttentionBackend, AttentionBatch
from speccache_runtime.model.rope import rotate


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`qkv` is `[(heads + 2 * kv_heads) * head_dim, in]`: q, then k, then v; `o` is `[H, heads * head_dim]`.

    `q_norm` and `k_norm` `[head_dim]` are given together or not at all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP with SiLU: `gate_up` is `[2 * inner, H]`, the gate first; `down` is `[H, inner]`."""

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One pre-norm decoder layer."""

    eps: float
    input_norm: Tensor
    attention: AttentionWeights
    post_norm: Tensor
    mlp: MlpWeights


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What all layers of one packed pass share: rotated positions (see Rope), the batch, and who attends."""

    cos: Tensor
    sin: Tensor
    batch: AttentionBatch
    backend: AttentionBackend


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def attend(w: AttentionWeights, x: Tensor, call: LayerCall, pool_k: Tensor, pool_v: Tensor) -> Tensor:
    """Self-attention of normed rows `x` `[T, in]` over a layer's pool, which gets their K/V. Returns `[T, H]`."""
    rows, rotated = x.shape[0], w.heads + w.kv_heads
    qkv = F.linear(x, w.qkv, w.qkv_bias).view(rows, rotated + w.kv_heads, w.head_dim)
    if w.q_norm is None or w.k_norm is None:
        qk = rotate(qkv[:, :rotated], call.cos, call.sin)
    else:
        q = rms_norm(qkv[:, : w.heads], w.q_norm, w.eps)
        k = rms_norm(qkv[:, w.heads : rotated], w.k_norm, w.eps)
        qk = rotate(torch.cat((q, k), dim=1), call.cos, call.sin)
    out = call.backend(pool_k, pool_v, qk[:, : w.heads], qk[:, w.heads :], qkv[:, rotated:], call.batch, w.scale)
    return F.linear(out.reshape(rows, w.heads * w.head_dim), w.o, w.o_bias)


def feed_forward(w: MlpWeights, x: Tensor) -> Tensor:
    """The gated MLP of normed rows `[T, H]`."""
    gate, up = F.linear(x, w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w.down, w.down_bias)


def decode_layer(w: LayerWeights, x: Tensor, call: LayerCall, pool_k: Tensor, pool_v: Tensor) -> Tensor:
    """One whole layer: rows of the residual stream `[T, H]` in, the same after the layer out."""
    x = x + attend(w.attention, rms_norm(x, w.input_norm, w.eps), call, pool_k, pool_v)
    return x + feed_forward(w.mlp, rms_norm(x, w.post_norm, w.eps))
