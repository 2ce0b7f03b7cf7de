"""Which model families are served, and what in a config.json cannot be served yet.

Pure checks over the parsed config.json, so that the inspection Job refuses a model before a pod is made for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccache_runtime.errors import ModelError
from speccache_runtime.model.latent_config import LATENT_FAMILIES, check_latent
from speccache_runtime.model.values import positive, positive_number

TARGET_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
"""Decoders with full attention, and the model_type of each. DeepSeek's have latent attention and experts."""

WINDOWED = {"mistral": False, "qwen2": True, "qwen3": True}
"""Families whose attention can slide, and whether `use_sliding_window` switches it."""

DEFAULT_WINDOW = 4096
DEFAULT_FULL_LAYERS = 28
"""What transformers takes for `sliding_window` and `max_window_layers` where config.json does not say."""

SERVED_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

SERVED_ROPE = ("default", "linear", "llama3", "yarn")

ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)
"""What angles are computed from. A 0 or a text here would pass until the first request, or end in a traceback."""

ROPE_SCALES = ("mscale", "mscale_all_dim")
PARTIAL_ROPE = "partial_rotary_factor"

REFUSED = {
    "quantization_config": "quantised weights are not served yet",
    "attn_logit_softcapping": "attention soft-capping is not served",
    "final_logit_softcapping": "logit soft-capping is not served",
}


def check_target(directory: Path, config: dict[str, Any]) -> str:
    """The architecture of a target's config.json. Raises ModelError if it cannot be served, naming what can."""
    found = config.get("architectures")
    names = found if isinstance(found, list) else []
    known = [name for name in names if isinstance(name, str) and name in TARGET_ARCHITECTURES]
    if not known:
        shown = ", ".join(map(str, names)) or "none"
        supported = ", ".join(TARGET_ARCHITECTURES)
        raise ModelError(f"{directory}: architecture {shown} is not served; supported: {supported}")
    # transformers builds what model_type says and never looks at architectures.
    if config.get("model_type") != TARGET_ARCHITECTURES[known[0]]:
        raise ModelError(
            f"{directory}: model_type in config.json is {config.get('model_type')!r}, but architecture {known[0]} has "
            f"{TARGET_ARCHITECTURES[known[0]]!r}"
        )
    for key, reason in REFUSED.items():
        if config.get(key):
            raise ModelError(f"{directory}: config.json has {key}: {reason}")
    _check_attention(directory, config)
    check_rope(directory, config)
    if is_latent(config):
        check_latent(directory, config)
    activation = config.get("hidden_act", "silu")
    if activation not in SERVED_ACTIVATIONS:
        supported = ", ".join(SERVED_ACTIVATIONS)
        raise ModelError(f"{directory}: hidden_act {activation!r} is not served; supported: {supported}")
    positive(directory, config, "intermediate_size")
    positive_number(directory, config, "rms_norm_eps")
    return str(known[0])


def is_latent(config: dict[str, Any]) -> bool:
    """True for the families with multi-head latent attention (MLA)."""
    return config.get("model_type") in LATENT_FAMILIES


def check_rope(directory: Path, config: dict[str, Any]) -> None:
    """Raises ModelError for rope kinds whose angles depend on a request's length, and for numbers that give no angles.

    With such kinds the same prefix has other keys in a longer request, so its pages could not be shared.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind not in SERVED_ROPE:
        raise ModelError(f"{directory}: rope type {kind} is not served; supported: {', '.join(SERVED_ROPE)}")
    for section in (config, rope if isinstance(rope, dict) else {}):
        for key in ROPE_NUMBERS:
            positive_number(directory, section, key)
        for key in ROPE_SCALES:
            if section.get(key) != 0:  # 0 is none
                positive_number(directory, section, key)
        part = section.get(PARTIAL_ROPE)
        if part not in (None, 1):
            raise ModelError(f"{directory}: {PARTIAL_ROPE} {part!r} is not served; only 1 is: all of a head is rotated")


def _check_attention(directory: Path, config: dict[str, Any]) -> None:
    layers = config.get("layer_types") or []
    if not isinstance(layers, list):
        raise ModelError(f"{directory}: layer_types in config.json must be a list, found {layers!r}")
    window, longest = _window(directory, config), positive(directory, config, "max_position_embeddings")
    if window is not None and window < longest:
        raise ModelError(
            f"{directory}: sliding-window attention is not served yet (sliding_window {window} is below "
            f"max_position_embeddings {longest})"
        )
    other = sorted({str(kind) for kind in layers} - {"full_attention"})
    if other and (window is None or other != ["sliding_attention"]):
        raise ModelError(f"{directory}: layers of type {', '.join(other)} are not served yet; only full attention is")


def _window(directory: Path, config: dict[str, Any]) -> int | None:
    """The sliding window that a layer of the model attends through; None when every layer has full attention.

    What transformers' configuration classes make of config.json, said again here because importing them imports torch
    (4 s and half a gigabyte, which the inspection Job does without): an absent window is 4,096 and only null is none;
    the switch belongs to Qwen alone, where it is off unless set, and layers below max_window_layers do not slide.
    """
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise ModelError(f"{directory}: sliding_window in config.json must be a whole number or null, found {window!r}")
    switched = WINDOWED.get(str(config.get("model_type")))
    if not switched:
        return None if switched is None else window
    used = config.get("use_sliding_window", False)
    if not isinstance(used, bool):
        raise ModelError(f"{directory}: use_sliding_window in config.json must be true or false, found {used!r}")
    full = config.get("max_window_layers", DEFAULT_FULL_LAYERS)
    if isinstance(full, bool) or not isinstance(full, int):
        raise ModelError(f"{directory}: max_window_layers in config.json must be a whole number, found {full!r}")
    kinds = config.get("layer_types")
    slides = full < positive(directory, config, "num_hidden_layers") if kinds is None else "sliding_attention" in kinds
    return window if used and slides else None


def head_dim(directory: Path, config: dict[str, Any]) -> int:
    """Numbers per attention head: said outright, or the hidden size divided over the heads. Raises ModelError."""
    if config.get("head_dim") is not None:
        return positive(directory, config, "head_dim")
    hidden, heads = positive(directory, config, "hidden_size"), positive(directory, config, "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"{directory}: hidden_size {hidden} does not divide into num_attention_heads {heads}")
    return hidden // heads


def kv_heads(directory: Path, config: dict[str, Any]) -> int:
    """KV heads; all heads when the config names none. Raises ModelError."""
    heads = positive(directory, config, "num_attention_heads")
    if config.get("num_key_value_heads") is None:
        return heads
    shared = positive(directory, config, "num_key_value_heads")
    if heads % shared:
        raise ModelError(f"{directory}: num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}")
    return shared
