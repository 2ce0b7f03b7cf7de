"""The target model: transformers' own modules over our paged pools, with the features that an EAGLE-3 head needs.

Features are taken by hooks on the layers, because transformers returns the last hidden state after the final
norm, while a head wants what a layer really gave out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from speccache_api.geometry import ModelFacts
from speccache_runtime.errors import ModelError
from speccache_runtime.model import hf_attention
from speccache_runtime.model.attention import AttentionBackend, AttentionBatch, KVPool
from speccache_runtime.model.collective import ALONE, Collective
from speccache_runtime.model.eos import eos_token_ids
from speccache_runtime.model.files import read_config
from speccache_runtime.model.fuse import fused_layer, is_fusable
from speccache_runtime.model.inspect import target_facts
from speccache_runtime.model.latent import LatentAttention, adapt_layers, keys_from_latents
from speccache_runtime.model.latent_config import LATENT_FAMILIES
from speccache_runtime.model.layer import LayerCall, RmsNorm, cut, decode_layer, embed_rows
from speccache_runtime.model.loading import empty_model, fill
from speccache_runtime.model.rope import Rope
from speccache_runtime.model.split import Split
from speccache_runtime.model.torch_attention import TorchAttention


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
        *,
        fused: bool,
        ranks: Collective,
        positions: int,
    ) -> None:
        """`positions` is how many are ever asked for."""
        self.directory = directory
        self.ranks = ranks
        self.model = model
        self.facts = facts
        self.eos_token_ids = eos_token_ids
        self.aux_layers = aux_layers
        self.config: PreTrainedConfig = model.config
        self.embed = cast(nn.Embedding, model.get_input_embeddings())
        self._decoder: Any = model.get_decoder()
        self._latent = isinstance(self._decoder.layers[0].self_attn, LatentAttention)
        heads, kv_heads = self.config.num_attention_heads // ranks.size, self.config.num_key_value_heads
        self.backend: AttentionBackend = (
            TorchAttention(heads, keys_from_latents)
            if self._latent
            else TorchAttention(heads // max(1, kv_heads // ranks.size))
        )
        self.lm_head: Tensor = model.get_output_embeddings().weight.detach()
        self._captures = frozenset(aux_layers)
        self._norm = RmsNorm(self._decoder.norm.weight.detach(), float(self.config.rms_norm_eps))
        self._rope = Rope.of_module(self._decoder.rotary_emb, positions)
        split = Split.of(ranks, self.config.num_key_value_heads)
        self._layers = tuple(fused_layer(layer, self.config, split) for layer in self._decoder.layers) if fused else ()

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, pool: KVPool, batch: AttentionBatch) -> TargetOutput:
        """One packed pass: `tokens` and `positions` are int64 `[T]`; writes the rows' KV into `pool`."""
        if self._layers:
            hidden, captured = self._forward_fused(tokens, positions, pool, batch)
        else:
            hidden, captured = self._forward_modules(tokens, positions, pool, batch)
        if not self.aux_layers:
            return TargetOutput(hidden, None)
        return TargetOutput(hidden, torch.cat([captured[layer] for layer in self.aux_layers], dim=-1))

    def _forward_fused(
        self, tokens: Tensor, positions: Tensor, pool: KVPool, batch: AttentionBatch
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Through our own layers. Returns the normed hidden rows and the outputs of the aux layers."""
        x = embed_rows(tokens, self.embed.weight, self.ranks)
        call = LayerCall(*self._rope(positions, x.dtype), self.backend, self.backend.prepare(batch, pool), self.ranks)
        captured = {}
        for number, layer in enumerate(self._layers):
            batch.before_layer(number)
            x = decode_layer(layer, x, call, pool.layer(number))
            if number in self._captures:
                captured[number] = x
        return self._norm(x), captured

    def _forward_modules(
        self, tokens: Tensor, positions: Tensor, pool: KVPool, batch: AttentionBatch
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Through transformers' modules: any architecture whose attention is plain or latent."""
        more = {"rotation": self._rope(positions, self.embed.weight.dtype)} if self._latent else {}
        captured: dict[int, Tensor] = {}
        hooks = [
            self._decoder.layers[layer].register_forward_hook(partial(_capture, captured, layer))
            for layer in self._captures
        ]
        try:
            out = self._decoder(
                inputs_embeds=embed_rows(tokens, self.embed.weight, self.ranks).unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                pool=pool,
                before_layer=batch.before_layer,
                backend=self.backend,
                prepared=self.backend.prepare(batch, pool),
                **more,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return out.last_hidden_state.squeeze(0), captured

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor | None:
        """Logits `[R, V]` in float32 of hidden rows `[R, H]` taken from a forward; on rank 0 only, None elsewhere."""
        whole = self.ranks.gather(F.linear(hidden, self.lm_head).float())
        return None if whole is None else cut(whole, self.facts.vocab_size)


def _capture(into: dict[int, Tensor], layer: int, _module: nn.Module, _inputs: object, output: Tensor) -> None:
    into[layer] = output.squeeze(0)


def load_target(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    aux_layers: tuple[int, ...],
    fuse: bool = True,
    ranks: Collective = ALONE,
    positions: int = 0,
) -> Target:
    """Loads a target from a directory of safetensors; its computation and KV are in `dtype`.

    `aux_layers` are the layers (from 0) whose output, the residual stream after them, is captured as features.
    `positions` is how many are ever asked for, if that is more than the model's own.
    With `fuse`, layers of a known shape run through our own code, which is faster; without, as transformers' modules.
    Of several `ranks` each loads its part.
    Raises ModelError if files are missing or broken, if the architecture is not served, if a tensor is missing, unknown
    or of the wrong shape, or if an aux layer does not exist.
    """
    facts = target_facts(path)
    for layer in aux_layers:
        if not 0 <= layer < facts.geometry.layers:
            raise ModelError(
                f"{path}: features of layer {layer} are wanted, but there are {facts.geometry.layers} layers"
            )
    hf_attention.register()
    model = empty_model(path)
    fuse, latent = fuse and is_fusable(model), facts.model_type in LATENT_FAMILIES
    if ranks.size > 1 and (not (fuse or latent) or facts.shares % ranks.size):
        raise ModelError(
            f"{path}: the model cannot be split over {ranks.size} ranks (it can over divisors of {facts.shares}); "
            "set parallelism.tensor to one of them"
        )
    fill(model, path, Split.of(ranks, model.config.num_key_value_heads), fused=fuse, device=device, dtype=dtype)
    if latent:
        adapt_layers(cast(Any, model.get_decoder()).layers, ranks)
    model.requires_grad_(False)
    eos = eos_token_ids(path, read_config(path))
    positions = max(positions, facts.max_positions)
    return Target(path, model.eval(), facts, eos, aux_layers, fused=fuse, ranks=ranks, positions=positions)
