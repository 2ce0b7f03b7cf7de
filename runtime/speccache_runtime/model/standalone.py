"""A draft that is a model of its own: loaded like a target, for a target that it must share its tokens with."""

from __future__ import annotations

from pathlib import Path

import torch

from speccache_runtime.model.target import Target, load_target
from speccache_runtime.model.vocabulary import check_same_tokens


def load_standalone(path: Path, target: Target, *, device: torch.device, dtype: torch.dtype) -> Target:
    """Loads a model of any served family as the draft of a loaded target.

    Its positions reach as far as the target's: behind what it was trained for it only proposes worse. Raises ModelError
    as `load_target` does, and if a token id means something else to it than to the target.
    """
    positions = target.facts.max_positions
    draft = load_target(path, device=device, dtype=dtype, aux_layers=(), ranks=target.ranks, positions=positions)
    check_same_tokens(target.facts, target.directory, draft.facts, path)
    return draft
