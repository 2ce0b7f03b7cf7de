"""Builds transformers' modules and fills them with weights, tensor by tensor.

Weights are streamed onto modules that were built without memory (on the meta device), so loading never holds the model
twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from speccache_runtime.errors import ModelError
from speccache_runtime.model import hf_attention
from speccache_runtime.model.experts import share_experts
from speccache_runtime.model.files import reason
from speccache_runtime.model.fuse import share_projections
from speccache_runtime.model.hf_config import read_hf_config
from speccache_runtime.model.inspect import is_spare
from speccache_runtime.model.split import Split
from speccache_runtime.model.weights import own, stream_weights

OUTPUT_HEAD = "lm_head.weight"


def empty_model(path: Path) -> PreTrainedModel:
    """The model's modules with parameters that take no memory."""
    config = read_hf_config(path)
    try:
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, attn_implementation=hf_attention.NAME)
            return cast(PreTrainedModel, model)
    except Exception as error:  # libraries' own kinds, and assertions
        raise ModelError(f"{path}: config.json describes no model that can be built: {reason(error)}") from error


def fill(
    model: PreTrainedModel, path: Path, split: Split, *, fused: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Loads this rank's part of every tensor and makes the buffers; on return nothing is left on the meta device.

    With `fused`, projections that share an input share memory. Raises ModelError for a tensor that is missing, unknown
    or of the wrong shape.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    experts = share_experts(model, split, device=device, dtype=dtype)
    shapes |= experts.shapes
    if fused:
        for layer in cast(Any, model.get_decoder()).layers:
            share_projections(layer, split, device=device, dtype=dtype)
    own_names = {
        name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in experts.stacks
    }
    wanted = own_names | experts.parts
    tied = bool(model.config.tie_word_embeddings)
    if tied:
        del wanted[OUTPUT_HEAD]
    for stored in stream_weights(path, split):
        name = stored.name
        if name.endswith("rotary_emb.inv_freq") or (tied and name == OUTPUT_HEAD):
            continue  # Old checkpoints hold it, but it follows from the config or from the embedding.
        if is_spare(name, model.config.num_hidden_layers):
            continue
        if name not in wanted:
            raise ModelError(f"{path}: tensor {name} is not part of {type(model).__name__}, or is there twice")
        if stored.shape != shapes[name]:
            raise ModelError(
                f"{path}: tensor {name} has shape {list(stored.shape)}, the config says {list(shapes[name])}"
            )
        part = split.padded(name, stored.part, stored.shape[0]) if stored.shape else stored.part
        _load(model, path, name, wanted.pop(name), part, device=device, dtype=dtype)
    if wanted:
        missing = ", ".join(sorted(wanted)[:3]) + (f" and {len(wanted) - 3} more" if len(wanted) > 3 else "")
        raise ModelError(f"{path}: tensors are missing from the weights: {missing}")
    if tied:
        _assign(model, OUTPUT_HEAD, cast(nn.Embedding, model.get_input_embeddings()).weight)
    # Rope tables are made again on the real device and stay float32: rounding them would shift far positions.
    decoder = model.get_decoder()
    with torch.device(device):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config)


def _load(
    model: nn.Module,
    path: Path,
    name: str,
    parameter: Tensor,
    tensor: Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Puts a stored tensor where `parameter` is: into its memory if it has some, else in its place."""
    if not tensor.is_floating_point():
        raise ModelError(f"{path}: tensor {name} is stored as {tensor.dtype}; quantised weights are not served yet")
    if not isinstance(parameter, nn.Parameter) and parameter.is_meta:
        # A stored buffer corrects scores that are float32 whatever the model computes in, and stays so too.
        _assign(model, name, own(tensor, device=device, dtype=torch.float32))
    elif parameter.is_meta:
        _assign(model, name, nn.Parameter(own(tensor, device=device, dtype=dtype), requires_grad=False))
    else:
        parameter.data.copy_(tensor)


def _assign(model: nn.Module, name: str, parameter: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)
