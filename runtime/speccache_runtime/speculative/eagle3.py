"""Proposals of an EAGLE-3 head, which continues the target's own features."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from speccache_runtime.cache.pool import KVPool
from speccache_runtime.model.draft import Eagle3Head
from speccache_runtime.model.packing import Packed
from speccache_runtime.speculative.proposer import ChainProposer, DraftWork
from speccache_runtime.tensors import send


class Eagle3Proposer(ChainProposer):
    """The head's KV at a slot depends on that slot's feature and the token behind it alone."""

    def __init__(self, head: Eagle3Head, pool: KVPool) -> None:
        super().__init__(pool)
        self._head = head

    def first(self, work: Sequence[DraftWork], tokens: Tensor, features: Tensor | None, packed: Packed) -> Tensor:
        assert features is not None, "the target was loaded without aux layers"
        if len(tokens) != len(features):
            take = [row for w in work for row in range(w.feature_row, w.feature_row + len(w.tokens))]
            features = features.index_select(0, send(take, features.device))
        return self.further(tokens, self._head.fuse(features), packed)

    def further(self, tokens: Tensor, hidden: Tensor, packed: Packed) -> Tensor:
        return self._head.forward(tokens, hidden, packed.positions, self.pool, packed.attention)

    def best(self, hidden: Tensor) -> Tensor:
        return self._head.best(hidden)
