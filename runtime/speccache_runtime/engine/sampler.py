"""Chooses tokens from the target's logits, the same way with and without speculation.

A sampled token depends on the request's seed, its position and the distribution, and on nothing else: one uniform
number per (seed, position) picks from the cumulative distribution. So speculation, batching and preemption never change
what a seeded request generates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from speccache_runtime.core import SamplingParams

_COLDEST = 1e-5
"""Lowest temperature to divide by. Below it logits overflow float32; at it only exact ties are not settled."""


def choose(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """One token per row.

    logits     [R, V] float32
    params     how row r is sampled
    positions  the position that row r's token will have in its sequence
    returns    [R] int64 on the device of `logits`
    """
    chosen = logits.argmax(dim=-1)
    rows = [r for r, p in enumerate(params) if p.temperature > 0]
    if rows:
        drawn = [_draw(logits[r], params[r], positions[r]) for r in rows]
        chosen[torch.tensor(rows, device=logits.device)] = torch.stack(drawn)
    return chosen


def _draw(logits: Tensor, params: SamplingParams, position: int) -> Tensor:
    """A token of the tempered top-p distribution of `logits` [V]."""
    probs = torch.softmax(logits / max(params.temperature, _COLDEST), dim=-1)
    sorted_probs, order = probs.sort(descending=True, stable=True)
    cumulative = sorted_probs.cumsum(dim=0)
    # The smallest set that reaches top_p: a token stays if the mass before it is still below top_p.
    stays = cumulative - sorted_probs < params.top_p
    stays[0] = True  # the smallest set has one token; a tiny top_p is 0 in float32, and nothing is below that
    kept = torch.where(stays, sorted_probs, 0.0)
    mass = kept.cumsum(dim=0)
    point = _uniform(params.seed, position) * mass[-1]
    index = torch.searchsorted(mass, point, right=True)
    return order[index.clamp(max=int((kept > 0).sum()) - 1)]


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that only this seed and position give."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64
