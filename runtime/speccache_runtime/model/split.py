"""Which part of a stored tensor a tensor-parallel rank needs.

Rows of what makes heads, inner activations and vocabulary; columns of what reads them; everything else whole. Names
are those of the Llama family, which EAGLE-3 heads share once their prefixes are taken off, and of DeepSeek's latent
attention: what makes latents is whole on every rank, what makes heads of them is split. Experts are MLPs like others:
every rank has its part of each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from speccache_runtime.model.collective import Collective

Part = tuple[slice, ...]

_WHOLE = slice(None)
_ROWS = (
    *("q_proj.weight", "q_proj.bias", "gate_proj.weight", "gate_proj.bias", "up_proj.weight", "up_proj.bias"),
    *("q_b_proj.weight", "kv_b_proj.weight"),
)
_KV_ROWS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
_COLUMNS = ("o_proj.weight", "down_proj.weight", "fc.weight")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Split:
    """The part of one rank. `kv_heads` are those of the whole model; ranks beyond them repeat heads."""

    rank: int
    size: int
    kv_heads: int

    @classmethod
    def of(cls, ranks: Collective, kv_heads: int) -> Split:
        """The part that this rank of `ranks` has."""
        return cls(ranks.rank, ranks.size, kv_heads)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Part:
        """Where this rank's part of tensor `name` lies in it, one slice a dimension."""
        if self.size == 1:
            return (_WHOLE,) * len(shape)
        others = (_WHOLE,) * (len(shape) - 1)
        if name.endswith(_ROWS):
            return (_share(shape[0], self.rank, self.size), *others)
        if name.endswith(_KV_ROWS):
            groups = min(self.size, self.kv_heads)
            return (_share(shape[0], self.rank * groups // self.size, groups), *others)
        if name.endswith(_COLUMNS):
            return (_WHOLE, _share(shape[1], self.rank, self.size))
        if name.endswith(_VOCABULARY):
            rows = self.vocabulary_rows(shape[0])
            return (slice(self.rank * rows, min((self.rank + 1) * rows, shape[0])), *others)
        return (_WHOLE,) * len(shape)

    def rows(self, name: str, rows: int) -> int:
        """How many of the `rows` rows of tensor `name` this rank has."""
        start, end, _ = self(name, (rows,))[0].indices(rows)
        return end - start

    def vocabulary_rows(self, vocabulary: int) -> int:
        """Rows that every rank keeps of a vocabulary; those of the last one may be padding."""
        return -(-vocabulary // self.size)

    def padded(self, name: str, part: Tensor, vocabulary: int) -> Tensor:
        """A part of tensor `name` of `vocabulary` rows, with zeros behind it if other ranks have more rows."""
        if self.size == 1 or not name.endswith(_VOCABULARY):
            return part
        return F.pad(part, (0, 0, 0, self.vocabulary_rows(vocabulary) - len(part)))

    def keeps_bias(self) -> bool:
        """Whether this rank adds the biases behind a sum over ranks: they count once."""
        return self.rank == 0


def _share(total: int, index: int, count: int) -> slice:
    assert total % count == 0, f"{total} does not divide into {count}"
    size = total // count
    return slice(index * size, (index + 1) * size)
