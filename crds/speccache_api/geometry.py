"""What must be known about a model before a pod for it can be sized: its KV shape, its weights, its identity.

The facts come from the resource itself, from the table of built-in models, or from the inspection Job, which leaves
them as the termination message of its pod. Kubernetes cuts that message at 4 KiB, hence `MAX_INSPECTION_BYTES`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

MAX_INSPECTION_BYTES = 4096
BUILTIN_NAMES = ("tiny",)


class BadInspection(ValueError):
    """The text is not an inspection result: cut off, not JSON, or with wrong fields."""


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of the KV of one token: `layers` layers that cache, each with `kv_heads` heads of `head_dim` numbers."""

    layers: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _positive(field.name, getattr(self, field.name))

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V together that one token takes in all layers."""
        return self.layers * self.kv_heads * self.head_dim * 2 * dtype_bytes


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of one model directory.

    `parameters` counts weights (a tied weight once). `identity` is a SHA-256 in hex over the configuration and the
    weights' metadata, and names the cache; `max_positions` is in tokens. Facts that a user declared instead of an
    inspection know only geometry and parameters: there `identity` is empty and the other numbers are 0 (`declared` is
    true).
    """

    geometry: KVGeometry
    parameters: int
    hidden_size: int = 0
    vocab_size: int = 0
    max_positions: int = 0
    identity: str = ""
    model_type: str = ""

    def __post_init__(self) -> None:
        for name in ("parameters", "hidden_size", "vocab_size", "max_positions"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be a whole number of 0 or more, found {value!r}")
        for name in ("identity", "model_type"):
            if type(getattr(self, name)) is not str:
                raise ValueError(f"{name} must be text, found {getattr(self, name)!r}")

    @property
    def declared(self) -> bool:
        """True when nobody has read the model's files: only geometry and parameters are known."""
        return not self.identity


@dataclass(frozen=True, slots=True)
class Inspection:
    """Facts of the target and, when there is one, of its draft."""

    target: ModelFacts
    draft: ModelFacts | None = None

    def to_json(self) -> str:
        """Canonical JSON, at most `MAX_INSPECTION_BYTES` bytes. Raises ValueError if it would be longer."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))
        if len(text.encode()) > MAX_INSPECTION_BYTES:
            raise ValueError(
                f"an inspection result must fit into {MAX_INSPECTION_BYTES} bytes, this one has {len(text)}"
            )
        return text

    @classmethod
    def from_json(cls, text: str) -> Inspection:
        """The value that `to_json` wrote. Raises BadInspection for anything else."""
        try:
            data = json.loads(text)
            draft = data["draft"]
            return cls(target=facts_from_dict(data["target"]), draft=None if draft is None else facts_from_dict(draft))
        except (ValueError, KeyError, TypeError) as error:
            raise BadInspection(f"not an inspection result: {error}") from error


def facts_from_dict(data: dict[str, Any]) -> ModelFacts:
    """ModelFacts from the form of `dataclasses.asdict`. Raises ValueError, KeyError or TypeError on a wrong shape."""
    return ModelFacts(**{**data, "geometry": KVGeometry(**data["geometry"])})


@cache
def builtin_facts(name: str) -> Inspection:
    """Facts of the packaged pair `builtin://NAME`: the target's and its draft head's. Raises KeyError if there is none.

    The table is written by `speccache-runtime inspect` from the packaged models, so the operator needs neither torch
    nor a runtime pod to size them.
    """
    table = json.loads(resources.files(__package__).joinpath("builtin.json").read_text(encoding="utf-8"))
    entry = table[name]
    return Inspection(target=facts_from_dict(entry["target"]), draft=facts_from_dict(entry["draft"]))


def _positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a whole number of 1 or more, found {value!r}")
