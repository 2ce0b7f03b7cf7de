"""Drafts that are not heads: a model of its own, whose lost halves are made anew from tokens, and none at all."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speccache_api.drafts import DRAFTS
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.core import Tier
from speccache_runtime.speculative.kinds import KINDS
from speccache_runtime.steps import NO_ROWS

NEW = 24
PAGE = 8


@pytest.fixture(scope="session")
def texts(tools: SimpleNamespace) -> list[list[int]]:
    """Prompts that share nothing, and repeat themselves here and there."""
    out = []
    for n in range(6):
        part = tools.random_tokens(20 + n, seed=30 + n)
        out.append([*part, *tools.random_tokens(3, seed=60 + n), *part[: 15 + n]])
    return out


def serve(life: Any, texts: list[list[int]], pair: Any, tier: Tier | None) -> list[tuple[int, ...]]:
    """Serves all together, checks text and source, and returns the accepted proposals of every verify step."""
    names = life.run(texts, NEW)
    for name, text in zip(names, texts, strict=True):
        assert life.tokens(name) == pair.greedy(text, NEW)
        found = {t: n for t, n in life.usage(name).cached_tokens.items() if n}
        assert found == ({tier: (len(text) - 1) // PAGE * PAGE} if tier else {})
    life.check_idle()
    return [life.usage(name).accepted_by_step for name in names]


def test_every_algorithm_can_be_made() -> None:
    assert set(KINDS) == set(DRAFTS)


@pytest.mark.parametrize("algorithm", sorted(set(DRAFTS) - {"EAGLE3"}))
def test_every_tier_gives_back_the_accepted_counts_of_a_cold_run(
    pair: Any, tools: SimpleNamespace, texts: list[list[int]], tmp_path: Path, algorithm: str
) -> None:
    first = tools.Life(pair, folder=tmp_path, algorithm=algorithm)
    cold = serve(first, texts, pair, None)
    assert len({n for row in cold for n in row}) > 2, "this draft accepts all or nothing and proves little"
    assert serve(first, texts, pair, Tier.DEVICE) == cold
    first.lose_the_device()
    assert serve(first, texts, pair, Tier.HOST) == cold
    first.end()
    assert bool(tools.stored(tmp_path, "d")) == DRAFTS[algorithm].pool
    second = tools.Life(pair, folder=tmp_path, budget=7, max_running=2, algorithm=algorithm)
    assert serve(second, texts, pair, Tier.STORAGE) == cold
    assert second.value("page_lookups", tier="host", half="draft", result="rebuilt") == 0
    second.end()


def test_without_a_draft_pool_host_pages_hold_target_halves_only(pair: Any, tools: SimpleNamespace) -> None:
    life = tools.Life(pair, algorithm="NGram")
    arena = life.cache._arena
    assert (arena.target.rows.shape[1], arena.draft.rows.nbytes) == (life.cache._target.layout.page_bytes, 0)
    life.end()


@pytest.mark.parametrize("answer", MissingDraft)
@pytest.mark.parametrize("share", ["all", "some"])
@pytest.mark.parametrize("budget", [24, 64])
def test_lost_halves_of_a_standalone_draft_are_made_anew_while_the_target_goes_on(
    pair: Any,
    tools: SimpleNamespace,
    texts: list[list[int]],
    tmp_path: Path,
    share: str,
    budget: int,
    answer: MissingDraft,
) -> None:
    """The target's hit is kept whatever `missingDraft` says; what was made anew is stored again."""
    first = tools.Life(pair, folder=tmp_path, algorithm="Standalone")
    cold = serve(first, texts, pair, None)
    first.end()
    halves = tools.stored(tmp_path, "d")
    for path in halves[:: 1 if share == "all" else 3]:
        path.unlink()
    second = tools.Life(pair, folder=tmp_path, algorithm="Standalone", answer=answer, budget=budget)
    names = second.run(texts, NEW)
    for name, text in zip(names, texts, strict=True):
        usage = second.usage(name)
        assert second.tokens(name) == pair.greedy(text, NEW)
        assert usage.cached_tokens[Tier.STORAGE] == (len(text) - 1) // PAGE * PAGE
    assert second.value("page_lookups", tier="host", half="draft", result="rebuilt") > 0
    assert second.value("verify_steps", source="rebuilt") > 0
    assert second.value("verify_steps", source="degraded") == 0
    second.end()
    assert tools.stored(tmp_path, "d") == halves
    third = tools.Life(pair, folder=tmp_path, algorithm="Standalone")
    assert serve(third, texts, pair, Tier.STORAGE) == cold
    third.end()


def test_a_draft_that_is_behind_catches_up_within_the_budget_of_a_step(
    pair: Any, tools: SimpleNamespace, tmp_path: Path
) -> None:
    text = tools.random_tokens(81, seed=5)
    first = tools.Life(pair, folder=tmp_path, algorithm="Standalone")
    first.run([text], 1)
    first.end()
    for path in tools.stored(tmp_path, "d"):
        path.unlink()
    life = tools.Life(pair, folder=tmp_path, algorithm="Standalone", budget=17)
    made = watch(life)
    (name,) = life.run([text], 30)
    assert life.tokens(name) == pair.greedy(text, 30)
    assert [rows for rows, _ in made[:5]] == [16, 17, 17, 17, 13 + 4 + 1], (
        "80 slots of the prompt, then what came since"
    )
    assert [follows for _, follows in made[:5]] == [False, False, False, False, True]
    counts = life.usage(name).accepted_by_step
    assert counts[:4] == (0, 0, 0, 0)
    assert sum(counts) > 0, "no proposals after the draft has caught up"
    life.end()


def watch(life: Any) -> list[tuple[int, bool]]:
    """(known rows, whether chosen ones follow) of the draft in every step from now on."""
    made: list[tuple[int, bool]] = []
    submit = life.engine._runner.submit

    def watched(plan: Any) -> None:
        made.extend((len(g.draft.tokens), g.draft.follows) for g in plan.groups() if g.draft != NO_ROWS)
        submit(plan)

    life.engine._runner.submit = watched
    return made


def test_requests_with_the_same_prefix_make_its_lost_halves_once(
    pair: Any, tools: SimpleNamespace, tmp_path: Path
) -> None:
    text = tools.random_tokens(64, seed=5)
    first = tools.Life(pair, folder=tmp_path, algorithm="Standalone")
    first.run([[*text, 1]], 1)
    first.end()
    for path in tools.stored(tmp_path, "d"):
        path.unlink()
    life = tools.Life(pair, folder=tmp_path, algorithm="Standalone", budget=24)
    made = watch(life)
    prompts = [[*text, n] for n in range(4)]
    names = life.run(prompts, 30)
    for name, prompt in zip(names, prompts, strict=True):
        assert life.tokens(name) == pair.greedy(prompt, 30)
        assert sum(life.usage(name).accepted_by_step) > 0
    behind = sum(rows for rows, follows in made if not follows)
    assert behind <= 64, "the same halves were made more than once"
    life.end()


def test_a_target_that_is_its_own_draft_is_always_right(pair: Any, tools: SimpleNamespace, tmp_path: Path) -> None:
    own = tools.Pair(pair.target_path, pair.draft_path, (0, 1, 2))
    texts = [tools.random_tokens(30 + n, seed=n) for n in range(4)]
    for restart in range(2):
        life = tools.Life(own, folder=tmp_path, algorithm="Standalone", steps=3)
        for name, text in zip(names := life.run(texts, 25), texts, strict=True):
            assert life.tokens(name) == pair.greedy(text, 25)
            assert life.usage(name).accepted_by_step == (3,) * 6
            assert life.usage(name).accept_length == pytest.approx(25 / 6)
        assert life.value("cached_tokens", tier=Tier.STORAGE) == restart * sum((len(t) - 1) // 8 * 8 for t in texts)
        assert len(names) == len(texts)
        life.end()


@pytest.mark.parametrize("algorithm", sorted(DRAFTS))
def test_preempted_requests_go_on_with_the_same_text(
    pair: Any, tools: SimpleNamespace, texts: list[list[int]], algorithm: str
) -> None:
    life = tools.Life(pair, device_pages=19, host_pages=64, budget=200, algorithm=algorithm)
    names = life.run(texts[:4], NEW)
    assert life.engine.scheduler.preemptions > 0
    for name, text in zip(names, texts, strict=False):
        assert life.tokens(name) == pair.greedy(text, NEW)
    life.end()


@pytest.mark.parametrize("algorithm", sorted(DRAFTS))
@pytest.mark.parametrize("prompt", [1, 7, 8, 16, 33])
def test_a_request_may_fill_all_pages_to_the_last_slot(
    pair: Any, tools: SimpleNamespace, algorithm: str, prompt: int
) -> None:
    text = tools.random_tokens(prompt, seed=prompt)
    for new in (1, 2, 3, 5, 40 - prompt):
        pages = -(-(prompt + new) // PAGE)
        life = tools.Life(pair, device_pages=pages, host_pages=0, algorithm=algorithm)
        (name,) = life.run([text], new)
        assert life.tokens(name) == pair.greedy(text, new)
        life.end()
