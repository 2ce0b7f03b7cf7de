"""Which model families are served, and what in a config.json cannot be served yet.

Pure checks over the parsed config.json, so that the inspection Job refuses a model before a pod is made for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccache_runtime.errors import ModelError

TARGET_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Dense decoders with full attention, and the model_type of each."""

SERVED_ROPE = ("default", "linear", "llama3", "yarn")

REFUSED = {
    "quantization_config": "quantised weights are not served yet",
    "attn_logit_softcapping": "attention soft-capping is not served",
    "final_logit_softcapping": "logit soft-capping is not served",
}


def check_target(directory: Path, config: dict[str, Any]) -> str:
    """The architecture of a target's config.json. Raises ModelError if it cannot be served, naming what can."""
    found = config.get("architectures")
    names = found if isinstance(found, list) else []
    known = [name for name in names if name in TARGET_ARCHITECTURES]
    if not known:
        shown = ", ".join(map(str, names)) or "none"
        supported = ", ".join(TARGET_ARCHITECTURES)
        raise ModelError(f"{directory}: architecture {shown} is not served; supported: {supported}")
    for key, reason in REFUSED.items():
        if config.get(key):
            raise ModelError(f"{directory}: config.json has {key}: {reason}")
    _check_attention(directory, config)
    check_rope(directory, config)
    return str(known[0])


def check_rope(directory: Path, config: dict[str, Any]) -> None:
    """Raises ModelError for rope kinds whose angles depend on a request's length.

    With them the same prefix has other keys in a longer request, so its pages could not be shared.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind not in SERVED_ROPE:
        raise ModelError(f"{directory}: rope type {kind} is not served; supported: {', '.join(SERVED_ROPE)}")


def _check_attention(directory: Path, config: dict[str, Any]) -> None:
    window = config.get("sliding_window")
    longest = positive(directory, config, "max_position_embeddings")
    # Qwen2 and Qwen3 write a window that `use_sliding_window: false` switches off; Mistral has no such switch.
    used = config.get("use_sliding_window", config.get("model_type") == "mistral")
    if window is not None and used and int(window) < longest:
        raise ModelError(
            f"{directory}: sliding-window attention is not served yet (sliding_window {window} is below "
            f"max_position_embeddings {longest})"
        )
    layers = config.get("layer_types") or []
    other = sorted({str(kind) for kind in layers} - {"full_attention"})
    if other and (window is None or int(window) < longest or other != ["sliding_attention"]):
        raise ModelError(f"{directory}: layers of type {', '.join(other)} are not served yet; only full attention is")


def positive(directory: Path, config: dict[str, Any], key: str) -> int:
    """A whole number above 0 from a config. Raises ModelError naming the key."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{directory}: {key} in config.json must be a whole number above 0, found {value!r}")
    return value


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
