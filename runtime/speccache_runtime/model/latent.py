"""Multi-head latent attention (DeepSeek-V2 and V3) over pages that hold latents.

Of a token, the normed latent and one rotated key are kept, for all heads together. A head's keys and values are linear
in the latent, so its key projection goes into the query and its value projection behind the attention: then attention
is over the pages as they are, with one KV head. That is the same sum in another order, and nothing is expanded for the
slots that are read, which expanding would do again for every slot in every pass.

Of several ranks each has its share of the heads and every latent, which all of them compute alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speccache_runtime.model.attention import AttentionBackend, KVPool, Prepared
from speccache_runtime.model.collective import Collective
from speccache_runtime.model.rope import rotate


def keys_from_latents(gathered: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys are latent and rotated key side by side; they serve as values too, of which the caller takes the latent.

    Kernels want keys and values of one width, so a narrower copy would be padded again.
    """
    keys = torch.cat(list(gathered), dim=-1).unsqueeze(-2)
    return keys, keys


class LatentAttention(nn.Module):
    """Takes the place of one of transformers' attention modules, with that module's own projections."""

    def __init__(self, module: Any, ranks: Collective) -> None:
        """`module` holds this rank's part of the weights."""
        super().__init__()
        self.module = module
        self._ranks = ranks
        self._nope: int = module.qk_nope_head_dim
        self._rope: int = module.qk_rope_head_dim
        self._rank: int = module.kv_lora_rank
        # V3 says how its rotated numbers are laid out; V2's are always pairs.
        self._pairs = bool(getattr(module.config, "rope_interleave", True))
        up: Tensor = module.kv_b_proj.weight.detach()
        up = up.view(-1, self._nope + module.v_head_dim, self._rank)
        self._key_up, self._value_up = up[:, : self._nope], up[:, self._nope :].transpose(1, 2)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotation: tuple[Tensor, Tensor],
        pool: KVPool,
        before_layer: Callable[[int], None],
        backend: AttentionBackend,
        prepared: Prepared,
        **_unused: Any,
    ) -> tuple[Tensor, None]:
        """Attention of normed rows `[1, T, H]`; `rotation` is cos and sin of their positions (see Rope)."""
        module, x = self.module, hidden_states.squeeze(0)
        rows = len(x)
        q = module.q_proj(x) if module.q_proj is not None else module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x)))
        plain, turned = q.view(rows, -1, self._nope + self._rope).split([self._nope, self._rope], dim=-1)
        latent, key = module.kv_a_proj_with_mqa(x).split([self._rank, self._rope], dim=-1)
        key = self._rotate(key.unsqueeze(1), rotation).squeeze(1)
        absorbed = torch.bmm(plain.transpose(0, 1), self._key_up).transpose(0, 1)
        query = torch.cat((absorbed, self._rotate(turned, rotation)), dim=-1)
        before_layer(module.layer_idx)
        new = (module.kv_a_layernorm(latent), key)
        seen = backend(pool.layer(module.layer_idx), query, new, prepared, float(module.scaling))
        values = torch.bmm(seen[..., : self._rank].transpose(0, 1), self._value_up)
        out = module.o_proj(values.transpose(0, 1).reshape(rows, -1))
        return self._ranks.sum(out).unsqueeze(0), None

    def _rotate(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`x` `[T, heads, D]` rotated. Queries and keys may be laid out anew, if both are."""
        if self._pairs:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x, *rotation)


class SplitMlp(nn.Module):
    """One of transformers' MLPs, with or without experts, of which every rank has a part."""

    def __init__(self, module: nn.Module, ranks: Collective) -> None:
        super().__init__()
        self.module = module
        self._ranks = ranks

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The whole MLP of rows `[1, T, H]`: the sum of the ranks' parts."""
        return self._ranks.sum(self.module(hidden_states))


def adapt_layers(layers: Iterable[Any], ranks: Collective) -> None:
    """Makes loaded layers of transformers attend to pages of latents, and add up what `ranks` compute of them."""
    for layer in layers:
        if ranks.rank:
            layer.self_attn.o_proj.bias = None  # behind the sum: it counts once
        layer.self_attn = LatentAttention(layer.self_attn, ranks)
        layer.mlp = SplitMlp(layer.mlp, ranks)
