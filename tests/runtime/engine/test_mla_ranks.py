"""Two ranks that share latents: one copy of target halves on the host and in storage, draft halves of their own.

In: engines over two processes, sized as a pod is, through every tier and restarts. Out: what the other rank is asked
(test_shared_halves.py), how tensors are split (model/test_split.py), ranks that share nothing (test_parallel.py).
"""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import RANK_OVERHEAD
from speccache_runtime.core import Finish, Output, Request, SamplingParams, Tier
from speccache_runtime.engine.service import EngineService
from speccache_runtime.local import LocalOptions, LocalPlan, plan_locally

pytestmark = pytest.mark.program

pytestmark = pytest.mark.program

NEW = 24
PAGE = 16
PATIENCE_S = 60.0


def plan(pair: Any, ranks: int, folder: Path, *, missing: str = "Recompute", **changes: Any) -> LocalPlan:
    """What a pod of so many ranks is told, and the memory it is given. `changes` are of the engine's settings."""
    resource = SpecCacheDeployment.parse(
        {
            "apiVersion": "speccache.io/v1alpha1",
            "kind": "SpecCacheDeployment",
            "metadata": {"name": "latent"},
            "spec": {
                "model": {"uri": "pvc://models/target"},
                "speculative": {
                    "algorithm": changes.pop("algorithm", "EAGLE3"),
                    "numSteps": 3,
                    "draftModel": {"uri": f"pvc://models/{changes.pop('draft', 'draft')}"},
                },
                "kvCache": {
                    "pageSize": PAGE,
                    "device": {"tokens": 1024},
                    "host": {"tokens": 1024},
                    "storage": {"persistentVolumeClaim": {"claimName": "kv"}, "missingDraft": missing},
                },
                "parallelism": {"tensor": ranks},
            },
        }
    )
    made = plan_locally(resource, LocalOptions(claims={"models": pair.target_path.parent}, storage_dir=folder))
    return dataclasses.replace(made, config=dataclasses.replace(made.config, **changes))


def serve(replica: Any, texts: Sequence[Sequence[int]], pair: Any) -> list[Output]:
    """Serves all together and checks what they say; their last outputs."""
    answers = replica.run(texts)
    for answer, text in zip(answers, texts, strict=True):
        assert tuple(token for output in answer for token in output.tokens) == pair.greedy(text, NEW)
    return [answer[-1] for answer in answers]


def counts(answers: Sequence[Output]) -> list[tuple[int, ...]]:
    return [answer.usage.accepted_by_step for answer in answers if answer.usage]


def absent(answers: Sequence[Output]) -> list[int]:
    return [answer.usage.draft_absent_tokens for answer in answers if answer.usage]


def cached(answers: Sequence[Output]) -> list[dict[Tier, int]]:
    return [{t: n for t, n in answer.usage.cached_tokens.items() if n} for answer in answers if answer.usage]


def whole(texts: Sequence[Sequence[int]], tier: Tier) -> list[dict[Tier, int]]:
    """What `cached` says when all that could be was found in one tier."""
    return [{tier: (len(text) - 1) // PAGE * PAGE} for text in texts]


def mapped(pid: int | str) -> dict[str, int]:
    """Bytes that a process has mapped of each file that ranks share, by the file's number."""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:speccache-host" in line:
            span, _, _, _, number, *_ = line.split()
            begin, end = (int(part, 16) for part in span.split("-"))
            found[number] = found.get(number, 0) + end - begin
    return found


@pytest.fixture(scope="module")
def pair(latent_pairs: Callable[[str], Any]) -> Any:
    return latent_pairs("v3")


@pytest.fixture(scope="module")
def texts(tools: SimpleNamespace) -> list[list[int]]:
    """Prompts that share nothing."""
    return [tools.random_tokens(60 + n, seed=20 + n) for n in range(4)]


@pytest.fixture(scope="module")
def alone(
    pair: Any, texts: list[list[int]], tools: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """What one rank accepts, and the storage that it leaves behind."""
    folder = tmp_path_factory.mktemp("alone")
    with tools.Replica(plan(pair, 1, folder).config) as one:
        accepted = counts(serve(one, texts, pair))
    assert len({n for row in accepted for n in row}) > 2, "this pair accepts all or nothing and proves little"
    return folder, accepted


# ---- through every tier


def test_two_ranks_say_and_accept_what_one_does_from_every_tier(
    pair: Any, texts: list[list[int]], alone: tuple[Path, Any], tools: SimpleNamespace, tmp_path: Path
) -> None:
    made = plan(pair, 2, tmp_path)
    with tools.Replica(made.config) as first:
        cold = serve(first, texts, pair)
        assert cached(cold) == [{}] * 4
        assert counts(cold) == alone[1], "two ranks accept other proposals than one"
        assert counts(serve(first, texts, pair)) == alone[1]
        first.lose_the_device()
        from_host = serve(first, texts, pair)
        assert cached(from_host) == whole(texts, Tier.HOST)
        assert counts(from_host) == alone[1]
        shared = mapped("self")
        assert mapped(*tools.follower_pids()) == shared, "the ranks do not map the same memory"
        assert list(shared.values()) == [-(-made.memory.host_target // 4096) * 4096]
        arena = first.engine.cache._arena
        assert (
            arena.target.rows.nbytes + 2 * arena.draft.rows.nbytes == made.memory.host_target + made.memory.host_draft
        )
    objects = {half: [path.name for path in tools.stored(tmp_path, half)] for half in "td"}
    assert len(objects["t"]) == len(set(objects["t"])), "a target half is stored more than once"
    assert len(objects["d"]) == 2 * len(set(objects["d"])), "every rank stores its share of a draft half"
    with tools.Replica(plan(pair, 2, tmp_path).config) as second:
        restored = serve(second, texts, pair)
        assert cached(restored) == whole(texts, Tier.STORAGE)
        assert counts(restored) == alone[1]


def test_pages_that_come_and_go_are_never_another_text_s(
    pair: Any, tools: SimpleNamespace, alone: tuple[Path, Any], tmp_path: Path
) -> None:
    """Tiers for a few prompts only: rank 0 fills host pages anew all the time, while the other rank is behind."""
    texts = [tools.random_tokens(60 + n, seed=20 + n) for n in range(10)]
    with tools.Replica(plan(pair, 2, tmp_path, device_pages=15, host_pages=20, max_running=2).config) as small:
        seen = dict(enumerate(alone[1]))
        tiers: set[Tier] = set()
        for _ in range(2):
            order = [number for last in range(10) for number in (last, (last - 3) % 10)]
            answers = serve(small, [texts[number] for number in order], pair)
            for number, accepted in zip(order, counts(answers), strict=True):
                assert seen.setdefault(number, accepted) == accepted
            tiers |= {tier for answer in cached(answers) for tier in answer}
        assert tiers & {Tier.HOST, Tier.STORAGE}, "nothing comes through the host"
        assert small.engine.cache.index.host.evictions > 20, "no host page is filled anew"


def test_a_draft_that_ranks_share_leaves_the_other_rank_nothing_to_store(
    pair: Any, texts: list[list[int]], tools: SimpleNamespace, tmp_path: Path
) -> None:
    """The target as its own draft: both halves are latents."""
    changes = {"algorithm": "Standalone", "draft": "target"}
    with tools.Replica(plan(pair, 2, tmp_path, **changes).config) as first:
        cold = serve(first, texts, pair)
        assert {n for row in counts(cold) for n in row[:-1]} == {3}, "a target agrees with itself"
        first.lose_the_device()
        from_host = serve(first, texts, pair)
        assert (cached(from_host), counts(from_host)) == (whole(texts, Tier.HOST), counts(cold))
    for half in "td":
        names = [path.name for path in tools.stored(tmp_path, half)]
        assert len(names) == len(set(names))
    with tools.Replica(plan(pair, 1, tmp_path, **changes).config) as one:
        restored = serve(one, texts, pair)
        assert (cached(restored), counts(restored)) == (whole(texts, Tier.STORAGE), counts(cold))


# ---- another number of ranks


def test_what_one_rank_stored_two_find_but_for_the_draft(
    pair: Any, texts: list[list[int]], alone: tuple[Path, Any], tools: SimpleNamespace
) -> None:
    folder, accepted = alone
    targets = {path: path.stat().st_ino for path in tools.stored(folder, "t")}
    with tools.Replica(plan(pair, 2, folder, missing="Degrade").config) as degraded:
        hit = serve(degraded, texts, pair)
        assert cached(hit) == whole(texts, Tier.STORAGE)
        assert absent(hit) == [(len(text) - 1) // PAGE * PAGE for text in texts]
        assert counts(hit) != accepted, "nothing is tested here"
    with tools.Replica(plan(pair, 2, folder).config) as again:
        recomputed = serve(again, texts, pair)
        assert cached(recomputed) == [{}] * 4
        assert counts(recomputed) == accepted
        again.lose_the_device()
        assert cached(serve(again, texts, pair)) == whole(texts, Tier.HOST)
    assert {path: path.stat().st_ino for path in tools.stored(folder, "t")} == targets
    with tools.Replica(plan(pair, 1, folder).config) as one:
        restored = serve(one, texts, pair)
        assert (cached(restored), counts(restored)) == (whole(texts, Tier.STORAGE), accepted)


def test_a_second_rank_needs_no_more_host_tier(pair: Any, tmp_path: Path) -> None:
    one, two = (plan(pair, ranks, tmp_path).memory for ranks in (1, 2))
    assert (two.host_target, two.host_draft) == (one.host_target, one.host_draft)
    assert two.overhead - one.overhead == RANK_OVERHEAD["cpu"]
    latents = 1024 * one.target.bytes_per_token("float32")
    assert two.device - one.device == latents, "on the CPU the device tier is the pod's too, and every rank has latents"


# ---- a rank that goes wrong


@pytest.fixture
def service(pair: Any, tmp_path: Path) -> Iterator[EngineService]:
    made = EngineService(plan(pair, 2, tmp_path).config, CollectorRegistry())
    made.start()
    yield made
    made.stop()


def test_when_a_rank_dies_every_request_ends_with_an_error(service: EngineService, tools: SimpleNamespace) -> None:
    begun, ended = threading.Event(), threading.Event()
    finish: list[Finish] = []

    def take(output: Output) -> None:
        begun.set()
        if output.finish is not None:
            finish.append(output.finish)
            ended.set()

    service.submit(Request("one", (1, 2, 3), SamplingParams(max_tokens=400)), take)
    assert begun.wait(PATIENCE_S)
    os.kill(*tools.follower_pids(), signal.SIGKILL)
    assert ended.wait(PATIENCE_S), "a request has no end"
    assert finish == [Finish.ERROR]
    assert service.failed is not None
