"""Rotary positions for our own modules, with the angles of transformers.

Tables are float32 whatever the model computes in; only the rows that are used are rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speccache_runtime.errors import ModelError
from speccache_runtime.model.draft_config import Eagle3Config
from speccache_runtime.model.files import reason

MAX_TABLE_BYTES = 16 << 20
"""Up to here a table of all positions is kept (4 K positions of 64 numbers: 2 MiB); above, angles are made per call."""

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


class Rope:
    """cos and sin of positions, the sin with the sign that `rotate` wants."""

    def __init__(self, inv_freq: Tensor, scaling: float, positions: int) -> None:
        """`inv_freq` is float32 `[D/2]` on the device; `positions` is how many are ever asked for."""
        self._inv_freq = inv_freq
        self._scaling = scaling
        self._table: Tensor | None = None
        if positions * inv_freq.numel() * 4 * 4 <= MAX_TABLE_BYTES:
            self._table = torch.stack(self._angles(torch.arange(positions, device=inv_freq.device)), dim=1)

    @classmethod
    def of_layer(cls, config: Eagle3Config, positions: int, device: torch.device) -> Rope:
        """Rope of a head, from its own layer config. Raises ModelError if the rope settings are incomplete."""
        try:
            settings = LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.heads,
                head_dim=config.head_dim,
                **{key: config.layer[key] for key in ROPE_KEYS if config.layer.get(key) is not None},
            )
            module = LlamaRotaryEmbedding(settings)
        except Exception as error:  # also of a library's own kind, which has no common base with the others
            raise ModelError(f"{config.directory}: rope settings cannot be used: {reason(error)}") from error
        return cls.of_module(module.to(device), positions)

    @classmethod
    def of_module(cls, module: Any, positions: int) -> Rope:
        """Rope with the angles of one of transformers' rotary embeddings, on that module's device."""
        return cls(module.inv_freq.float(), float(module.attention_scaling), positions)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`(cos, sin)` in `dtype`, each `[T, 1, D]`, of int64 positions `[T]`."""
        if self._table is None:
            cos, sin = self._angles(positions)
        else:
            cos, sin = self._table.index_select(0, positions).unbind(1)
        return cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.unsqueeze(-1).float() * self._inv_freq
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x` `[T, heads, D]`; swapping halves by `roll` and a signed sin takes three operations."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
