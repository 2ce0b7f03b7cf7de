"""What `speccache-runtime inspect` prints: facts of given models, or the table of the packaged ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from speccache_api.drafts import DRAFTS
from speccache_api.geometry import BUILTIN_NAMES, Inspection
from speccache_api.uris import builtin_name
from speccache_runtime.config import builtin_directory
from speccache_runtime.model.inspect import inspect as inspect_models


def inspect_pair(target: str, draft: str | None, algorithm: str) -> str:
    """One line of JSON for `Inspection.from_json`. Raises ConfigError or ModelError.

    Each model is a directory or a `builtin://` URI: a draft of one's own may belong to the packaged target. `algorithm`
    is the one that the draft is for.
    """
    draft_directory = None if draft is None else _directory(draft, DRAFTS[algorithm].builtin)
    return inspect_models(_directory(target, "target"), draft_directory, algorithm).to_json() + "\n"


def builtin_table() -> str:
    """The content of `speccache_api/builtin.json`. Raises ConfigError or ModelError."""
    return json.dumps({name: _entry(name) for name in BUILTIN_NAMES}, indent=2, sort_keys=True) + "\n"


def _directory(model: str, half: Literal["target", "draft"]) -> Path:
    name = builtin_name(model)
    return Path(model) if name is None else builtin_directory(name, half)


def _entry(name: str) -> dict[str, object]:
    facts: Inspection = inspect_models(builtin_directory(name, "target"), builtin_directory(name, "draft"))
    return dataclasses.asdict(facts)
