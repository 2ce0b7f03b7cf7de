"""Drafts on the device behind one interface: after every target pass, bring the draft's KV up to date and propose."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speccache_runtime.cache.pool import KVPool
from speccache_runtime.model.packing import Packed, Rows, pack
from speccache_runtime.model.tables import PageTables
from speccache_runtime.tensors import send


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One request's share of a draft pass.

    Slots [start, start + len(tokens)) get their draft KV, each from one of `tokens` (see `steps.DraftRows`).
    `feature_row` is the row of the target pass that holds slot `start`, for a draft that needs features. `want`
    proposals are asked for, 0 when the request does not decode next. `row` is the request's row of page tables and
    proposals.
    """

    row: int
    start: int
    tokens: Sequence[int]
    feature_row: int
    want: int


class Proposer(Protocol):
    """A draft."""

    def propose(self, work: Sequence[DraftWork], features: Tensor | None, tables: PageTables, into: Tensor) -> None:
        """Updates the draft's KV; writes the proposals of each work item to `into[row, :want]`.

        `features` is the target's output, None when it has no aux layers; `into` is int64 `[rows, most proposals]` on
        the device.
        """


class ChainProposer(ABC):
    """Chain drafting: one pass over the new slots, then one pass per further proposal.

    The slots written while proposing are guesses; they are overwritten once the target has spoken.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    @abstractmethod
    def first(self, work: Sequence[DraftWork], tokens: Tensor, features: Tensor | None, packed: Packed) -> Tensor:
        """The pass over the new slots: `tokens` int64 `[T]`, all work items' in order. Hidden rows `[T, H]`."""

    @abstractmethod
    def further(self, tokens: Tensor, hidden: Tensor, packed: Packed) -> Tensor:
        """A pass over proposals: `tokens` int64 `[R]`, made from `hidden` `[R, H]`. Hidden rows `[R, H]`."""

    @abstractmethod
    def best(self, hidden: Tensor) -> Tensor:
        """The most probable next tokens, as ids of the target: int64 `[R]` from hidden rows `[R, H]`."""

    def propose(self, work: Sequence[DraftWork], features: Tensor | None, tables: PageTables, into: Tensor) -> None:
        """See `Proposer`."""
        device = self.pool.device
        tokens = send([t for w in work for t in w.tokens], device)
        packed = pack([Rows(w.row, w.start, len(w.tokens)) for w in work], tables, device, draft=True)
        hidden = self.first(work, tokens, features, packed)
        # Items that want most come first, so that those still proposing are always a prefix.
        order = sorted((i for i, w in enumerate(work) if w.want), key=lambda i: -work[i].want)
        if not order:
            return
        last = list(itertools.accumulate(len(w.tokens) for w in work))
        hidden = hidden.index_select(0, send([last[i] - 1 for i in order], device))
        proposed: list[Tensor] = []
        rows = [work[i].row for i in order]
        for step in range(work[order[0]].want):
            tokens = self.best(hidden)
            proposed.append(tokens)
            order = [i for i in order if work[i].want > step + 1]
            if not order:
                break
            at = [Rows(work[i].row, work[i].start + len(work[i].tokens) + step, 1) for i in order]
            packed = pack(at, tables, device, draft=True)
            hidden = self.further(tokens[: len(order)], hidden[: len(order)], packed)
        self._keep(proposed, rows, into)

    def _keep(self, proposed: Sequence[Tensor], rows: Sequence[int], into: Tensor) -> None:
        """Writes the proposals of each step, of the first so many of `rows`, in as few operations as possible."""
        device = self.pool.device
        if len(proposed[0]) == len(proposed[-1]):
            into[:, : len(proposed)].index_copy_(0, send(rows, device), torch.stack(list(proposed), dim=1))
            return
        for step, tokens in enumerate(proposed):
            into[:, step].index_copy_(0, send(rows[: len(tokens)], device), tokens)
