"""Loads the tensors of an EAGLE-3 head, under any of the names they are saved with, and fuses what is used together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speccache_runtime.errors import ModelError
from speccache_runtime.model.draft_config import Eagle3Config
from speccache_runtime.model.layer import AttentionWeights, MlpWeights, RmsNorm
from speccache_runtime.model.split import Split
from speccache_runtime.model.target import Target
from speccache_runtime.model.weights import Stored, own, stream_weights

RENAMES = {
    "draft_id_to_target_id": "d2t",
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}

SKIPPED = frozenset({"t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq"})
"""What some checkpoints carry and drafting does not need: the inverse of d2t, and copies of the target's weights."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Tensors of a head on its device.

    `target_ids` is int64 `[draft_vocab]`, the target's id of each draft id; None when the vocabularies are the same.
    """

    fc: Tensor
    fc_bias: Tensor | None
    input_norm: RmsNorm | None
    fc_norms: tuple[RmsNorm, ...]
    embed: Tensor
    input_layernorm: RmsNorm
    hidden_norm: RmsNorm
    post_attention_layernorm: RmsNorm
    norm: RmsNorm
    attention: AttentionWeights
    mlp: MlpWeights
    lm_head: Tensor
    target_ids: Tensor | None


def load_head_weights(
    config: Eagle3Config, target: Target, aux_count: int, *, device: torch.device, dtype: torch.dtype
) -> HeadWeights:
    """Streams the head's weights. Raises ModelError for a missing, unknown or misshapen tensor."""
    split = Split.of(target.ranks, config.kv_heads)
    found: dict[str, Stored] = {}
    for stored in stream_weights(config.directory, split):
        known = _canonical(stored.name)
        if known not in SKIPPED:
            part = own(stored.part, device=device, dtype=dtype)
            found[known] = replace(stored, part=split.padded(known, part, stored.shape[0]) if stored.shape else part)
    take = _Taker(config, found)
    hidden = config.hidden_size
    weights = HeadWeights(
        fc=take("fc.weight", hidden, aux_count * config.target_hidden_size),
        fc_bias=_own_bias(take.optional("fc.bias", hidden), split),
        input_norm=take.norm("input_norm.weight", aux_count * config.target_hidden_size),
        fc_norms=take.norms("fc_norm", aux_count, config.target_hidden_size),
        embed=_embedding(config, found, target),
        input_layernorm=take.needed_norm("midlayer.input_layernorm.weight", hidden),
        hidden_norm=take.needed_norm("midlayer.hidden_norm.weight", hidden),
        post_attention_layernorm=take.needed_norm("midlayer.post_attention_layernorm.weight", hidden),
        norm=take.needed_norm("norm.weight", hidden),
        attention=_attention(config, take, split),
        mlp=_mlp(config, take, split),
        lm_head=_lm_head(config, take, target),
        target_ids=_target_ids(config, take),
    )
    take.finish()
    return weights


class _Taker:
    """Hands out this rank's parts of tensors by name, the whole's shape checked; what is left at the end is unknown."""

    def __init__(self, config: Eagle3Config, found: dict[str, Stored]) -> None:
        self._directory = config.directory
        self._eps = config.eps
        self._found = found

    def __call__(self, name: str, *shape: int) -> Tensor:
        tensor = self.optional(name, *shape)
        if tensor is None:
            raise ModelError(f"{self._directory}: tensor {name} is missing; is this an EAGLE-3 head?")
        return tensor

    def optional(self, name: str, *shape: int) -> Tensor | None:
        stored = self._found.pop(name, None)
        if stored is None:
            return None
        tensor = stored.part
        if stored.shape != shape:
            raise ModelError(
                f"{self._directory}: tensor {name} has shape {list(stored.shape)}, the config says {list(shape)}"
            )
        if name != "d2t" and not tensor.is_floating_point():
            raise ModelError(
                f"{self._directory}: tensor {name} is stored as {tensor.dtype}; quantised weights are not served yet"
            )
        return tensor

    def norm(self, name: str, size: int) -> RmsNorm | None:
        weight = self.optional(name, size)
        return None if weight is None else RmsNorm(weight, self._eps)

    def needed_norm(self, name: str, size: int) -> RmsNorm:
        return RmsNorm(self(name, size), self._eps)

    def norms(self, name: str, count: int, size: int) -> tuple[RmsNorm, ...]:
        """`name.0.weight` .. of all `count`, or nothing at all."""
        if f"{name}.0.weight" not in self._found:
            return ()
        return tuple(self.needed_norm(f"{name}.{number}.weight", size) for number in range(count))

    def fused_bias(self, prefix: str, parts: tuple[tuple[str, int], ...]) -> Tensor | None:
        if f"{prefix}{parts[0][0]}.bias" not in self._found:
            return None
        return torch.cat([self(f"{prefix}{part}.bias", size) for part, size in parts])

    def finish(self) -> None:
        if self._found:
            raise ModelError(f"{self._directory}: tensor {min(self._found)} is not part of an EAGLE-3 head")


def _attention(config: Eagle3Config, take: _Taker, split: Split) -> AttentionWeights:
    prefix, hidden = "midlayer.self_attn.", config.hidden_size
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts = (("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow))
    return AttentionWeights(
        heads=config.heads // split.size,
        kv_heads=max(1, config.kv_heads // split.size),
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        qkv=torch.cat([take(f"{prefix}{part}.weight", size, 2 * hidden) for part, size in parts]),
        qkv_bias=take.fused_bias(prefix, parts),
        q_norm=take.norm(f"{prefix}q_norm.weight", config.head_dim),
        k_norm=take.norm(f"{prefix}k_norm.weight", config.head_dim),
        o=take(f"{prefix}o_proj.weight", hidden, wide),
        o_bias=_own_bias(take.optional(f"{prefix}o_proj.bias", hidden), split),
    )


def _mlp(config: Eagle3Config, take: _Taker, split: Split) -> MlpWeights:
    prefix, hidden, inner = "midlayer.mlp.", config.hidden_size, config.intermediate_size
    parts = (("gate_proj", inner), ("up_proj", inner))
    return MlpWeights(
        gate_up=torch.cat([take(f"{prefix}{part}.weight", size, hidden) for part, size in parts]),
        gate_up_bias=take.fused_bias(prefix, parts),
        down=take(f"{prefix}down_proj.weight", hidden, inner),
        down_bias=_own_bias(take.optional(f"{prefix}down_proj.bias", hidden), split),
    )


def _own_bias(bias: Tensor | None, split: Split) -> Tensor | None:
    return bias if split.keeps_bias() else None


def _canonical(name: str) -> str:
    """SafeAILab's name of a tensor."""
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        name = "midlayer." + name.removeprefix("layers.0.")
    return RENAMES.get(name, name)


def _embedding(config: Eagle3Config, found: dict[str, Stored], target: Target) -> Tensor:
    """The checkpoint's embedding, or the target's, also when the checkpoint only repeats it."""
    shared = target.embed.weight.detach()
    own = found.pop("embed_tokens.weight", None)
    if own is None:
        return shared
    whole = (target.facts.vocab_size, target.facts.hidden_size)
    if own.shape != whole:
        raise ModelError(
            f"{config.directory}: tensor embed_tokens.weight has shape {list(own.shape)}, "
            f"the target's embedding has {list(whole)}"
        )
    return shared if torch.equal(own.part, shared) else own.part


def _lm_head(config: Eagle3Config, take: _Taker, target: Target) -> Tensor:
    own = take.optional("lm_head.weight", config.draft_vocab_size, config.hidden_size)
    if own is None and config.draft_vocab_size == config.vocab_size:
        return target.lm_head
    if own is None:
        raise ModelError(f"{config.directory}: tensor lm_head.weight is missing; is this an EAGLE-3 head?")
    return own


def _target_ids(config: Eagle3Config, take: _Taker) -> Tensor | None:
    """`d2t` holds offsets: the target's id is the draft's id plus its entry."""
    offsets = take.optional("d2t", config.draft_vocab_size)
    if offsets is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ModelError(
                f"{config.directory}: tensor d2t is missing, but the draft vocabulary of {config.draft_vocab_size} "
                f"differs from the target's of {config.vocab_size}"
            )
        return None
    ids = offsets.long() + torch.arange(config.draft_vocab_size, device=offsets.device)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ModelError(
            f"{config.directory}: d2t leads to token ids outside the target's vocabulary of {config.vocab_size}"
        )
    return ids
