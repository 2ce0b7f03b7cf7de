"""What must be known about a model before a pod for it can be sized: its KV shape, its weights, its identity.

The facts come from the resource itself, from the table of built-in models, or from the inspection Job, which leaves
them as the termination message of its pod. Kubernetes cuts that message at 4 KiB, hence `MAX_INSPECTION_BYTES`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

MAX_INSPECTION_BYTES = 4096
BUILTIN_NAMES = ("tiny",)

KVDtype = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[KVDtype, int] = {"float32": 4, "bfloat16": 2}

MAX_BUFFERS = 8
MAX_DIMENSIONS = 3
MAX_SIZE = 1 << 20
"""Of one dimension, and of the layers. A description comes from a pod or a file: nothing in it may be endless."""

_BUFFER_NAME = re.compile(r"[a-z][a-z_]{0,15}")
_CLOSED = ConfigDict(extra="forbid", strict=True)
"""For the wire document, which holds these values as they are."""


class BadInspection(ValueError):
    """The text is not an inspection result: cut off, not JSON, or with wrong fields."""


@dataclass(frozen=True, slots=True)
class KVBuffer:
    """What one layer keeps of one token under one name: numbers of shape `shape`, in `dtype` or, with None, in the KV
    dtype that the resource says.
    """

    name: str
    shape: tuple[int, ...]
    dtype: KVDtype | None = None
    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    def __post_init__(self) -> None:
        if type(self.name) is not str or not _BUFFER_NAME.fullmatch(self.name):
            raise ValueError(f"a buffer's name must match {_BUFFER_NAME.pattern}, found {self.name!r}")
        if type(self.shape) is not tuple or not 1 <= len(self.shape) <= MAX_DIMENSIONS:
            raise ValueError(f"{self.name}: shape must have 1 to {MAX_DIMENSIONS} dimensions, found {self.shape!r}")
        for size in self.shape:
            _counted(f"{self.name}: shape", size, MAX_SIZE)
        if self.dtype is not None and self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: dtype must be one of {', '.join(DTYPE_BYTES)}, found {self.dtype!r}")

    def bytes_per_token(self, kv_dtype: KVDtype) -> int:
        """Bytes of one token in one layer."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype or kv_dtype]

    def share(self, ranks: int) -> KVBuffer:
        """What each of `ranks` tensor-parallel ranks holds if heads are its first dimension: its share of them, or one,
        repeated, when there are fewer heads than ranks. Raises ValueError when they do not divide.
        """
        heads, *rest = self.shape
        if heads % ranks and ranks % heads:
            raise ValueError(f"{heads} KV heads cannot be shared evenly by {ranks} ranks")
        return replace(self, shape=(max(1, heads // ranks), *rest))


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The KV of one token: each of `layers` layers keeps `buffers`, in this order in every tier.

    `shared` says what tensor-parallel ranks have of it. True: every rank computes and needs the whole, so that one copy
    on the host and one in storage serve all of them. False: the first dimension of every buffer is KV heads, and each
    rank keeps its own share of them in every tier.

    The one description of a layout. Sizes, the wire document, pools and host pages follow from it and never ask what
    kind of attention it belongs to; only the attention that wrote it knows its buffers by name.
    """

    layers: int
    buffers: tuple[KVBuffer, ...]
    shared: bool = False
    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    def __post_init__(self) -> None:
        _counted("layers", self.layers, MAX_SIZE)
        if type(self.shared) is not bool:
            raise ValueError(f"shared must be true or false, found {self.shared!r}")
        if type(self.buffers) is not tuple or not 1 <= len(self.buffers) <= MAX_BUFFERS:
            raise ValueError(f"buffers must be a list of 1 to {MAX_BUFFERS}, found {self.buffers!r}")
        if len({buffer.name for buffer in self.buffers}) < len(self.buffers):
            raise ValueError("two buffers have the same name")

    @classmethod
    def heads(cls, layers: int, kv_heads: int, head_dim: int) -> KVGeometry:
        """Multi-head or grouped-query attention: K and V of `kv_heads` heads with `head_dim` numbers each."""
        return cls(layers, (KVBuffer("k", (kv_heads, head_dim)), KVBuffer("v", (kv_heads, head_dim))))

    @classmethod
    def latent(cls, layers: int, rank: int, rope_dim: int) -> KVGeometry:
        """Multi-head latent attention (MLA): one latent of `rank` numbers and one rotated key of `rope_dim`, which all
        heads share, so every rank needs the whole of them.
        """
        return cls(layers, (KVBuffer("latent", (rank,)), KVBuffer("rope", (rope_dim,))), shared=True)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KVGeometry:
        """The value of which `data` is the `dataclasses.asdict`. Raises ValueError, KeyError or TypeError."""
        buffers = [KVBuffer(**{**buffer, "shape": tuple(buffer["shape"])}) for buffer in data["buffers"]]
        return cls(**{**data, "buffers": tuple(buffers)})

    def __str__(self) -> str:
        parts = " + ".join(f"{buffer.name} {'x'.join(map(str, buffer.shape))}" for buffer in self.buffers)
        return f"{self.layers} layers of {parts}"

    def for_rank(self, ranks: int) -> KVGeometry:
        """What each of `ranks` tensor-parallel ranks holds of it. Raises ValueError when the heads do not divide."""
        if self.shared or ranks == 1:
            return self
        return replace(self, buffers=tuple(buffer.share(ranks) for buffer in self.buffers))

    def shard(self, rank: int, ranks: int) -> str:
        """Which part of it rank `rank` of `ranks` keeps, as storage names it (`speccache_api.fingerprint`)."""
        return "0of1" if self.shared else f"{rank}of{ranks}"

    def bytes_per_token(self, kv_dtype: KVDtype) -> int:
        """Bytes of one token in all layers, on a rank that holds just this."""
        return self.layers * sum(buffer.bytes_per_token(kv_dtype) for buffer in self.buffers)

    def pod_bytes_per_token(self, kv_dtype: KVDtype, ranks: int) -> int:
        """Bytes of one token in the host tier of a pod of `ranks` ranks: what they share is there once.

        Raises ValueError when the heads do not divide.
        """
        return self.for_rank(ranks).bytes_per_token(kv_dtype) * (1 if self.shared else ranks)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of one model directory.

    `parameters` counts weights (a tied weight once). `identity` is a SHA-256 in hex over the configuration and the
    weights' metadata, and names the cache; `max_positions` is in tokens. `shares` is a number of equal parts that the
    model can be cut into for tensor-parallel ranks: any divisor of it will do, and 1 is not at all. Facts that a user
    declared instead of an inspection know only geometry and parameters: there `identity` is empty and the other numbers
    are 0 (`declared` is true).
    """

    geometry: KVGeometry
    parameters: int
    hidden_size: int = 0
    vocab_size: int = 0
    max_positions: int = 0
    identity: str = ""
    model_type: str = ""
    shares: int = 0

    def __post_init__(self) -> None:
        for name in ("parameters", "hidden_size", "vocab_size", "max_positions", "shares"):
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
    return ModelFacts(**{**data, "geometry": KVGeometry.from_dict(data["geometry"])})


@cache
def builtin_facts(name: str) -> Inspection:
    """Facts of the packaged pair `builtin://NAME`: the target's and its draft head's. Raises KeyError if there is none.

    The table is written by `speccache-runtime inspect` from the packaged models, so the operator needs neither torch
    nor a runtime pod to size them.
    """
    table = json.loads(resources.files(__package__).joinpath("builtin.json").read_text(encoding="utf-8"))
    entry = table[name]
    return Inspection(target=facts_from_dict(entry["target"]), draft=facts_from_dict(entry["draft"]))


def _counted(name: str, value: object, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name} must be a whole number from 1 to {most}, found {value!r}")
