"""Chooses tokens from the target's logits, the same way with and without speculation.

A sampled token depends on the request's seed, its position and the distribution, and on nothing else: one uniform
number per (seed, position) picks from the cumulative distribution. So speculation, batching and preemption never change
what a seeded request generates. All rows are drawn together; nothing is read back from the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from speccache_runtime.core import Sampling
from speccache_runtime.tensors import send

_COLDEST = 1e-5
"""Lowest temperature to divide by. Below it logits overflow float32; at it only exact ties are not settled."""


def choose(logits: Tensor, sampling: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One token per row.

    logits     [R, V] float32
    sampling   how row r is sampled
    positions  the position that row r's token will have in its sequence
    returns    [R] int64 on the device of `logits`
    """
    chosen = logits.argmax(dim=-1)
    rows = [r for r, s in enumerate(sampling) if s.temperature > 0]
    if not rows:
        return chosen
    numbers = [
        [max(sampling[r].temperature, _COLDEST), sampling[r].top_p, _uniform(sampling[r].seed, positions[r])]
        for r in rows
    ]
    temperature, top_p, points = torch.tensor(numbers).to(logits.device, non_blocking=True).T
    at = send(rows, logits.device)
    chosen[at] = _draw(logits[at], temperature, top_p, points)
    return chosen


def _draw(logits: Tensor, temperature: Tensor, top_p: Tensor, points: Tensor) -> Tensor:
    """A token of the tempered top-p distribution of each row of `logits` [R, V]; the others are [R]."""
    probs = torch.softmax(logits / temperature[:, None], dim=-1)
    sorted_probs, order = probs.sort(descending=True, stable=True)
    cumulative = sorted_probs.cumsum(dim=-1)
    # The smallest set that reaches top_p: a token stays if the mass before it is still below top_p.
    stays = cumulative - sorted_probs < top_p[:, None]
    stays[:, 0] = True  # the smallest set has one token; a tiny top_p is 0 in float32, and nothing is below that
    kept = torch.where(stays, sorted_probs, 0.0)
    mass = kept.cumsum(dim=-1)
    index = torch.searchsorted(mass, (points * mass[:, -1])[:, None], right=True).squeeze(1)
    last = ((kept > 0).sum(dim=-1) - 1).clamp(min=0)  # logits that are no numbers keep nothing
    return order.gather(1, torch.minimum(index, last)[:, None]).squeeze(1)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that only this seed and position give."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64
