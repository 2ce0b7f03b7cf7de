"""A target's config.json as transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from transformers import AutoConfig, PreTrainedConfig

from speccache_runtime.errors import ModelError
from speccache_runtime.model.files import reason


def read_hf_config(directory: Path) -> PreTrainedConfig:
    """The configuration. Raises ModelError for a field that transformers refuses."""
    try:
        return cast(PreTrainedConfig, AutoConfig.from_pretrained(directory, local_files_only=True))
    # Its checks of single fields raise errors of several libraries, which have no common base.
    except Exception as error:
        raise ModelError(f"{directory}: config.json describes no model that can be built: {reason(error)}") from error
