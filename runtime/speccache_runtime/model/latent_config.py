"""What config.json says of multi-head latent attention and of experts (DeepSeek-V2 and V3), and what of it is served.

Pure checks like those of `families`. What transformers' modules would silently leave out is refused, not ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccache_runtime.errors import ModelError
from speccache_runtime.model.values import positive, positive_number

LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")

SCORING = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid"}
"""How experts are scored; transformers' modules of a family know one way each."""

ROUTING = {"deepseek_v2": ("greedy", "group_limited_greedy"), "deepseek_v3": ("noaux_tc",)}
"""Which `topk_method` they know. The second of V2 and the one of V3 choose among groups of experts first."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of multi-head latent attention: `rank` numbers of a latent and `rope_dim` of a rotated key are kept of a
    token; a head has `nope_dim` + `rope_dim` numbers to compare and `value_dim` to give.
    """

    heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


def latent_shape(directory: Path, config: dict[str, Any]) -> LatentShape:
    """The attention's sizes. Raises ModelError naming the key."""
    return LatentShape(
        heads=positive(directory, config, "num_attention_heads"),
        rank=positive(directory, config, "kv_lora_rank"),
        rope_dim=positive(directory, config, "qk_rope_head_dim"),
        nope_dim=positive(directory, config, "qk_nope_head_dim"),
        value_dim=positive(directory, config, "v_head_dim"),
    )


def check_latent(directory: Path, config: dict[str, Any]) -> None:
    """Raises ModelError for attention or experts that the family's modules do not compute."""
    shape = latent_shape(directory, config)
    if shape.rope_dim % 2:
        raise ModelError(f"{directory}: qk_rope_head_dim {shape.rope_dim} is odd; numbers are rotated in pairs")
    if config.get("q_lora_rank") is not None:
        positive(directory, config, "q_lora_rank")
    shared = config.get("num_key_value_heads")
    if shared not in (None, shape.heads):
        raise ModelError(
            f"{directory}: num_key_value_heads {shared!r} is not num_attention_heads {shape.heads}: "
            "with latents every head has keys of its own"
        )
    _check_experts(directory, config)


def spare_layers(directory: Path, config: dict[str, Any]) -> int:
    """Layers behind the last one that predict further tokens and are not loaded. Raises ModelError."""
    if config.get("model_type") != "deepseek_v3" or not config.get("num_nextn_predict_layers"):
        return 0
    return positive(directory, config, "num_nextn_predict_layers")


def _check_experts(directory: Path, config: dict[str, Any]) -> None:
    family = str(config.get("model_type"))
    experts, chosen = (positive(directory, config, key) for key in ("n_routed_experts", "num_experts_per_tok"))
    for key in ("moe_intermediate_size", "n_shared_experts"):
        positive(directory, config, key)
    positive_number(directory, config, "routed_scaling_factor")
    dense = config.get("first_k_dense_replace")
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise ModelError(f"{directory}: first_k_dense_replace in config.json must be a whole number, found {dense!r}")
    for key, served in (
        ("scoring_func", (SCORING[family],)),
        ("topk_method", ROUTING[family]),
        ("moe_layer_freq", (1,)),
        ("norm_topk_prob", (False,) if family == "deepseek_v2" else (True, False)),
    ):
        if config.get(key) is not None and config[key] not in served:
            words = " or ".join(map(str, served))
            raise ModelError(f"{directory}: {key} {config[key]!r} is not served for {family}; only {words} is")
    groups, used = 1, 1
    if family == "deepseek_v3" or config.get("topk_method") == "group_limited_greedy":
        groups, used = (positive(directory, config, key) for key in ("n_group", "topk_group"))
    if experts % groups or used > groups or chosen > experts // groups * used:
        raise ModelError(
            f"{directory}: num_experts_per_tok {chosen} cannot be chosen from {used} of {groups} groups "
            f"of n_routed_experts {experts}"
        )
    if family == "deepseek_v3" and experts // groups < 2:
        raise ModelError(f"{directory}: n_group {groups} leaves fewer than 2 of n_routed_experts {experts} to a group")
