"""What `speccache-runtime inspect` prints: facts of given models, or the table of the packaged ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from speccache_api.geometry import BUILTIN_NAMES, Inspection
from speccache_runtime.config import builtin_directory
from speccache_runtime.model.inspect import inspect as inspect_models


def inspect_pair(target: Path, draft: Path | None) -> str:
    """One line of JSON for `Inspection.from_json`. Raises ModelError."""
    return inspect_models(target, draft).to_json() + "\n"


def builtin_table() -> str:
    """The content of `speccache_api/builtin.json`. Raises ConfigError or ModelError."""
    return json.dumps({name: _entry(name) for name in BUILTIN_NAMES}, indent=2, sort_keys=True) + "\n"


def _entry(name: str) -> dict[str, object]:
    facts: Inspection = inspect_models(builtin_directory(name, "target"), builtin_directory(name, "draft"))
    return dataclasses.asdict(facts)
