"""Whatever the caches hold, the tokens are those of plain transformers without any cache."""

import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_api.drafts import DRAFTS
from speccache_runtime.cache.policy import MissingDraft

NEW = 12
LONGEST = 48


def prompts(tools: SimpleNamespace) -> list[list[int]]:
    """Prompts of 1 to 48 tokens; some are beginnings of others, some part ways in the middle of a page."""
    trunk = tools.random_tokens(LONGEST, seed=1)
    tail = tools.random_tokens(LONGEST, seed=2)
    return [
        trunk,
        trunk[:32],
        trunk[:33],
        [*trunk[:20], *tail[:17]],
        [*trunk[:16], *tail[:30]],
        tail[:24],
        trunk[:1],
        [*trunk[:45], *tail[:3]],
    ]


@dataclass(frozen=True)
class LifePlan:
    """How one life of the engine is set up and what it serves: batches of prompt numbers."""

    batches: list[list[int]]
    steps: int
    algorithm: str
    answer: MissingDraft
    max_running: int
    budget: int
    spare_pages: int
    host_pages: int
    damage: list[tuple[str, str]]


LIVES = st.builds(
    LifePlan,
    batches=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=2),
    steps=st.sampled_from([0, 1, 3]),
    algorithm=st.sampled_from(sorted(DRAFTS)),
    answer=st.sampled_from(MissingDraft),
    max_running=st.integers(1, 4),
    budget=st.sampled_from([5, 16, 64]),
    spare_pages=st.sampled_from([0, 1, 5, 40]),
    host_pages=st.sampled_from([0, 5, 64]),
    damage=st.lists(st.tuples(st.sampled_from("td"), st.sampled_from(["delete", "flip", "cut"])), max_size=3),
)


@settings(max_examples=settings().max_examples)
@given(
    lives=st.lists(LIVES, min_size=1, max_size=3),
    page_size=st.sampled_from([4, 8, 16]),
    rng=st.randoms(use_true_random=False),
)
def test_any_cache_state_gives_the_tokens_of_no_cache(
    pair: Any, tools: SimpleNamespace, lives: list[LifePlan], page_size: int, rng: random.Random
) -> None:
    texts = prompts(tools)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for plan in lives:
            life = tools.Life(
                pair,
                folder=folder,
                page_size=page_size,
                device_pages=-(-(LONGEST + NEW) // page_size) + plan.spare_pages,
                host_pages=plan.host_pages,
                steps=plan.steps,
                algorithm=plan.algorithm,
                answer=plan.answer,
                max_running=plan.max_running,
                budget=plan.budget,
            )
            for batch in plan.batches:
                for request, text in zip(life.run([texts[n] for n in batch], NEW), batch, strict=True):
                    assert life.tokens(request) == pair.greedy(texts[text], NEW)
                life.check_idle()
            life.end()
            for half, how in plan.damage:
                damage(tools.stored(folder, half), how, rng)


def damage(objects: list[Path], how: str, rng: random.Random) -> None:
    """Spoils about a third of the objects."""
    for path in objects:
        if rng.random() < 0.3:
            data = bytearray(path.read_bytes())
            if how == "delete" or not data:
                path.unlink()
            elif how == "cut":
                path.write_bytes(data[: rng.randrange(len(data))])
            else:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
