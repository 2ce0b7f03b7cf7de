"""Made-up requests before the first real one.

On a GPU the first use of a kernel compiles or chooses it, seconds altogether; without this, the first long request
would pay. The requests run in an engine of their own, which shares models and pools with the real one and nothing else:
no page of theirs is known afterwards, and no metric counts them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from speccache_runtime.cache.paired import PairedCache
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.core import Request, SamplingParams
from speccache_runtime.engine.engine import Engine
from speccache_runtime.engine.parallel.leader import LeadRunner, Ranks
from speccache_runtime.engine.parts import Parts
from speccache_runtime.metrics import Metrics

HOST_PAGES = 16
MAX_RUNNING = 2
_POLL_S = 0.001


def warm_up(parts: Parts, ranks: Ranks | None, *, budget: int, num_steps: int) -> None:
    """Uses every kind of step once: long and chunked prefill, decoding and verifying alone and in a batch, greedy and
    sampled, and on a replica of one rank pages to the host and back. Before the real cache opens; leaves made-up values
    in both pools of every rank."""
    metrics = Metrics(CollectorRegistry())
    target, pool = parts.target, parts.pool
    host_pages = 0 if ranks else HOST_PAGES  # the others' host pages belong to the real cache
    cache = PairedCache(pool, host_pages=host_pages, answer=MissingDraft.RECOMPUTE, metrics=metrics)
    draft = parts.draft
    if draft is not None and draft.pool is not None:
        cache.register_draft(draft.pool, draft.facts)
    cache.open(None, lambda: None)
    runner = parts.runner(cache.loads, rows=MAX_RUNNING, num_steps=num_steps)
    engine = Engine(
        runner=LeadRunner(runner, ranks) if ranks else runner,
        cache=cache,
        num_steps=num_steps,
        max_running=MAX_RUNNING,
        prefill_budget=budget,
        metrics=metrics,
        emit=lambda output: None,
        draft=draft.facts if draft else None,
        lookup=draft.lookup if draft else None,
    )
    new = 2 * (num_steps + 1)
    room = min(pool.num_pages * cache.page_size, target.facts.max_positions) // 2 - new
    long, short = min(2 * budget + 1, room), min(2 * cache.page_size + 1, room)
    if short > 0:
        _run(engine, [[0] * long], new)
        _run(engine, [[1] * short, [2] * short], new)
        index = cache.index
        index.give_device(index.take_device(index.device.num_available) or [])
        _run(engine, [[1] * short, [2] * short], new)
    cache.close()


def _run(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> None:
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), tuple(prompt), SamplingParams(max_tokens=new, temperature=float(number))))
    while engine.num_requests or engine.cache.busy:
        if not engine.step():
            time.sleep(_POLL_S)  # a copy ends without waking anybody
