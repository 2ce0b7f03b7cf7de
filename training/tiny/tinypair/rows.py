"""Makes training rows: windows of the token stream, some rewritten so that they quote themselves.

Quoting rows are what teaches the pair to copy. Without them the target continues a quotation with invented text, the
head learns to predict from the last few tokens alone, and losing its KV hardly shows.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor

SPANS = 3
SHORTEST = 48
SCRAMBLED_SHARE = 0.15
"""Spans whose tokens are shuffled before they are repeated: they can only be copied, never guessed."""


class RowMaker:
    """Draws rows from one packed stream. Deterministic for a seed; owns its random generators.

    `separators` are short token sequences, one of which stands before a repeated span (an empty one is allowed).
    """

    def __init__(self, stream: Tensor, separators: list[list[int]], seed: int) -> None:
        self.stream = stream
        self._gen = torch.Generator(device=stream.device).manual_seed(seed)
        self._rng = np.random.default_rng(seed)
        self._table = torch.tensor([t for s in separators for t in s] or [0], device=stream.device)
        starts = np.cumsum([0, *[len(s) for s in separators]])
        self._spots = [np.arange(a, b) for a, b in itertools.pairwise(starts)]

    def rows(self, count: int, length: int, copy_share: float) -> Tensor:
        """int64 [count, length] on the stream's device; the first `copy_share` of the rows quote themselves."""
        last = self.stream.numel() - length - 1
        starts = torch.randint(0, last, (count,), generator=self._gen, device=self.stream.device)
        plain = self.stream[starts[:, None] + torch.arange(length, device=self.stream.device)].long()
        quoting = round(copy_share * count)
        if not quoting:
            return plain
        index = torch.from_numpy(np.stack([self._quote(length) for _ in range(quoting)])).to(plain.device)
        pool = torch.cat([plain[:quoting], self._table.expand(quoting, -1)], 1)
        return torch.cat([pool.gather(1, index), plain[quoting:]])

    def _quote(self, length: int) -> np.ndarray:
        """Where each token of a quoting row comes from: the row itself, or (from `length` on) the separators."""
        index = np.arange(length)
        at = 0
        for _ in range(SPANS):
            span = int(math.exp(self._rng.uniform(math.log(SHORTEST), math.log(max(SHORTEST + 1, length // 5)))))
            room = length // SPANS - 2 * span
            gap = int(self._rng.uniform(0, room)) if room > 0 else 0
            separator = self._spots[self._rng.integers(len(self._spots))] + length
            start = at + span + gap + len(separator)
            if start + span > length:
                break
            if self._rng.random() < SCRAMBLED_SHARE:
                index[at : at + span] = self._rng.permutation(index[at : at + span])
            index[start - len(separator) : start] = separator
            index[start : start + span] = index[at : at + span]
            at = start + span
        return index
