"""Draft models behind one interface: after every target pass, bring the draft's KV up to date and propose."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speccache_runtime.cache.pool import KVPool
from speccache_runtime.model.draft import Eagle3Head
from speccache_runtime.model.packing import Rows, pack
from speccache_runtime.model.tables import PageTables
from speccache_runtime.tensors import send


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One request's share of a draft pass.

    Slots [start, start + len(next_tokens)) get their draft KV; slot i takes token i+1, so `next_tokens` are the tokens
    at [start + 1, ...). `feature_row` is the row of the target pass that holds slot `start`. `want` proposals are
    asked for, 0 when the request does not decode next. `row` is the request's row of page tables and proposals.
    """

    row: int
    start: int
    next_tokens: Sequence[int]
    feature_row: int
    want: int


class Proposer(Protocol):
    """A draft. `lookahead` is how many successor tokens its KV at a position depends on."""

    lookahead: int

    def propose(self, work: Sequence[DraftWork], features: Tensor, tables: PageTables, into: Tensor) -> None:
        """Updates the draft's KV; writes the proposals of each work item to `into[row, :want]`.

        `features` is the target's output, `into` int64 `[rows, most proposals]` on the device.
        """


class Eagle3Proposer:
    """Chain drafting with an EAGLE-3 head: one pass over the new slots, then one pass per further proposal.

    The head's KV at a slot depends on that slot's token and feature alone, so the slots written while proposing are
    simply overwritten once the target has spoken.
    """

    lookahead = 1

    def __init__(self, head: Eagle3Head, pool: KVPool) -> None:
        self._head = head
        self._pool = pool
        self._device = pool.device

    def propose(self, work: Sequence[DraftWork], features: Tensor, tables: PageTables, into: Tensor) -> None:
        hidden = self._extend(work, features, tables)
        # Items that want most come first, so that those still proposing are always a prefix.
        order = sorted((i for i, w in enumerate(work) if w.want), key=lambda i: -work[i].want)
        if not order:
            return
        last = list(itertools.accumulate(len(w.next_tokens) for w in work))
        hidden = hidden.index_select(0, send([last[i] - 1 for i in order], self._device))
        proposed: list[Tensor] = []
        rows = [work[i].row for i in order]
        for step in range(work[order[0]].want):
            tokens = self._head.best(hidden)
            proposed.append(tokens)
            order = [i for i in order if work[i].want > step + 1]
            if not order:
                break
            at = [Rows(work[i].row, work[i].start + len(work[i].next_tokens) + step, 1) for i in order]
            packed = pack(at, tables, self._device, draft=True)
            hidden = self._head.forward(
                tokens[: len(order)], hidden[: len(order)], packed.positions, self._pool, packed.attention
            )

        self._keep(proposed, rows, into)

    def _keep(self, proposed: Sequence[Tensor], rows: Sequence[int], into: Tensor) -> None:
        """Writes the proposals of each step, of the first so many of `rows`, in as few operations as possible."""
        if len(proposed[0]) == len(proposed[-1]):
            into[:, : len(proposed)].index_copy_(0, send(rows, self._device), torch.stack(list(proposed), dim=1))
            return
        for step, tokens in enumerate(proposed):
            into[:, step].index_copy_(0, send(rows[: len(tokens)], self._device), tokens)

    def _extend(self, work: Sequence[DraftWork], features: Tensor, tables: PageTables) -> Tensor:
        """The pass over the slots whose target features have just been computed; hidden states [rows, H]."""
        tokens = send([t for w in work for t in w.next_tokens], self._device)
        if len(tokens) != len(features):
            take = [row for w in work for row in range(w.feature_row, w.feature_row + len(w.next_tokens))]
            features = features.index_select(0, send(take, self._device))
        packed = pack([Rows(w.row, w.start, len(w.next_tokens)) for w in work], tables, self._device, draft=True)
        hidden = self._head.fuse(features)
        return self._head.forward(tokens, hidden, packed.positions, self._pool, packed.attention)
