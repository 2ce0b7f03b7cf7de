"""Experts of transformers' modules: one tensor for all of them in memory, one for each in the files.

Before loading, the tensors of all experts are made, and every expert's part of them gets the name it has in the files.
Loading then fills the parts by name as usual, and nothing is held twice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

STACKED = ("gate_up_proj", "down_proj")


def share_experts(
    model: PreTrainedModel, *, device: torch.device, dtype: torch.dtype
) -> tuple[set[str], dict[str, Tensor]]:
    """Gives every stack of experts uninitialised memory.

    Returns the names of the stacks, which files do not hold, and the parts by the names that files have.
    """
    stacks: set[str] = set()
    parts: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not all(isinstance(getattr(module, name, None), nn.Parameter) for name in STACKED):
            continue
        for name in STACKED:
            made = torch.empty(getattr(module, name).shape, device=device, dtype=dtype)
            setattr(module, name, nn.Parameter(made, requires_grad=False))
            stacks.add(f"{path}.{name}")
            for number, expert in enumerate(made):
                prefix = f"{path}.{number}"
                if name == "down_proj":
                    parts[f"{prefix}.down_proj.weight"] = expert
                else:
                    parts[f"{prefix}.gate_proj.weight"], parts[f"{prefix}.up_proj.weight"] = expert.chunk(2)
    return stacks, parts
