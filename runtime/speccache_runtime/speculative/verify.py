"""Which proposals the target accepts."""

from __future__ import annotations

import torch
from torch import Tensor


def count_accepted(chosen: Tensor, proposed: Tensor, num_proposed: Tensor) -> Tensor:
    """How many leading proposals equal the target's own choice.

    chosen        [B, K+1] int64, the token the target chose after each of the K+1 verified tokens
    proposed      [B, K]   int64, the draft's proposals; entries past a row's count are ignored
    num_proposed  [B]      int64, proposals per row
    returns       [B]      int64; row b yields the tokens chosen[b, : accepted + 1]

    The draft proposes one token per position, so "draw from the target and compare" is exact speculative sampling: a
    proposal is accepted with the target's probability of it, and a rejected position holds a draw from the rest
    (Leviathan et al. 2023, algorithm 1, with a one-point draft distribution). With temperature 0 both sides are the
    most probable token.
    """
    width = proposed.shape[1]
    real = torch.arange(width, device=proposed.device) < num_proposed[:, None]
    match = (chosen[:, :width] == proposed) & real
    return match.long().cumprod(dim=1).sum(dim=1)
