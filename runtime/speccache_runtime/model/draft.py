"""The EAGLE-3 draft head: one transformer layer that continues the target's own features.

Slot i of the head holds (token i+1, feature i) and predicts token i+2, so what it caches at i depends on one token more
than the target's KV does. The head is plain tensors with its projections fused: a draft step is so small that the
number of operations, not their size, decides its time.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from speccache_api.geometry import ModelFacts
from speccache_runtime.errors import ModelError
from speccache_runtime.model.attention import AttentionBackend, AttentionBatch, KVPool
from speccache_runtime.model.collective import Collective
from speccache_runtime.model.draft_config import Eagle3Config, read_eagle3_config
from speccache_runtime.model.draft_weights import HeadWeights, load_head_weights
from speccache_runtime.model.inspect import check_pair, draft_facts
from speccache_runtime.model.layer import LayerCall, attend, cut, embed_rows, feed_forward
from speccache_runtime.model.rope import Rope
from speccache_runtime.model.target import Target
from speccache_runtime.model.torch_attention import TorchAttention


class Eagle3Head:
    """A loaded head. Shares the target's embedding when its checkpoint has none. Not thread-safe."""

    def __init__(
        self, config: Eagle3Config, weights: HeadWeights, rope: Rope, facts: ModelFacts, ranks: Collective
    ) -> None:
        self.config = config
        self._ranks = ranks
        self.facts = facts
        self.backend: AttentionBackend = TorchAttention(weights.attention.heads // weights.attention.kv_heads)
        self._w = weights
        self._rope = rope

    def aux_layers(self, target_layers: int) -> tuple[int, ...]:
        """Layers (from 0) of the target whose outputs are the features. Raises ModelError if it has too few."""
        return self.config.resolve_aux_layers(target_layers)

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        """Target features `[T, aux * H]` to the head's input `[T, H]`."""
        w = self._w
        if w.input_norm is not None:
            features = w.input_norm(features)
        if w.fc_norms:
            parts = features.chunk(len(w.fc_norms), dim=-1)
            features = torch.cat([norm(part) for part, norm in zip(parts, w.fc_norms, strict=True)], dim=-1)
        if self._ranks.size > 1:
            inner = w.fc.shape[1]
            features = features[:, self._ranks.rank * inner : (self._ranks.rank + 1) * inner]
        return self._ranks.sum(F.linear(features, w.fc, w.fc_bias))

    @torch.inference_mode()
    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, pool: KVPool, batch: AttentionBatch) -> Tensor:
        """One packed pass: `tokens` and `positions` int64 `[T]`, `hidden` `[T, H]`; writes the rows' K/V into `pool`.

        `hidden` is a fused feature, or in later draft steps the head's own output. Returns `[T, H]`.
        """
        w = self._w
        embedded = w.input_layernorm(embed_rows(tokens, w.embed, self._ranks))
        normed = w.hidden_norm(hidden)
        prepared = self.backend.prepare(batch, pool)
        call = LayerCall(*self._rope(positions, hidden.dtype), self.backend, prepared, self._ranks)
        batch.before_layer(0)
        attended = attend(w.attention, torch.cat((embedded, normed), dim=-1), call, pool.layer(0))
        x = (normed if self.config.norm_before_residual else hidden) + self._ranks.sum(attended)
        x = x + self._ranks.sum(feed_forward(w.mlp, w.post_attention_layernorm(x)))
        return w.norm(x) if self.config.norm_output else x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor | None:
        """Logits `[R, draft_vocab]` in float32 of rows that `forward` returned; on rank 0 only, None elsewhere."""
        normed = hidden if self.config.norm_output else self._w.norm(hidden)
        whole = self._ranks.gather(F.linear(normed, self._w.lm_head).float())
        return None if whole is None else cut(whole, self.config.draft_vocab_size)

    def best(self, hidden: Tensor) -> Tensor:
        """The most probable next token, by the target's ids, of rows that `forward` returned: int64 `[R]`, the same on
        every rank.
        """
        logits = self.logits(hidden)
        if logits is None:
            return self._ranks.from_first(hidden.new_empty(len(hidden), dtype=torch.int64))
        return self._ranks.from_first(self.to_target_ids(logits.argmax(dim=-1)))

    @torch.inference_mode()
    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Token ids of the target for ids of the draft vocabulary, any shape."""
        table = self._w.target_ids
        return draft_ids if table is None else table[draft_ids]


def eagle3_aux_layers(path: Path, target_layers: int) -> tuple[int, ...]:
    """Layers (from 0) of the target whose outputs the head at `path` wants. Raises ModelError."""
    return read_eagle3_config(path).resolve_aux_layers(target_layers)


def load_eagle3(path: Path, target: Target, *, device: torch.device, dtype: torch.dtype) -> Eagle3Head:
    """Loads a head of SafeAILab's, SpecForge's or speculators' form for a loaded target.

    Raises ModelError if files are missing or broken, if a tensor is missing, unknown or of the wrong shape, or if the
    head does not fit the target (hidden size, vocabulary, captured layers).
    """
    facts = draft_facts(path)
    check_pair(target.facts, target.directory, path)
    config = read_eagle3_config(path)
    wanted = config.resolve_aux_layers(target.facts.geometry.layers)
    if target.aux_layers != wanted:
        raise ModelError(
            f"{path}: the head wants features of layers {list(wanted)}, "
            f"the target was loaded for {list(target.aux_layers)}"
        )
    weights = load_head_weights(config, target, len(wanted), device=device, dtype=dtype)
    return Eagle3Head(config, weights, Rope.of_layer(config, target.facts.max_positions, device), facts, target.ranks)
