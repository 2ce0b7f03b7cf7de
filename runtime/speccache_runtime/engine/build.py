"""Makes an engine from its configuration: models, pools, tiers, draft registration.

What can be wrong with any of them stops the start here, in one clear line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from speccache_api.fingerprint import draft_digest, namespace_digest
from speccache_api.geometry import KVGeometry, ModelFacts
from speccache_runtime.cache.paired import PairedCache
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.cache.pool import KVPool, PoolShape
from speccache_runtime.cache.storage.registry import BackendConfig, open_backend
from speccache_runtime.cache.storage.store import PairStore
from speccache_runtime.cache.storage_metrics import StorageMetrics
from speccache_runtime.config import EngineConfig
from speccache_runtime.core import Output
from speccache_runtime.engine.engine import Engine
from speccache_runtime.engine.runner import Runner, Timer, untimed
from speccache_runtime.engine.warmup import warm_up
from speccache_runtime.errors import ConfigError, ModelError
from speccache_runtime.metrics import Metrics
from speccache_runtime.model.draft import Eagle3Head, eagle3_aux_layers, load_eagle3
from speccache_runtime.model.inspect import target_facts
from speccache_runtime.model.target import Target, load_target
from speccache_runtime.speculative.proposer import Eagle3Proposer
from speccache_runtime.tensors import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class Built:
    """A ready engine and what its clients must know."""

    engine: Engine
    max_context: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def build_engine(
    config: EngineConfig,
    metrics: Metrics,
    emit: Callable[[Output], None],
    wake: Callable[[], None],
    *,
    timer: Timer = untimed,
) -> Built:
    """Loads the models and opens the tiers; `timer` is told what the runner does, step by step.

    Raises ConfigError, ModelError or StorageError with one clear line.
    """
    device = _device(config)
    dtype = TORCH_DTYPES[config.kv_dtype]
    target, head = _load_models(config, device, dtype)
    shape = _shape("target", target.facts, config.target_geometry, config)
    draft_shape = None if head is None else _shape("draft", head.facts, config.draft_geometry, config)
    shapes = [shape, draft_shape] if draft_shape else [shape]
    store = _open_store(config, target.facts, head.facts if head else None, shapes, metrics)
    pages = _device_pages(config, device, sum(s.layout.page_bytes for s in shapes))
    pool = KVPool(shape, pages, device)
    cache = PairedCache(pool, host_pages=config.host_pages, answer=_missing_draft(config), metrics=metrics)
    proposer, draft_pool = None, None
    if head is not None and draft_shape is not None:
        draft_pool = KVPool(draft_shape, pages, device)
        cache.register_draft(draft_pool, lookahead=Eagle3Proposer.lookahead)
        proposer = Eagle3Proposer(head, draft_pool)
    if device.type == "cuda":
        warm_up(target, pool, draft_pool, proposer, budget=config.prefill_budget, num_steps=config.num_steps)
    cache.open(store, wake)
    runner = Runner(
        target=target,
        pool=pool,
        proposer=proposer,
        loads=cache.loads,
        rows=config.max_running,
        num_steps=config.num_steps,
        timer=timer,
    )
    engine = Engine(
        runner=runner,
        cache=cache,
        num_steps=config.num_steps,
        max_running=config.max_running,
        prefill_budget=config.prefill_budget,
        metrics=metrics,
        emit=emit,
    )
    max_context = min(target.facts.max_positions, pages * config.page_size)
    return Built(engine, max_context, target.facts.vocab_size, target.eos_token_ids)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "resources.limits asks for nvidia.com/gpu but this container sees no CUDA device; "
            "check the node's driver and device plugin, or remove the GPU limit to run on the CPU"
        )
    if config.device == "cuda":
        # cuDNN's attention makes a plan for every new length, 9 ms each, and lengths grow with every token.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(config.device)


def _load_models(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> tuple[Target, Eagle3Head | None]:
    if config.draft_path is None:
        return load_target(config.target_path, device=device, dtype=dtype, aux_layers=()), None
    aux = eagle3_aux_layers(config.draft_path, target_facts(config.target_path).geometry.layers)
    target = load_target(config.target_path, device=device, dtype=dtype, aux_layers=aux)
    return target, load_eagle3(config.draft_path, target, device=device, dtype=dtype)


def _shape(half: str, facts: ModelFacts, sized: KVGeometry | None, config: EngineConfig) -> PoolShape:
    """The pool's shape. Raises ModelError if the model keeps something else than memory was `sized` for."""
    actual = PoolShape(facts.geometry, config.page_size, config.kv_dtype)
    if facts.geometry != sized:
        expected = 0 if sized is None else PoolShape(sized, config.page_size, config.kv_dtype).layout.page_bytes
        raise ModelError(
            f"the {half} model's pages take {actual.layout.page_bytes} bytes but memory was sized for {expected} "
            f"({facts.geometry}, not {sized}): its files have changed since they were inspected, "
            "or kvGeometry in the resource is wrong"
        )
    return actual


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


def _missing_draft(config: EngineConfig) -> MissingDraft:
    return MissingDraft(config.storage.missing_draft) if config.storage else MissingDraft.RECOMPUTE


def _open_store(
    config: EngineConfig, target: ModelFacts, draft: ModelFacts | None, shapes: Sequence[PoolShape], metrics: Metrics
) -> PairStore | None:
    if config.storage is None:
        return None
    namespace = namespace_digest(target.identity, config.kv_dtype, config.page_size)
    draft_namespace = draft_digest(namespace, draft.identity, Eagle3Proposer.lookahead) if draft else None
    return PairStore(
        open_backend(BackendConfig("file", config.storage.path)),
        bytes.fromhex(namespace),
        bytes.fromhex(draft_namespace) if draft_namespace else None,
        shapes[0].layout.page_bytes,
        shapes[1].layout.page_bytes if draft else 0,
        StorageMetrics(metrics),
    )
