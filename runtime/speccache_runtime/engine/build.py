"""Makes an engine from its configuration: this rank's parts, the other ranks, the tiers, the engine over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from speccache_runtime.cache.paired import PairedCache
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.config import EngineConfig
from speccache_runtime.core import Limits, Output
from speccache_runtime.engine.engine import Engine
from speccache_runtime.engine.parallel.leader import LeadRunner, Ranks
from speccache_runtime.engine.parts import Parts, Stores, load
from speccache_runtime.engine.runner import Timer, untimed
from speccache_runtime.engine.warmup import warm_up
from speccache_runtime.metrics import Metrics
from speccache_runtime.model.collective import ALONE


@dataclass(frozen=True, slots=True)
class Built:
    """A ready engine and what its clients must know; `stores` opens another storage for it. `close` ends the tiers and
    the other ranks."""

    engine: Engine
    limits: Limits
    ranks: Ranks | None
    stores: Stores

    def close(self) -> None:
        """Frees everything; the engine must not be used afterwards."""
        self.engine.cache.close()
        if self.ranks is not None:
            self.ranks.close()


def build_engine(
    config: EngineConfig,
    metrics: Metrics,
    emit: Callable[[Output], None],
    wake: Callable[[], None],
    *,
    timer: Timer = untimed,
) -> Built:
    """Loads the models and opens the tiers; `timer` is told what the runner does, step by step.

    Raises ConfigError, ModelError, StorageError or RankError with one clear line.
    """
    if config.tensor == 1:
        loaded = load(config, ALONE, metrics)
        return _assemble(config, loaded.with_pools(loaded.most_pages), None, metrics, emit, wake, timer)
    ranks = Ranks(config, wake)
    try:
        loaded = load(config, ranks.join(config), metrics)
        parts = loaded.with_pools(ranks.agree_on_pages(loaded.most_pages))
        return _assemble(config, parts, ranks, metrics, emit, wake, timer)
    except BaseException:
        ranks.close()
        raise


def _assemble(
    config: EngineConfig,
    parts: Parts,
    ranks: Ranks | None,
    metrics: Metrics,
    emit: Callable[[Output], None],
    wake: Callable[[], None],
    timer: Timer,
) -> Built:
    cache = PairedCache(parts.pool, host_pages=config.host_pages, answer=_missing_draft(config), metrics=metrics)
    draft = parts.draft
    if draft is not None and draft.pool is not None:
        cache.register_draft(draft.pool, draft.facts)
    if parts.pool.device.type == "cuda":
        warm_up(parts, ranks, budget=config.prefill_budget, num_steps=config.num_steps)
    cache.open(parts.store, wake, ranks)
    runner = parts.runner(cache.loads, rows=config.max_running, num_steps=config.num_steps, timer=timer)
    engine = Engine(
        runner=LeadRunner(runner, ranks) if ranks else runner,
        cache=cache,
        num_steps=config.num_steps,
        max_running=config.max_running,
        prefill_budget=config.prefill_budget,
        metrics=metrics,
        emit=emit,
        draft=draft.facts if draft else None,
        lookup=draft.lookup if draft else None,
    )
    assert parts.stores is not None, "rank 0 keeps halves in storage, if there is storage"
    facts = parts.target.facts
    max_context = min(facts.max_positions, parts.pool.num_pages * config.page_size)
    return Built(engine, Limits(max_context, facts.vocab_size, parts.target.eos_token_ids), ranks, parts.stores)


def _missing_draft(config: EngineConfig) -> MissingDraft:
    return MissingDraft(config.storage.missing_draft) if config.storage else MissingDraft.RECOMPUTE
