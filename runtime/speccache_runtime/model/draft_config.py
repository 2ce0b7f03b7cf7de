"""Reads the config.json of an EAGLE-3 head, in the three forms that are in use, into one.

* SafeAILab: a Llama config with one layer and `draft_vocab_size`; no layer ids, so the paper's layers are taken.
* SpecForge: the same, with `eagle_config.eagle_aux_hidden_state_layer_ids`: each id names a layer's *output*.
* speculators: `speculators_model_type` and `transformer_layer_config`; its ids name a layer's *input*, which is the
  output of the layer before. Taking one for the other loads without any error and costs accept length, so the two
  conventions meet here and nowhere else: everything after this module counts outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccache_runtime.errors import ModelError
from speccache_runtime.model.families import check_rope, head_dim, kv_heads
from speccache_runtime.model.files import read_config
from speccache_runtime.model.values import positive, positive_number


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head in one form. `aux_layers` are layer outputs, None where the paper's default applies.

    `layer` is the head's transformer layer as a plain config dictionary (rope, biases). `norm_before_residual`: the
    residual stream starts from the normed feature. `norm_output`: the head's output is normed before it is fed back.
    """

    directory: Path
    layer: dict[str, Any]
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    vocab_size: int
    draft_vocab_size: int
    max_positions: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_output: bool

    def resolve_aux_layers(self, target_layers: int) -> tuple[int, ...]:
        """Layers of a target with `target_layers` layers whose outputs are the features. Raises ModelError."""
        # The paper takes the inputs of layers 2, N/2 and N-3.
        found = self.aux_layers or (1, target_layers // 2 - 1, target_layers - 4)
        if any(not 0 <= layer < target_layers for layer in found):
            raise ModelError(
                f"{self.directory}: the draft head wants features of layers {list(found)} (outputs, from 0), "
                f"but the target has {target_layers} layers"
            )
        return found


def read_eagle3_config(directory: Path) -> Eagle3Config:
    """The head's configuration. Raises ModelError if it is missing, broken or describes something else."""
    config = read_config(directory)
    if "speculators_model_type" in config:
        return _speculators(directory, config)
    ids = _section(directory, config, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
    return _build(directory, config, config, _ids(directory, ids, shift=0))


def _speculators(directory: Path, config: dict[str, Any]) -> Eagle3Config:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise ModelError(f"{directory}: speculators_model_type {kind!r} is not served; supported: eagle3")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ModelError(f"{directory}: transformer_layer_config is missing in config.json")
    ids = _ids(directory, config.get("eagle_aux_hidden_state_layer_ids"), shift=-1)
    return _build(directory, config, layer, ids)


def _build(
    directory: Path, config: dict[str, Any], layer: dict[str, Any], aux_layers: tuple[int, ...] | None
) -> Eagle3Config:
    if config.get("quantization_config") or layer.get("quantization_config"):
        raise ModelError(f"{directory}: quantised draft heads are not served yet")
    if layer.get("num_hidden_layers", 1) != 1:
        raise ModelError(
            f"{directory}: an EAGLE-3 head has 1 layer, config.json says num_hidden_layers {layer['num_hidden_layers']}"
        )
    if layer.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{directory}: hidden_act {layer['hidden_act']!r} is not served; supported: silu")
    check_rope(directory, layer)
    hidden, vocab = positive(directory, layer, "hidden_size"), positive(directory, layer, "vocab_size")
    config = {"draft_vocab_size": vocab, "target_hidden_size": hidden} | {
        k: v for k, v in config.items() if v is not None
    }
    return Eagle3Config(
        directory=directory,
        layer=layer,
        hidden_size=hidden,
        heads=positive(directory, layer, "num_attention_heads"),
        kv_heads=kv_heads(directory, layer),
        head_dim=head_dim(directory, layer),
        intermediate_size=positive(directory, layer, "intermediate_size"),
        eps=positive_number(directory, layer, "rms_norm_eps", default=1e-6),
        vocab_size=vocab,
        draft_vocab_size=positive(directory, config, "draft_vocab_size"),
        max_positions=positive(directory, {"max_position_embeddings": 2048} | layer, "max_position_embeddings"),
        target_hidden_size=positive(directory, config, "target_hidden_size"),
        aux_layers=aux_layers,
        norm_before_residual=_flag(directory, config, "norm_before_residual"),
        norm_output=_flag(directory, config, "norm_output"),
    )


def _ids(directory: Path, ids: object, *, shift: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
        raise ModelError(
            f"{directory}: eagle_aux_hidden_state_layer_ids must be a list of layer numbers, found {ids!r}"
        )
    return tuple(layer + shift for layer in ids)


def _section(directory: Path, config: dict[str, Any], key: str) -> dict[str, Any]:
    section = config.get(key) or {}
    if not isinstance(section, dict):
        raise ModelError(f"{directory}: {key} in config.json must be an object")
    return section


def _flag(directory: Path, config: dict[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ModelError(f"{directory}: {key} in config.json must be true or false, found {value!r}")
    return value
