"""Single numbers of a config.json, checked: each error names the file's directory and the key."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from speccache_runtime.errors import ModelError


def positive(directory: Path, config: dict[str, Any], key: str) -> int:
    """A whole number above 0 from a config. Raises ModelError naming the key."""
    value = config.get(key)
    # Tensors have sizes of 64 bits; longer numbers cannot even be computed with.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 63:
        raise ModelError(f"{directory}: {key} in config.json must be a whole number above 0, found {value!r}")
    return value


def positive_number(directory: Path, config: dict[str, Any], key: str, default: float = 1.0) -> float:
    """A finite number above 0 from a config, `default` if there is none. Raises ModelError naming the key."""
    value = config.get(key)
    if value is None:
        return default
    # The upper bound also keeps out infinity and whole numbers that are too long for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < sys.float_info.max:
        raise ModelError(f"{directory}: {key} in config.json must be a number above 0, found {value!r}")
    return float(value)
