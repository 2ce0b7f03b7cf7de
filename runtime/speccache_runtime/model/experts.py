"""Experts of transformers' modules: one tensor for all of them in memory, one for each in the files.

Before loading, the tensors of all experts are made, and every expert's part of them gets the name it has in the files.
Loading then fills the parts by name as usual, and nothing is held twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from speccache_runtime.model.split import Split

STACKED = ("gate_up_proj", "down_proj")


@dataclass(slots=True)
class Experts:
    """`stacks` are the names of the tensors of all experts, which files do not hold. `parts` are this rank's parts of
    them by the names that files have, and `shapes` those of the whole tensors there.
    """

    stacks: set[str] = field(default_factory=set)
    parts: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def share_experts(model: PreTrainedModel, split: Split, *, device: torch.device, dtype: torch.dtype) -> Experts:
    """Gives every stack of experts uninitialised memory, for the part of `split` of each expert."""
    made = Experts()
    for path, module in model.named_modules():
        if not all(isinstance(getattr(module, name, None), nn.Parameter) for name in STACKED):
            continue
        both, down = (tuple(getattr(module, name).shape) for name in STACKED)
        inner = split.rows("up_proj.weight", both[1] // 2)
        for name, size in zip(STACKED, ((2 * inner, both[2]), (down[1], inner)), strict=True):
            stack = torch.empty((both[0], *size), device=device, dtype=dtype)
            setattr(module, name, nn.Parameter(stack, requires_grad=False))
            made.stacks.add(f"{path}.{name}")
            for number, expert in enumerate(stack):
                prefix = f"{path}.{number}"
                if name == "down_proj":
                    made.parts[f"{prefix}.down_proj.weight"] = expert
                    made.shapes[f"{prefix}.down_proj.weight"] = down[1:]
                    continue
                gate_up = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
                made.parts |= {f"{prefix}.{half}.weight": part for half, part in gate_up.items()}
                made.shapes |= dict.fromkeys((f"{prefix}.{half}.weight" for half in gate_up), (both[1] // 2, both[2]))
    return made
