"""One rank's own parts: its share of the models, its pools, its storage. The same code on every rank.

What can be wrong with any of them stops the start here, in one clear line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from speccache_api.drafts import DRAFTS, Algorithm
from speccache_api.fingerprint import draft_namespace, fingerprint, target_namespace
from speccache_api.geometry import KVGeometry, ModelFacts
from speccache_runtime.cache.loads import Loads
from speccache_runtime.cache.pool import KVPool, PoolShape
from speccache_runtime.cache.storage.capacity.keeper import Keeper
from speccache_runtime.cache.storage.codec import HEADER_SIZE
from speccache_runtime.cache.storage.registry import open_backend
from speccache_runtime.cache.storage.store import PairStore
from speccache_runtime.cache.storage_metrics import StorageMetrics
from speccache_runtime.config import EngineConfig, StorageConfig
from speccache_runtime.engine.runner import Runner, Timer, untimed
from speccache_runtime.errors import ConfigError, ModelError
from speccache_runtime.metrics import Metrics
from speccache_runtime.model.collective import Collective
from speccache_runtime.model.inspect import target_facts
from speccache_runtime.model.target import Target, load_target
from speccache_runtime.speculative.kinds import KINDS, DeviceKind, DraftModel, HostKind, ReadyDraft
from speccache_runtime.speculative.proposer import Proposer
from speccache_runtime.tensors import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class Stores:
    """Opens stores of the halves that one rank keeps in storage, and knows all that is the same in any storage. A half
    that is not kept has no namespace and 0 bytes."""

    fingerprint: str
    target_namespace: bytes | None
    draft_namespace: bytes | None
    target_bytes: int
    draft_bytes: int
    sweeps: bool
    """Whether this rank keeps storage at its size: one of the replica's."""
    metrics: Metrics

    @property
    def pair_bytes(self) -> int:
        """What one page takes in storage, both halves with their headers."""
        halves = [size for size in (self.target_bytes, self.draft_bytes) if size]
        return sum(HEADER_SIZE + size for size in halves)

    def open(self, storage: StorageConfig) -> PairStore:
        """Opens and probes it. Raises StorageError in one line with the remedy."""
        backend = open_backend(storage.target)
        observer = StorageMetrics(self.metrics)
        return PairStore(
            backend,
            self.fingerprint,
            self.target_namespace,
            self.draft_namespace,
            self.target_bytes,
            self.draft_bytes,
            observer,
            keeper=Keeper(backend, self.fingerprint, storage.capacity_bytes, observer, sweeps=self.sweeps),
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """What one rank computes with. `draft` is None without speculation, `store` without storage; `stores` opens
    another, and is None where this rank keeps nothing in storage."""

    target: Target
    pool: KVPool
    draft: ReadyDraft | None
    store: PairStore | None
    stores: Stores | None

    @property
    def draft_pool(self) -> KVPool | None:
        """The draft's pages; None where it keeps no KV."""
        return self.draft.pool if self.draft else None

    @property
    def proposer(self) -> Proposer | None:
        """What proposes on the device, if something does."""
        return self.draft.proposer if self.draft else None

    def runner(self, loads: Loads, *, rows: int, num_steps: int, timer: Timer = untimed) -> Runner:
        """A runner over these parts, as `Runner` describes it."""
        return Runner(
            target=self.target,
            pool=self.pool,
            proposer=self.proposer,
            loads=loads,
            rows=rows,
            num_steps=num_steps,
            timer=timer,
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """One rank's models and storage, before its pools. `most_pages` is what it has room for."""

    algorithm: Algorithm
    target: Target
    model: DraftModel | None
    shape: PoolShape
    draft_shape: PoolShape | None
    store: PairStore | None
    stores: Stores | None
    device: torch.device
    most_pages: int

    def with_pools(self, pages: int) -> Parts:
        """The whole, with pools of `pages` pages: the same number on every rank."""
        draft_pool = KVPool(self.draft_shape, pages, self.device) if self.draft_shape else None
        draft = _ready_draft(self.algorithm, self.model, draft_pool)
        return Parts(self.target, KVPool(self.shape, pages, self.device), draft, self.store, self.stores)


def load(config: EngineConfig, ranks: Collective, metrics: Metrics) -> Loaded:
    """Loads this rank's part of the models and opens its storage. Needs no other rank: some disks are slower.

    Raises ConfigError, ModelError or StorageError with one clear line.
    """
    device = device_of(config, ranks.rank)
    target, model = _load_models(config, ranks, device)
    shape = _shape("target", target.facts, config.target_geometry, config)
    draft_shape = None if model is None else _shape("draft", model.facts, config.draft_geometry, config)
    shapes = [shape, draft_shape] if draft_shape else [shape]
    stores = _stores(config, ranks, target.facts, model.facts if model else None, shapes, metrics)
    store = stores.open(config.storage) if stores is not None and config.storage is not None else None
    pages = _device_pages(config, device, sum(s.layout.page_bytes for s in shapes))
    return Loaded(config.algorithm, target, model, shape, draft_shape, store, stores, device, pages)


def device_of(config: EngineConfig, rank: int) -> torch.device:
    """Where this rank computes. Raises ConfigError when the container lacks the device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "resources.limits asks for nvidia.com/gpu but this container sees no CUDA device; "
            "check the node's driver and device plugin, or remove the GPU limit to run on the CPU"
        )
    if config.device == "cuda":
        # cuDNN's attention makes a plan for every new length, 9 ms each, and lengths grow with every token.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if torch.cuda.device_count() <= rank:
            raise ConfigError(
                f"parallelism.tensor is {config.tensor} but this container sees {torch.cuda.device_count()} GPUs; "
                "ask for as many in resources.limits"
            )
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    return torch.device(config.device)


def _load_models(config: EngineConfig, ranks: Collective, device: torch.device) -> tuple[Target, DraftModel | None]:
    dtype, kind = TORCH_DTYPES[config.kv_dtype], KINDS.get(config.algorithm)
    if config.draft_path is None or not isinstance(kind, DeviceKind):
        return load_target(config.target_path, device=device, dtype=dtype, aux_layers=(), ranks=ranks), None
    aux = kind.aux_layers(config.draft_path, target_facts(config.target_path).geometry.layers)
    target = load_target(config.target_path, device=device, dtype=dtype, aux_layers=aux, ranks=ranks)
    return target, kind.load(config.draft_path, target, device=device, dtype=dtype)


def _ready_draft(algorithm: Algorithm, model: DraftModel | None, pool: KVPool | None) -> ReadyDraft | None:
    kind = KINDS.get(algorithm)
    if kind is None:
        return None
    facts = DRAFTS[algorithm]
    if isinstance(kind, HostKind):
        return ReadyDraft(facts, lookup=kind.lookup)
    assert pool is not None, "the settings have a draft model and its geometry together"
    return ReadyDraft(facts, pool, kind.proposer(model, pool))


def _shape(half: str, facts: ModelFacts, sized: KVGeometry | None, config: EngineConfig) -> PoolShape:
    """The shape of this rank's pool. Raises ModelError if the model keeps what memory was not `sized` for."""
    actual = PoolShape(facts.geometry, config.page_size, config.kv_dtype)
    if facts.geometry != sized:
        expected = 0 if sized is None else PoolShape(sized, config.page_size, config.kv_dtype).layout.page_bytes
        raise ModelError(
            f"the {half} model's pages take {actual.layout.page_bytes} bytes but memory was sized for {expected} "
            f"({facts.geometry}, not {sized}): its files have changed since they were inspected, "
            "or kvGeometry in the resource is wrong"
        )
    return PoolShape(facts.geometry.for_rank(config.tensor), config.page_size, config.kv_dtype)


def _device_pages(config: EngineConfig, device: torch.device, pair_bytes: int) -> int:
    if config.device_pages is not None:
        return config.device_pages
    assert config.device_memory_fraction is not None
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * config.device_memory_fraction) - (total - free)
    pages = budget // pair_bytes
    if pages < 1:
        raise ConfigError(
            f"kvCache.device.memoryFraction {config.device_memory_fraction} of {total} bytes leaves no room for pages "
            f"beside the weights ({total - free} bytes are in use); raise it or use a larger GPU"
        )
    return pages


def _stores(
    config: EngineConfig,
    ranks: Collective,
    target: ModelFacts,
    draft: ModelFacts | None,
    shapes: Sequence[PoolShape],
    metrics: Metrics,
) -> Stores | None:
    """Opens stores of the halves that this rank keeps in storage: its own, and on rank 0 those that ranks share. None
    if there are no such halves."""
    kept = [shape.layout.page_bytes if ranks.rank == 0 or not shape.geometry.shared else 0 for shape in shapes]
    if not any(kept):
        return None
    target_bytes, draft_bytes = kept if draft else (*kept, 0)
    digest = fingerprint(target.identity, config.kv_dtype, config.page_size)
    targets = target_namespace(digest, target.geometry.shard(ranks.rank, ranks.size))
    drafts = None
    if draft is not None and draft_bytes:
        shard = draft.geometry.shard(ranks.rank, ranks.size)
        drafts = draft_namespace(digest, shard, draft.identity, DRAFTS[config.algorithm].lookahead)
    return Stores(
        digest,
        bytes.fromhex(targets) if target_bytes else None,
        bytes.fromhex(drafts) if drafts else None,
        target_bytes,
        draft_bytes,
        sweeps=ranks.rank == 0,
        metrics=metrics,
    )
