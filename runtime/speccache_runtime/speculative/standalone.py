"""Proposals of a model of its own: a small one of any served family, which reads the request's tokens and no more."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speccache_runtime.cache.pool import KVPool
from speccache_runtime.model.packing import Packed
from speccache_runtime.model.target import Target
from speccache_runtime.speculative.proposer import ChainProposer, DraftWork


class StandaloneProposer(ChainProposer):
    """Its KV at a slot depends on that slot's token and its own KV of all slots before."""

    def __init__(self, model: Target, pool: KVPool) -> None:
        super().__init__(pool)
        self._model = model

    def first(self, work: Sequence[DraftWork], tokens: Tensor, features: Tensor | None, packed: Packed) -> Tensor:
        return self._model.forward(tokens, packed.positions, self.pool, packed.attention).hidden

    def further(self, tokens: Tensor, hidden: Tensor, packed: Packed) -> Tensor:
        return self._model.forward(tokens, packed.positions, self.pool, packed.attention).hidden

    def best(self, hidden: Tensor) -> Tensor:
        ranks, logits = self._model.ranks, self._model.logits(hidden)
        if logits is None:
            return ranks.from_first(hidden.new_empty(len(hidden), dtype=torch.int64))
        return ranks.from_first(logits.argmax(dim=-1))
