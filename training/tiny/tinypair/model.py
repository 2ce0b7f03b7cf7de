"""The target and the EAGLE-3 head as plain torch modules.

Parameter names are those of the files: `LlamaForCausalLM` with tied embeddings, and SafeAILab's EAGLE-3 head. The
same modules train (whole rows at once) and run over a KV cache (for evaluation).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinypair.config import PairShape

SPARE_POSITIONS = 512
"""Rope positions beyond the row length: unrolled steps and speculated tokens run past the end."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class Rope(nn.Module):
    """Tables of rotary angles in float32; never cast, bf16 tables ruin long positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: PairShape) -> None:
        super().__init__()
        inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.arange(shape.max_positions + SPARE_POSITIONS).float()[:, None] * inverse
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def span(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Tables [1, 1, length, D] for consecutive positions."""
        return self.cos[None, None, start : start + length], self.sin[None, None, start : start + length]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables [B, 1, S, D] for positions [B, S]."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, H, S, D] turned by its rope tables, in the dtype of x."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * rope[0] + torch.cat([-second, first], -1) * rope[1]).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: PairShape, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(width, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, shape.hidden, bias=False)

    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, S, D], k and v [B, G, S, D] of x [B, S, width], rotated."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        return rotate(q, rope), rotate(k, rope), v

    def out(self, mixed: Tensor) -> Tensor:
        batch, heads, length, dim = mixed.shape
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, heads * dim))


class MLP(nn.Module):
    def __init__(self, shape: PairShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Cache:
    """Evaluation KV of one model: per layer k and v [B, G, L, D]. Rows are written at their own positions."""

    def __init__(self, shape: PairShape, layers: int, batch: int, length: int, like: Tensor) -> None:
        size = (batch, shape.kv_heads, length, shape.head_dim)
        self.k = [torch.zeros(size, dtype=like.dtype, device=like.device) for _ in range(layers)]
        self.v = [torch.zeros(size, dtype=like.dtype, device=like.device) for _ in range(layers)]
        self._row = torch.arange(batch, device=like.device)[:, None, None]
        self._head = torch.arange(shape.kv_heads, device=like.device)[None, :, None]

    def write(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        self.k[layer][self._row, self._head, positions[:, None]] = k
        self.v[layer][self._row, self._head, positions[:, None]] = v


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention over a cache. q [B, H, S, D], k and v [B, G, L, D], visible [B, S, L] bool; returns [B, H, S, D]."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], enable_gqa=True)


class Layer(nn.Module):
    def __init__(self, shape: PairShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape, shape.hidden), MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)


class Body(nn.Module):
    def __init__(self, shape: PairShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)


class Target(nn.Module):
    def __init__(self, shape: PairShape) -> None:
        super().__init__()
        self.shape, self.model, self.rope = shape, Body(shape), Rope(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * shape.layers) if into_residual else 1))

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, S, V] and features [B, S, 3 * hidden] of tokens [B, S].

        Without a cache the tokens are whole rows from position 0; with one they go to `positions` [B, S].
        """
        rope = self.rope.span(0, tokens.shape[1]) if positions is None else self.rope.at(positions)
        x, features = self.model.embed_tokens(tokens), []
        for i, layer in enumerate(self.model.layers):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), rope)
            x = x + layer.self_attn.out(self._mix(i, q, k, v, positions, cache))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if i in self.shape.aux_layers:
                features.append(x)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight), torch.cat(features, -1)

    @staticmethod
    def _mix(i: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, cache: Cache | None) -> Tensor:
        if positions is None or cache is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        cache.write(i, positions, k, v)
        slots = torch.arange(cache.k[i].shape[2], device=q.device)
        return attend(q, cache.k[i], cache.v[i], slots <= positions[:, :, None])

    def loss(self, rows: Tensor) -> Tensor:
        """Mean next-token cross entropy (nats) of rows [B, S + 1]."""
        logits, _ = self(rows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


class MidLayer(nn.Module):
    def __init__(self, shape: PairShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape, 2 * shape.hidden), MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)


class Head(nn.Module):
    """EAGLE-3 head. Slot i holds (token i + 1, feature i) and predicts token i + 2."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: PairShape) -> None:
        super().__init__()
        self.shape, self.rope = shape, Rope(shape)
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(shape.vocab, dtype=torch.bool))

    @torch.no_grad()
    def warm_start(self, target: Target, kept: Tensor) -> None:
        """Starts from the target's last layer and embedding; `kept` are the sorted ids of the draft vocabulary."""
        hidden, source, mid = self.shape.hidden, target.model.layers[-1], self.midlayer
        self.t2d[kept] = True
        self.d2t.copy_(kept - torch.arange(len(kept), device=kept.device))
        self.lm_head.weight.copy_(target.model.embed_tokens.weight[kept])
        self.norm.weight.copy_(target.model.norm.weight)
        self.fc.weight.normal_(std=0.02 / math.sqrt(3))
        self.fc.weight[:, 2 * hidden :] += torch.eye(hidden, device=self.fc.weight.device)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(mid.self_attn, name).weight
            weight.normal_(std=0.02)
            weight[:, hidden:] = getattr(source.self_attn, name).weight
        mid.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight)
        mid.mlp.load_state_dict(source.mlp.state_dict())
        mid.hidden_norm.weight.copy_(source.input_layernorm.weight)
        mid.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)

    def before_attention(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        mid = self.midlayer
        return mid.self_attn.qkv(torch.cat([mid.input_layernorm(embedded), mid.hidden_norm(hidden)], -1), rope)

    def after_attention(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        x = hidden + self.midlayer.self_attn.out(mixed)
        return x + self.midlayer.mlp(self.midlayer.post_attention_layernorm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def step(self, embedded: Tensor, hidden: Tensor, positions: Tensor, cache: Cache, absent: Tensor) -> Tensor:
        """One cached call at positions [B, S]; slots marked in `absent` [B, L] are invisible. Returns [B, S, H]."""
        q, k, v = self.before_attention(embedded, hidden, self.rope.at(positions))
        cache.write(0, positions, k, v)
        slots = torch.arange(absent.shape[1], device=q.device)
        visible = (slots <= positions[:, :, None]) & ~absent[:, None]
        return self.after_attention(hidden, attend(q, cache.k[0], cache.v[0], visible))

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]
