"""How the draft of each algorithm is made: by the names of `speccache_api.drafts.DRAFTS`, which say what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from speccache_api.drafts import Draft
from speccache_api.geometry import ModelFacts
from speccache_runtime.cache.pool import KVPool
from speccache_runtime.model.draft import eagle3_aux_layers, load_eagle3
from speccache_runtime.model.standalone import load_standalone
from speccache_runtime.model.target import Target
from speccache_runtime.speculative.eagle3 import Eagle3Proposer
from speccache_runtime.speculative.ngram import PromptLookup
from speccache_runtime.speculative.proposer import Proposer
from speccache_runtime.speculative.standalone import StandaloneProposer


class DraftModel(Protocol):
    """A loaded draft."""

    @property
    def facts(self) -> ModelFacts: ...


class Load(Protocol):
    """Loads a draft for a loaded target. Raises ModelError when it is broken or does not fit the target."""

    def __call__(self, path: Path, target: Target, *, device: torch.device, dtype: torch.dtype) -> Any: ...


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A draft with a model. `aux_layers` are the target's layers whose features it needs, of a draft's directory and
    the number of the target's layers; `proposer` is made of the loaded model and its pool."""

    aux_layers: Callable[[Path, int], tuple[int, ...]]
    load: Load
    proposer: Callable[[Any, KVPool], Proposer]


@dataclass(frozen=True, slots=True)
class HostKind:
    """A draft that proposes integers without the device; `lookup` makes one for each request."""

    lookup: Callable[[], PromptLookup]


@dataclass(frozen=True, slots=True)
class ReadyDraft:
    """A draft with all that it takes to propose: a proposer and its pool, or the maker of lookups."""

    facts: Draft
    pool: KVPool | None = None
    proposer: Proposer | None = None
    lookup: Callable[[], PromptLookup] | None = None


def _no_aux_layers(path: Path, target_layers: int) -> tuple[int, ...]:
    return ()


KINDS: dict[str, DeviceKind | HostKind] = {
    "EAGLE3": DeviceKind(eagle3_aux_layers, load_eagle3, Eagle3Proposer),
    "Standalone": DeviceKind(_no_aux_layers, load_standalone, StandaloneProposer),
    "NGram": HostKind(PromptLookup),
}
