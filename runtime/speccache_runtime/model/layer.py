"""A Llama-shaped decoder layer as plain functions over plain tensors, with the projections that share an input fused.

The target's layers, if they have this shape, and the EAGLE-3 head run through here. A layer of a small model takes
less time than the Python of the modules around it, and on a GPU every operation saved is a launch saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from speccache_runtime.model.attention import AttentionBackend, Prepared
from speccache_runtime.model.collective import Collective
from speccache_runtime.model.rope import rotate


class RmsNorm:
    """RMS norm over the last dimension, `weight` `[H]`.

    In float32 on the CPU it is computed as `x / hypot(|x|, sqrt(H * eps)) * (sqrt(H) * weight)`: the same number in
    four operations where torch's own takes eight there, half the time for few rows.
    """

    __slots__ = ("_eps", "_floor", "_scaled", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._scaled: Tensor | None = None
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            size = weight.numel()
            self._scaled = weight * math.sqrt(size)
            self._floor = torch.tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[..., H]` normed; same shape and dtype."""
        if self._scaled is None:
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(length.hypot_(self._floor)).mul_(self._scaled)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`qkv` is `[(heads + 2 * kv_heads) * head_dim, in]`: q, then k, then v; `o` is `[H, heads * head_dim]`.

    `q_norm` and `k_norm` (over head_dim) are given together or not at all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
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

    input_norm: RmsNorm
    attention: AttentionWeights
    post_norm: RmsNorm
    mlp: MlpWeights


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What all layers of one packed pass share: rotated positions (see Rope), who attends, what it has prepared, and
    the ranks that hold the other heads and parts of the MLP.
    """

    cos: Tensor
    sin: Tensor
    backend: AttentionBackend
    prepared: Prepared
    ranks: Collective


def attend(w: AttentionWeights, x: Tensor, call: LayerCall, buffers: tuple[Tensor, ...]) -> Tensor:
    """Self-attention of normed rows `x` `[T, in]` over a layer's `buffers`, which get their K/V.

    Returns `[T, H]`: with several ranks, this rank's heads' part of the sum.
    """
    rows, rotated = x.shape[0], w.heads + w.kv_heads
    qkv = F.linear(x, w.qkv, w.qkv_bias).view(rows, rotated + w.kv_heads, w.head_dim)
    if w.q_norm is None or w.k_norm is None:
        qk = rotate(qkv[:, :rotated], call.cos, call.sin)
    else:
        q = w.q_norm(qkv[:, : w.heads])
        k = w.k_norm(qkv[:, w.heads : rotated])
        qk = rotate(torch.cat((q, k), dim=1), call.cos, call.sin)
    new = (qk[:, w.heads :], qkv[:, rotated:])
    out = call.backend(buffers, qk[:, : w.heads], new, call.prepared, w.scale)
    return F.linear(out.reshape(rows, w.heads * w.head_dim), w.o, w.o_bias)


def feed_forward(w: MlpWeights, x: Tensor) -> Tensor:
    """The gated MLP of normed rows `[T, H]`; with several ranks, this rank's part of the sum."""
    gate, up = F.linear(x, w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w.down, w.down_bias)


def embed_rows(tokens: Tensor, weight: Tensor, ranks: Collective) -> Tensor:
    """Embeddings `[T, H]` of `tokens` int64 `[T]`; `weight` holds this rank's rows of the vocabulary, as many as every
    rank's.
    """
    if ranks.size == 1:
        return F.embedding(tokens, weight)
    own = tokens - ranks.rank * len(weight)
    inside = (own >= 0) & (own < len(weight))
    return ranks.sum(F.embedding(own.where(inside, 0), weight) * inside[:, None])


def cut(logits: Tensor, vocabulary: int) -> Tensor:
    """`[R, n]` logits without those of the rows that pad a vocabulary."""
    return logits if logits.shape[1] == vocabulary else logits[:, :vocabulary]


def decode_layer(w: LayerWeights, x: Tensor, call: LayerCall, buffers: tuple[Tensor, ...]) -> Tensor:
    """One whole layer: rows of the residual stream `[T, H]` in, the same after the layer out."""
    x = x + call.ranks.sum(attend(w.attention, w.input_norm(x), call, buffers))
    return x + call.ranks.sum(feed_forward(w.mlp, w.post_norm(x)))
