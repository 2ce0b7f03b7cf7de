"""What a draft proposes after its KV came back: exactly what it proposed when it had computed it."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.core import Tier

Counts = list[tuple[int, ...]]


def counts(life: Any, names: list[str]) -> Counts:
    return [life.usage(name).accepted_by_step for name in names]


def test_every_tier_gives_back_the_accepted_counts_of_a_cold_run(
    pair: Any, tools: SimpleNamespace, texts: list[list[int]], tmp_path: Path
) -> None:
    first = tools.Life(pair, folder=tmp_path)
    cold = tools.serve(first, texts, pair, None)
    assert len({n for row in cold for n in row}) > 2, "this pair accepts all or nothing and proves little"
    assert tools.serve(first, texts, pair, Tier.DEVICE) == cold
    first.lose_the_device()
    assert tools.serve(first, texts, pair, Tier.HOST) == cold
    first.end()
    second = tools.Life(pair, folder=tmp_path, budget=7, max_running=2)
    assert tools.serve(second, texts, pair, Tier.STORAGE) == cold
    second.end()


def test_the_same_pages_in_other_places_propose_the_same(
    pair: Any, tools: SimpleNamespace, texts: list[list[int]], tmp_path: Path
) -> None:
    first = tools.Life(pair, folder=tmp_path)
    cold = tools.serve(first, texts, pair, None)
    first.end()
    second = tools.Life(pair, folder=tmp_path)
    for pages in (second.cache.index.device, second.cache.index.host):
        pages._free.sort(key=lambda page: page * 29 % 64)
    assert tools.serve(second, texts, pair, Tier.STORAGE) == cold
    second.end()


def test_a_preempted_request_goes_on_with_the_same_text(
    pair: Any, tools: SimpleNamespace, texts: list[list[int]]
) -> None:
    life = tools.Life(pair, device_pages=18, host_pages=64, budget=200)
    names = life.run(texts[:4], tools.NEW)
    assert life.engine.scheduler.preemptions > 0
    for name, text in zip(names, texts, strict=False):
        assert life.tokens(name) == pair.greedy(text, tools.NEW)
    life.end()


@pytest.mark.parametrize("share", ["all", "some"])
def test_without_draft_halves_the_text_is_the_same_and_only_the_counts_differ(
    pair: Any, tools: SimpleNamespace, texts: list[list[int]], tmp_path: Path, share: str
) -> None:
    first = tools.Life(pair, folder=tmp_path)
    cold = tools.serve(first, texts, pair, None)
    first.end()
    gone = tools.stored(tmp_path, "d")[:: 1 if share == "all" else 3]
    for path in gone:
        path.unlink()
    second = tools.Life(pair, folder=tmp_path, answer=MissingDraft.DEGRADE)
    names = second.run(texts, tools.NEW)
    for name, text in zip(names, texts, strict=True):
        assert second.tokens(name) == pair.greedy(text, tools.NEW)
        assert second.usage(name).cached_tokens[Tier.STORAGE] == (len(text) - 1) // 8 * 8
    absent = sum(second.usage(name).draft_absent_tokens for name in names)
    cached = sum(second.usage(name).cached_tokens[Tier.STORAGE] for name in names)
    assert absent == cached if share == "all" else 0 < absent < cached
    assert counts(second, names) != cold, "the draft's KV makes no difference here: nothing is tested"
    assert second.value("verify_steps", source="degraded") > 0
    second.end()
    # The draft's view of an absent page is the same from every tier.
    third = tools.Life(pair, folder=tmp_path, answer=MissingDraft.DEGRADE)
    again = third.run(texts, tools.NEW)
    assert counts(third, again) == counts(second, names)
    third.end()


def test_recompute_rebuilds_lost_draft_halves_and_the_next_restart_finds_them(
    pair: Any, tools: SimpleNamespace, texts: list[list[int]], tmp_path: Path
) -> None:
    first = tools.Life(pair, folder=tmp_path)
    cold = tools.serve(first, texts, pair, None)
    first.end()
    for path in tools.stored(tmp_path, "d"):
        path.unlink()
    second = tools.Life(pair, folder=tmp_path)
    assert tools.serve(second, texts, pair, None) == cold
    second.end()
    third = tools.Life(pair, folder=tmp_path)
    assert tools.serve(third, texts, pair, Tier.STORAGE) == cold
    third.end()


def test_a_store_filled_without_speculation_serves_it_and_back(
    pair: Any, tools: SimpleNamespace, texts: list[list[int]], tmp_path: Path
) -> None:
    def life_of(steps: int, answer: MissingDraft) -> tuple[dict[Tier, int], int]:
        life = tools.Life(pair, folder=tmp_path, steps=steps, answer=answer)
        (name,) = life.run(texts[:1], tools.NEW)
        assert life.tokens(name) == pair.greedy(texts[0], tools.NEW)
        usage = life.usage(name)
        life.end()
        return {t: n for t, n in usage.cached_tokens.items() if n}, usage.draft_absent_tokens

    assert life_of(0, MissingDraft.RECOMPUTE) == ({}, 0)
    assert life_of(0, MissingDraft.RECOMPUTE) == ({Tier.STORAGE: 40}, 0)
    assert life_of(3, MissingDraft.DEGRADE) == ({Tier.STORAGE: 40}, 40)
    assert life_of(3, MissingDraft.RECOMPUTE) == ({}, 0)
    assert life_of(3, MissingDraft.RECOMPUTE) == ({Tier.STORAGE: 40}, 0)
    assert life_of(0, MissingDraft.RECOMPUTE) == ({Tier.STORAGE: 40}, 0)


@pytest.mark.parametrize("rubbish", [1e3, float("nan")])
def test_masked_is_really_masked(
    pair: Any, tools: SimpleNamespace, texts: list[list[int]], tmp_path: Path, rubbish: float
) -> None:
    """Whatever lies in pages and slots that are not a request's own, text and proposals are the same."""
    if math.isnan(rubbish) and tools.DEVICE.type != "cpu":
        return  # there attention pads short requests with slots of weight 0, and 0 times NaN is NaN
    first = tools.Life(pair, folder=tmp_path)
    tools.serve(first, texts, pair, None)
    first.end()
    for path in tools.stored(tmp_path, "d"):
        path.unlink()
    seen = []
    for fill in (0.0, rubbish):
        life = tools.Life(pair, folder=tmp_path, answer=MissingDraft.DEGRADE)
        for pool in (life.cache._target, life.cache._draft):
            for tensor in (t for layer in range(pool.shape.geometry.layers) for t in pool.layer(layer)):
                tensor.fill_(fill)
        for half in (life.cache._arena.target, life.cache._arena.draft):
            half.rows.view(torch.float32).fill_(fill)
        names = life.run(texts, tools.NEW)
        seen.append(counts(life, names))
        for name, text in zip(names, texts, strict=True):
            assert life.tokens(name) == pair.greedy(text, tools.NEW)
        life.end()
    assert seen[0] == seen[1]
