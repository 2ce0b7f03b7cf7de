# ruff: noqa: A005  (never imported by its bare name: the package path tells it from the standard module)
"""What a pod must know about a model before it can be sized, read from the files without torch.

Runs in the inspection Job and again when the runtime starts, so both see the same numbers and the same identity.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speccache_api.geometry import Inspection, KVGeometry, ModelFacts
from speccache_runtime.errors import ModelError
from speccache_runtime.model.draft_config import read_eagle3_config
from speccache_runtime.model.eos import eos_token_ids
from speccache_runtime.model.families import TARGET_ARCHITECTURES, check_target, head_dim, is_latent, kv_heads
from speccache_runtime.model.files import (
    CONFIG,
    FLOAT_DTYPES,
    SAFETENSORS,
    TORCH_BIN,
    TensorInfo,
    read_config,
    read_header,
    safetensors_files,
    tensor_table,
)
from speccache_runtime.model.latent_config import latent_shape, spare_layers
from speccache_runtime.model.values import positive
from speccache_runtime.model.vocabulary import check_same_tokens

LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
"""Whose tensors they are; the number is the layer's."""

SAMPLE_BYTES = 4096
"""Bytes of each tensor that enter the identity. Reading all weights would take minutes for a large model; any training
step changes nearly every number, so the first ones tell real fine-tunes apart. Someone who edits a single weight far
inside a tensor by hand is not noticed: such a model needs a changed config.json."""

EDGE_BYTES = 1 << 20
"""Bytes at both ends of a pickled checkpoint that enter the identity: only unpickling would tell where tensors lie."""


def inspect(target: Path, draft: Path | None, algorithm: str = "EAGLE3") -> Inspection:
    """Facts of a target directory and of its draft's, which is one of `algorithm`. Raises ModelError in one line that
    names the file and the fault.

    Also refuses a draft that does not fit its target, so that no pod is made for such a pair.
    """
    facts = target_facts(target)
    if draft is None:
        return Inspection(target=facts)
    return Inspection(target=facts, draft=DRAFT_READERS[algorithm](facts, target, draft))


def _read_eagle3(target: ModelFacts, target_directory: Path, directory: Path) -> ModelFacts:
    facts = draft_facts(directory)
    check_pair(target, target_directory, directory)
    return facts


def _read_standalone(target: ModelFacts, target_directory: Path, directory: Path) -> ModelFacts:
    facts = target_facts(directory)
    check_same_tokens(target, target_directory, facts, directory)
    return facts


DRAFT_READERS: dict[str, Callable[[ModelFacts, Path, Path], ModelFacts]] = {
    "EAGLE3": _read_eagle3,
    "Standalone": _read_standalone,
}
"""How a draft's directory is read, by algorithm: facts of its own, of the target's facts and directory and its own
directory. Raises ModelError if it is broken or does not fit."""


def target_facts(directory: Path) -> ModelFacts:
    """Facts of a target. Raises ModelError, also if the architecture is not served."""
    config = read_config(directory)
    architecture = check_target(directory, config)
    files = safetensors_files(directory)
    if not files:
        raise ModelError(f"{directory}: no weights found; expected {SAFETENSORS} (or its shards with an index)")
    table = tensor_table(files)
    _check_shape(directory, config, table)
    eos_token_ids(directory, config)
    if config.get("tie_word_embeddings") is True:
        table.pop("lm_head.weight", None)  # The embedding serves as both; a stored copy is not loaded.
    layers = positive(directory, config, "num_hidden_layers")
    table = {name: tensor for name, tensor in table.items() if not is_spare(name, layers)}
    return ModelFacts(
        geometry=_geometry(directory, config),
        parameters=_parameters(table),
        hidden_size=positive(directory, config, "hidden_size"),
        vocab_size=positive(directory, config, "vocab_size"),
        max_positions=positive(directory, config, "max_position_embeddings"),
        shares=_shares(directory, config),
        identity=_identity(directory, files),
        model_type=TARGET_ARCHITECTURES[architecture],
    )


def draft_facts(directory: Path) -> ModelFacts:
    """Facts of an EAGLE-3 head. `vocab_size` is the target's vocabulary as the head knows it. Raises ModelError."""
    config = read_eagle3_config(directory)
    files = safetensors_files(directory)
    pickled = directory / TORCH_BIN
    if files:
        parameters, identity = _parameters(tensor_table(files)), _identity(directory, files)
    elif pickled.is_file():
        # At least two bytes per weight, so this is never too few; float32 files count double and get spare memory.
        parameters, identity = pickled.stat().st_size // 2, _pickle_identity(directory, pickled)
    else:
        raise ModelError(f"{directory}: no weights found; expected {SAFETENSORS} or {TORCH_BIN}")
    return ModelFacts(
        geometry=_described(directory, KVGeometry.heads, 1, config.kv_heads, config.head_dim),
        parameters=parameters,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        shares=math.gcd(config.heads, config.intermediate_size, config.target_hidden_size),
        identity=identity,
        model_type="eagle3",
    )


def check_pair(target: ModelFacts, target_directory: Path, draft_directory: Path) -> None:
    """Raises ModelError, with both numbers, if the head was made for a target of another shape."""
    config = read_eagle3_config(draft_directory)
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise ModelError(
                f"draft {draft_directory} does not fit target {target_directory}: the draft's {name} is {ours}, "
                f"the target has {theirs}"
            )
    if config.draft_vocab_size > target.vocab_size:
        raise ModelError(
            f"draft {draft_directory} does not fit target {target_directory}: draft_vocab_size "
            f"{config.draft_vocab_size} is larger than the target's vocabulary of {target.vocab_size}"
        )
    config.resolve_aux_layers(target.geometry.layers)


def is_spare(name: str, layers: int) -> bool:
    """True for a tensor of a layer behind the last of `layers`: it predicts further tokens, and is not loaded."""
    found = LAYER.match(name)
    return found is not None and int(found[1]) >= layers


def _geometry(directory: Path, config: dict[str, Any]) -> KVGeometry:
    layers = positive(directory, config, "num_hidden_layers")
    if is_latent(config):
        shape = latent_shape(directory, config)
        return _described(directory, KVGeometry.latent, layers, shape.rank, shape.rope_dim)
    return _described(directory, KVGeometry.heads, layers, kv_heads(directory, config), head_dim(directory, config))


def _described(directory: Path, form: Callable[[int, int, int], KVGeometry], *numbers: int) -> KVGeometry:
    try:
        return form(*numbers)
    except ValueError as error:
        raise ModelError(f"{directory}: config.json describes KV that cannot be kept: {error}") from error


def _check_shape(directory: Path, config: dict[str, Any], table: dict[str, TensorInfo]) -> None:
    """Raises ModelError if config.json describes a model of another size than the weights.

    Loading compares every tensor, but only after a pod was sized for the model and its modules were built.
    """
    layers = positive(directory, config, "num_hidden_layers")
    held = max((int(found[1]) + 1 for name in table if (found := LAYER.match(name))), default=0)
    if not layers <= held <= layers + spare_layers(directory, config):
        raise ModelError(
            f"{directory}: num_hidden_layers in config.json is {layers}, but the weights hold {held} layers"
        )
    hidden = positive(directory, config, "hidden_size")
    expected = {"embed_tokens": (positive(directory, config, "vocab_size"), hidden)}
    expected |= {f"layers.0.self_attn.{name}": size for name, size in _attention_shapes(directory, config).items()}
    if not is_latent(config) or config["first_k_dense_replace"]:
        expected["layers.0.mlp.gate_proj"] = (positive(directory, config, "intermediate_size"), hidden)
    for name, size in expected.items():
        tensor = table.get(f"model.{name}.weight")
        if tensor is not None and tensor.shape != size:
            raise ModelError(
                f"{directory}: tensor {tensor.name} has shape {list(tensor.shape)}, the config says {list(size)}"
            )


def _shares(directory: Path, config: dict[str, Any]) -> int:
    """Heads and the inner sizes of MLP and experts must divide over ranks. K and V with other activations run as
    transformers' modules, which are not split.
    """
    divided = ["num_attention_heads", "intermediate_size"]
    if is_latent(config):
        divided.append("moe_intermediate_size")
    elif config.get("hidden_act", "silu") not in ("silu", "swish"):
        return 1
    return math.gcd(*(positive(directory, config, key) for key in divided))


def _attention_shapes(directory: Path, config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Shapes of the projections whose sizes the KV has."""
    hidden = positive(directory, config, "hidden_size")
    if is_latent(config):
        latent = latent_shape(directory, config)
        return {
            "kv_a_proj_with_mqa": (latent.rank + latent.rope_dim, hidden),
            "kv_b_proj": (latent.heads * (latent.nope_dim + latent.value_dim), latent.rank),
        }
    size = head_dim(directory, config)
    return {
        "q_proj": (positive(directory, config, "num_attention_heads") * size, hidden),
        "k_proj": (kv_heads(directory, config) * size, hidden),
    }


def _parameters(table: dict[str, TensorInfo]) -> int:
    """Weights in the files. Masks and id tables are not weights."""
    return sum(math.prod(tensor.shape) for tensor in table.values() if tensor.dtype in FLOAT_DTYPES)


def _identity(directory: Path, files: tuple[Path, ...]) -> str:
    """SHA-256 over config.json, every file's header and the first `SAMPLE_BYTES` of every tensor."""
    digest = hashlib.sha256(_framed((directory / CONFIG).read_bytes()))
    for file in files:
        header = read_header(file)
        digest.update(_framed(header.raw))
        with file.open("rb") as stream:
            for tensor in header.tensors:
                stream.seek(tensor.begin)
                digest.update(_framed(stream.read(min(SAMPLE_BYTES, tensor.end - tensor.begin))))
    return digest.hexdigest()


def _pickle_identity(directory: Path, file: Path) -> str:
    """SHA-256 over config.json, the file's size and its first and last `EDGE_BYTES`."""
    size = file.stat().st_size
    digest = hashlib.sha256(_framed((directory / CONFIG).read_bytes()))
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        digest.update(_framed(stream.read(EDGE_BYTES)))
        stream.seek(max(0, size - EDGE_BYTES))
        digest.update(_framed(stream.read(EDGE_BYTES)))
    return digest.hexdigest()


def _framed(data: bytes) -> bytes:
    """Length first, so that bytes cannot move from one part to the next without changing the digest."""
    return len(data).to_bytes(8, "little") + data
