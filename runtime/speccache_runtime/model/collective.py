"""What the ranks of a replica do together while a model runs: sum, gather, hear the first one.

Layers are split over ranks as in Megatron-LM (Shoeybi et al. 2019): heads and the inner size of the MLP, and the
vocabulary. Between the parts of a layer every rank has the whole hidden state, so each part ends with a sum over ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Collective(Protocol):
    """The ranks of one replica. Every rank makes the same calls in the same order, or all of them hang."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, the same bytes on every rank; may be made in place."""

    def gather(self, part: Tensor) -> Tensor | None:
        """The parts `[R, n]` of all ranks side by side, `[R, size * n]`, on rank 0; None on the others."""

    def from_first(self, values: Tensor) -> Tensor:
        """What rank 0 gave, on every rank; made in place."""


class Alone:
    """A replica of one rank."""

    rank = 0
    size = 1

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> Tensor | None:
        return part

    def from_first(self, values: Tensor) -> Tensor:
        return values


ALONE = Alone()


class ProcessGroup:
    """The ranks of a torch process group, which its maker destroys.

    An operation raises RuntimeError when another rank is gone or does not take part in time.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def sum(self, part: Tensor) -> Tensor:
        dist.all_reduce(part)
        return part

    def gather(self, part: Tensor) -> Tensor | None:
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part.contiguous(), parts, dst=0)
        return None if parts is None else torch.cat(parts, dim=-1)

    def from_first(self, values: Tensor) -> Tensor:
        dist.broadcast(values, src=0)
        return values
