"""The target model: transformers' own modules over our paged pools, with the features that an EAGLE-3 head needs.

Weights are streamed onto modules that were built without memory (on the meta device), so loading never holds the model
twice. Features are taken by hooks on the layers, because transformers returns the last hidden state after the final
norm, while a head wants what a layer really gave out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from speccache_api.geometry import ModelFacts
from speccache_runtime.errors import ModelError
from speccache_runtime.model import hf_attention
from speccache_runtime.model.attention import AttentionBackend, AttentionBatch, KVPool, TorchAttention
from speccache_runtime.model.families import check_target
from speccache_runtime.model.files import read_config, read_json
from speccache_runtime.model.inspect import target_facts
from speccache_runtime.model.weights import stream_weights


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """`hidden` is `[T, H]` after the final norm; `features` is `[T, len(aux_layers) * H]`, None without aux layers."""

    hidden: Tensor
    features: Tensor | None


class Target:
    """A loaded target. Not thread-safe: one forward at a time."""

    def __init__(
        self,
        directory: Path,
        model: PreTrainedModel,
        facts: ModelFacts,
        eos_token_ids: frozenset[int],
        aux_layers: tuple[int, ...],
    ) -> None:
        self.directory = directory
        self.model = model
        self.facts = facts
        self.eos_token_ids = eos_token_ids
        self.aux_layers = aux_layers
        self.config: PreTrainedConfig = model.config
        self.embed = cast(nn.Embedding, model.get_input_embeddings())
        self.backend: AttentionBackend = TorchAttention()
        self._decoder: nn.Module = model.get_decoder()
        self.lm_head: Tensor = model.get_output_embeddings().weight.detach()
        self._captured: dict[int, Tensor] = {}
        for layer in set(aux_layers):
            self._decoder.layers[layer].register_forward_hook(self._capture(layer))

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, pool: KVPool, batch: AttentionBatch) -> TargetOutput:
        """One packed pass: `tokens` and `positions` are int64 `[T]`; writes the rows' K/V into `pool`."""
        out = self._decoder(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            pool=pool,
            batch=batch,
            backend=self.backend,
        )
        hidden: Tensor = out.last_hidden_state.squeeze(0)
        if not self.aux_layers:
            return TargetOutput(hidden, None)
        features = torch.cat([self._captured[layer] for layer in self.aux_layers], dim=-1)
        self._captured.clear()
        return TargetOutput(hidden, features.squeeze(0))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]` in float32 of hidden rows `[R, H]` taken from a forward."""
        return F.linear(hidden, self.lm_head).float()

    def _capture(self, layer: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self._captured[layer] = output

        return keep


def load_target(path: Path, *, device: torch.device, dtype: torch.dtype, aux_layers: tuple[int, ...]) -> Target:
    """Loads a target from a directory of safetensors; its computation and KV are in `dtype`.

    `aux_layers` are the layers (from 0) whose output, the residual stream after them, is captured as features.
    Raises ModelError if files are missing or broken, if the architecture is not served, if a tensor is missing, unknown
    or of the wrong shape, or if an aux layer does not exist.
    """
    config_dict = read_config(path)
    check_target(path, config_dict)
    facts = target_facts(path)
    for layer in aux_layers:
        if not 0 <= layer < facts.geometry.layers:
            raise ModelError(
                f"{path}: features of layer {layer} are wanted, but there are {facts.geometry.layers} layers"
            )
    hf_attention.register()
    model = _empty_model(path)
    _fill(model, path, device=device, dtype=dtype)
    model.requires_grad_(False)
    return Target(path, model.eval(), facts, _eos_token_ids(path, config_dict), aux_layers)


def _empty_model(path: Path) -> PreTrainedModel:
    """The model's modules with parameters that take no memory."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, attn_implementation=hf_attention.NAME)
            return cast(PreTrainedModel, model)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(f"{path}: config.json describes no model that can be built: {error}") from error


def _fill(model: PreTrainedModel, path: Path, *, device: torch.device, dtype: torch.dtype) -> None:
    """Replaces every meta parameter and buffer by a real one."""
    wanted = dict(model.named_parameters(remove_duplicate=False))
    tied = bool(model.config.tie_word_embeddings)
    for name, tensor in stream_weights(path, device=device, dtype=dtype):
        if name.endswith("rotary_emb.inv_freq"):
            continue  # Old Llama checkpoints store it; it follows from the config.
        if name not in wanted:
            raise ModelError(f"{path}: tensor {name} is not part of {type(model).__name__}")
        if wanted[name].shape != tensor.shape:
            raise ModelError(
                f"{path}: tensor {name} has shape {list(tensor.shape)}, the config says {list(wanted[name].shape)}"
            )
        _assign(model, name, nn.Parameter(tensor, requires_grad=False))
        del wanted[name]
    if tied and "lm_head.weight" in wanted and "model.embed_tokens.weight" not in wanted:
        _assign(model, "lm_head.weight", model.get_parameter("model.embed_tokens.weight"))
        del wanted["lm_head.weight"]
    if wanted:
        missing = ", ".join(sorted(wanted)[:3]) + (f" and {len(wanted) - 3} more" if len(wanted) > 3 else "")
        raise ModelError(f"{path}: tensors are missing from the weights: {missing}")
    # Rope tables are made again on the real device and stay float32: rounding them would shift far positions.
    decoder = model.get_decoder()
    with torch.device(device):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config)


def _assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)


def _eos_token_ids(path: Path, config: dict[str, Any]) -> frozenset[int]:
    """Tokens that end a text: generation_config.json's, else config.json's; empty if neither names one."""
    generation = path / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.is_file() else None
    found = config.get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{path}: eos_token_id must be a number or a list of numbers, found {found!r}")
    return frozenset(ids)
