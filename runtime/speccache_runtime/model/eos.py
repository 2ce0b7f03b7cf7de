"""Which tokens end a text, as a model directory says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccache_runtime.errors import ModelError
from speccache_runtime.model.files import CONFIG, read_json
from speccache_runtime.model.values import positive

GENERATION_CONFIG = "generation_config.json"


def eos_token_ids(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    """Tokens that end a text: generation_config.json's, else config.json's; empty if neither names one.

    Raises ModelError for what is no token of the vocabulary: the text would never end.
    """
    vocab = positive(directory, config, "vocab_size")
    used = _ids(directory, CONFIG, config, vocab)
    generation = directory / GENERATION_CONFIG
    if generation.is_file():
        used = _ids(directory, GENERATION_CONFIG, read_json(generation), vocab) or used
    return used


def _ids(directory: Path, file: str, config: dict[str, Any], vocab: int) -> frozenset[int]:
    found = config.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int and 0 <= token < vocab for token in ids):
        raise ModelError(
            f"{directory}: eos_token_id in {file} must be a token or a list of tokens from 0 to {vocab - 1}, "
            f"found {found!r}"
        )
    return frozenset(ids)
