"""Draft models behind one interface: after every target pass, bring the draft's KV up to date and propose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speccache_runtime.cache.lease import Lease
from speccache_runtime.cache.pool import KVPool
from speccache_runtime.model.draft import Eagle3Head
from speccache_runtime.speculative.packing import Rows, pack
from speccache_runtime.tensors import send


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One request's share of a draft pass.

    Slots [start, start + len(next_tokens)) get their draft KV; slot i takes token i+1, so `next_tokens` are the tokens
    at [start + 1, ...). `feature_row` is the row of the target pass that holds slot `start`. `want` proposals are
    asked for, 0 when the request does not decode next.
    """

    lease: Lease
    start: int
    next_tokens: Sequence[int]
    feature_row: int
    want: int


class Proposer(Protocol):
    """A draft. `lookahead` is how many successor tokens its KV at a position depends on."""

    lookahead: int

    def propose(self, work: Sequence[DraftWork], features: Tensor) -> list[Tensor]:
        """Updates the draft's KV; returns per work item its proposals, int64 [want], on the device."""


class Eagle3Proposer:
    """Chain drafting with an EAGLE-3 head: one pass over the new slots, then one pass per further proposal.

    The head's KV at a slot depends on that slot's token and feature alone, so the slots written while proposing are
    simply overwritten once the target has spoken.
    """

    lookahead = 1

    def __init__(self, head: Eagle3Head, pool: KVPool, before_draft: Callable[[], None]) -> None:
        self._head = head
        self._pool = pool
        self._device = pool.k[0].device
        self._before = before_draft

    def propose(self, work: Sequence[DraftWork], features: Tensor) -> list[Tensor]:
        hidden = self._extend(work, features)
        last = torch.tensor([len(w.next_tokens) for w in work]).cumsum(0) - 1
        hidden = hidden[send(last, self._device)]
        out: list[list[Tensor]] = [[] for _ in work]
        # Items that want most come first, so that those still proposing are always a prefix.
        order = sorted((i for i, w in enumerate(work) if w.want), key=lambda i: -work[i].want)
        if not order:
            return [hidden.new_empty(0, dtype=torch.int64) for _ in work]
        hidden = hidden[send(order, self._device)]
        tokens = self._best(hidden)
        for step in range(work[order[0]].want):
            for row, item in enumerate(order):
                out[item].append(tokens[row])
            order = [i for i in order if work[i].want > step + 1]
            if not order:
                break
            rows = [Rows(work[i].lease, work[i].start + len(work[i].next_tokens) + step, 1) for i in order]
            packed = pack(rows, self._device, draft=True, before_layer=_no_wait)
            hidden = self._head.forward(
                tokens[: len(order)], hidden[: len(order)], packed.positions, self._pool, packed.attention
            )
            tokens = self._best(hidden)
        return [torch.stack(o) if o else hidden.new_empty(0, dtype=torch.int64) for o in out]

    def _extend(self, work: Sequence[DraftWork], features: Tensor) -> Tensor:
        """The pass over the slots whose target features have just been computed; hidden states [rows, H]."""
        self._before()
        tokens = send([t for w in work for t in w.next_tokens], self._device)
        take = torch.cat([torch.arange(w.feature_row, w.feature_row + len(w.next_tokens)) for w in work])
        if len(take) != len(features):
            features = features[send(take, self._device)]
        rows = [Rows(w.lease, w.start, len(w.next_tokens)) for w in work]
        packed = pack(rows, self._device, draft=True, before_layer=_no_wait)
        hidden = self._head.fuse(features)
        return self._head.forward(tokens, hidden, packed.positions, self._pool, packed.attention)

    def _best(self, hidden: Tensor) -> Tensor:
        return self._head.to_target_ids(self._head.logits(hidden).argmax(dim=-1))


def _no_wait(layer: int) -> None:
    """The draft waits for its loads once, before its first pass."""
