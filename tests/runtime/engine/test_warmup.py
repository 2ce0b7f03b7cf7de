"""Made-up requests before the first real one: they use every kind of step and end whatever the pools' size."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from speccache_runtime.cache.pool import KVPool, PoolShape
from speccache_runtime.engine import warmup
from speccache_runtime.engine.parts import Parts
from speccache_runtime.metrics import Metrics


def _pool(facts: Any, pages: int, device: torch.device) -> KVPool:
    return KVPool(PoolShape(facts.geometry, 8, "float32"), pages, device)


def _warm_up(pair: Any, device: torch.device, pages: int, steps: int) -> None:
    pool = _pool(pair.target.facts, pages, device)
    draft = pair.draft("EAGLE3", lambda facts: _pool(facts, pages, device)) if steps else None
    warmup.warm_up(Parts(pair.target, pool, draft, None, None), None, budget=32, num_steps=steps)


@pytest.mark.parametrize("steps", [0, 3])
def test_both_kinds_of_steps_and_both_directions_of_pages_are_used(
    pair: Any, tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    metrics = Metrics(CollectorRegistry())
    monkeypatch.setattr(warmup, "Metrics", lambda registry: metrics)
    _warm_up(pair, tools.DEVICE, 64, steps)
    for direction in ("device_to_host", "host_to_device"):
        assert metrics.transfer_bytes.labels(direction=direction)._value.get() > 0
    assert metrics.requests.labels(finish="length")._value.get() == 5


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("pages", [1, 2, 3, 5])
def test_small_pools_are_no_trouble(pair: Any, tools: SimpleNamespace, pages: int, steps: int) -> None:
    _warm_up(pair, tools.DEVICE, pages, steps)
