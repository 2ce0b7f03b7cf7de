"""Targets that keep latents (DeepSeek-V2 and V3), with a draft that keeps K and V: pages of two layouts move as pairs.

In: text against plain transformers, accepted counts through every tier and a restart, sizes from the inspection to the
pools. Out: the attention itself (model/test_latent.py).
"""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from speccache_api.geometry import KVGeometry
from speccache_api.resource import SpecCacheDeployment
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.core import Finish, Output, Request, SamplingParams, Tier
from speccache_runtime.engine.service import EngineService
from speccache_runtime.errors import ModelError
from speccache_runtime.local import LocalOptions, plan_locally

PATIENCE_S = 60.0
PER_TOKEN = 3 * (16 + 8) * 4
"""Bytes of the target's half of a token: layers, latent and rotated key, float32."""


def test_every_tier_gives_back_text_and_accepted_counts(
    latent_pair: Any, tools: SimpleNamespace, texts: list[list[int]], tmp_path: Path
) -> None:
    first = tools.Life(latent_pair, folder=tmp_path)
    cold = tools.serve(first, texts, latent_pair, None)
    assert len({n for row in cold for n in row}) > 2, "this pair accepts all or nothing and proves little"
    assert tools.serve(first, texts, latent_pair, Tier.DEVICE) == cold
    first.lose_the_device()
    assert tools.serve(first, texts, latent_pair, Tier.HOST) == cold
    first.end()
    second = tools.Life(latent_pair, folder=tmp_path, budget=7, max_running=2)
    assert tools.serve(second, texts, latent_pair, Tier.STORAGE) == cold
    second.end()


@pytest.mark.parametrize(("steps", "budget", "running"), [(0, 64, 8), (0, 7, 2), (3, 7, 2), (5, 200, 8)])
def test_the_text_is_the_same_with_and_without_speculation(
    latent_pair: Any, tools: SimpleNamespace, texts: list[list[int]], steps: int, budget: int, running: int
) -> None:
    life = tools.Life(latent_pair, steps=steps, budget=budget, max_running=running)
    for name, text in zip(life.run(texts, tools.NEW), texts, strict=True):
        assert life.tokens(name) == latent_pair.greedy(text, tools.NEW)
    life.end()


def test_a_store_filled_without_speculation_serves_it(
    latent_pair: Any, tools: SimpleNamespace, texts: list[list[int]], tmp_path: Path
) -> None:
    plain = tools.Life(latent_pair, folder=tmp_path, steps=0)
    assert tools.serve(plain, texts, latent_pair, None) is not None
    plain.end()
    drafting = tools.Life(latent_pair, folder=tmp_path, answer=MissingDraft.DEGRADE)
    for name, text in zip(drafting.run(texts, tools.NEW), texts, strict=True):
        assert drafting.tokens(name) == latent_pair.greedy(text, tools.NEW)
        assert drafting.usage(name).cached_tokens[Tier.STORAGE] == (len(text) - 1) // 8 * 8
        assert drafting.usage(name).draft_absent_tokens == (len(text) - 1) // 8 * 8
    drafting.end()


def test_a_lost_draft_half_costs_proposals_and_is_rebuilt(
    latent_pair: Any, tools: SimpleNamespace, texts: list[list[int]], tmp_path: Path
) -> None:
    first = tools.Life(latent_pair, folder=tmp_path)
    cold = tools.serve(first, texts, latent_pair, None)
    first.end()
    for path in tools.stored(tmp_path, "d"):
        path.unlink()
    degraded = tools.Life(latent_pair, folder=tmp_path, answer=MissingDraft.DEGRADE)
    names = degraded.run(texts, tools.NEW)
    assert [degraded.usage(name).accepted_by_step for name in names] != cold, "nothing is tested here"
    degraded.end()
    again = tools.Life(latent_pair, folder=tmp_path)
    assert tools.serve(again, texts, latent_pair, None) == cold
    again.end()
    restored = tools.Life(latent_pair, folder=tmp_path)
    assert tools.serve(restored, texts, latent_pair, Tier.STORAGE) == cold
    restored.end()


def test_stored_objects_are_as_large_as_their_layouts(
    latent_pair: Any, tools: SimpleNamespace, texts: list[list[int]], tmp_path: Path
) -> None:
    life = tools.Life(latent_pair, folder=tmp_path)
    life.run(texts[:1], tools.NEW)
    life.end()
    draft = latent_pair.head.facts.geometry.bytes_per_token("float32")
    assert {path.stat().st_size for path in tools.stored(tmp_path, "t")} == {4096 + 8 * PER_TOKEN}
    assert {path.stat().st_size for path in tools.stored(tmp_path, "d")} == {4096 + 8 * draft}


def resource(**model: Any) -> SpecCacheDeployment:
    return SpecCacheDeployment.parse(
        {
            "apiVersion": "speccache.io/v1alpha1",
            "kind": "SpecCacheDeployment",
            "metadata": {"name": "latent"},
            "spec": {
                "model": {"uri": "pvc://models/target", **model},
                "speculative": {"algorithm": "EAGLE3", "numSteps": 3, "draftModel": {"uri": "pvc://models/draft"}},
                "kvCache": {"pageSize": 16, "device": {"tokens": 1024}, "host": {"tokens": 2048}},
            },
        }
    )


def start(latent_pair: Any, made: SpecCacheDeployment) -> tuple[EngineService, Any]:
    """The engine that a pod of the resource would start, on this machine."""
    options = LocalOptions(claims={"models": latent_pair.target_path.parent})
    plan = plan_locally(made, options)
    service = EngineService(plan.config, CollectorRegistry())
    service.start()
    return service, plan.memory


def test_a_resource_is_sized_and_served(latent_pair: Any, tools: SimpleNamespace) -> None:
    """From the models' files to memory, wire document, pools and text."""
    service, memory = start(latent_pair, resource())
    assert memory.target == KVGeometry.latent(3, 16, 8)
    assert memory.target_bytes_per_token == PER_TOKEN
    assert memory.host_target == 2048 * PER_TOKEN
    assert memory.host_draft == 2048 * 2 * 4 * 8 * 4
    ended = threading.Event()
    outputs: list[Output] = []

    def collect(output: Output) -> None:
        outputs.append(output)
        if output.finish is not None:
            ended.set()

    prompt = tuple(range(20))
    service.submit(Request("one", prompt, SamplingParams(max_tokens=tools.NEW)), collect)
    assert ended.wait(PATIENCE_S)
    assert outputs[-1].finish is Finish.LENGTH
    assert tuple(token for output in outputs for token in output.tokens) == latent_pair.greedy(prompt, tools.NEW)
    service.drain(PATIENCE_S, PATIENCE_S)
    service.stop()


def test_a_declared_latent_is_checked_against_the_files(latent_pair: Any) -> None:
    right = {"layers": 3, "kvLoraRank": 16, "qkRopeHeadDim": 8, "parameters": 100_000}
    service, memory = start(latent_pair, resource(kvGeometry=right))
    assert memory.target_bytes_per_token == PER_TOKEN
    service.stop()
    for wrong in ({"kvLoraRank": 8, "qkRopeHeadDim": 16}, {"kvHeads": 1, "headDim": 12}):
        declared = {"layers": 3, "parameters": 100_000} | wrong
        with pytest.raises(ModelError, match=r"3 layers of latent 16 \+ rope 8, not 3 layers of .*kvGeometry"):
            start(latent_pair, resource(kvGeometry=declared))
