"""Makes transformers' attention modules use our paged pools.

The modules call whatever is registered under their config's `attn_implementation`. Keyword arguments given to the model
reach that function, which is how the pool and the backend of a forward get there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from speccache_runtime.model.attention import AttentionBackend, KVPool, Prepared

NAME = "speccache"


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    pool: KVPool,
    before_layer: Callable[[int], None],
    backend: AttentionBackend,
    prepared: Prepared,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: `query` `[1, heads, T, D]`, `key` and `value` `[1, kv_heads, T, D]`, rotated.

    Returns `[1, T, heads, D]` and no weights. The mask is ours to make, so `attention_mask` is always None.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    before_layer(layer)
    q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    out = backend(pool.layer(layer), q, (k, v), prepared, scaling)
    return out.unsqueeze(0), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The backend knows which slots a row may see; building `[T, T]` masks for a packed batch would only cost."""


def register() -> None:
    """Registers the function and the empty mask with transformers; may be called again."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
