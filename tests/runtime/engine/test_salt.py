"""Requests of different salts share no page in any tier: what they find is 0, whatever others have asked before."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speccache_runtime.core import Tier

SALTS = (None, "alice", "bob")


@pytest.fixture
def text(tools: SimpleNamespace) -> list[int]:
    made: list[int] = tools.random_tokens(41, seed=5)
    return made


@pytest.fixture
def life(pair: Any, tools: SimpleNamespace, tmp_path: Path) -> Callable[[], Any]:
    """Begins an engine over one and the same storage."""
    return lambda: tools.Life(pair, folder=tmp_path)


def found(life: Any, text: list[int], salt: str | None, pair: Any, tools: SimpleNamespace) -> dict[Tier, int]:
    """What a request finds in each tier; its text is the same in any case."""
    (name,) = life.run([text], tools.NEW, salt=salt)
    assert life.tokens(name) == pair.greedy(text, tools.NEW)
    life.settle()
    return {tier: tokens for tier, tokens in life.usage(name).cached_tokens.items() if tokens}


@pytest.mark.parametrize("tier", list(Tier))
def test_other_salts_find_nothing_in_any_tier(
    life: Callable[[], Any], text: list[int], pair: Any, tools: SimpleNamespace, tier: Tier
) -> None:
    """Nor does a request without one find what belongs to a salt, nor the other way round."""
    now = life()
    for salt in SALTS:
        if tier is Tier.HOST:
            now.lose_the_device()
        elif tier is Tier.STORAGE:
            now.end()
            now = life()
        assert found(now, text, salt, pair, tools) == {}
    for salt in SALTS:
        if tier is Tier.HOST:
            now.lose_the_device()
        elif tier is Tier.STORAGE:
            now.end()
            now = life()
        assert found(now, text, salt, pair, tools) == {tier: 40}
    now.end()


def test_names_in_storage_say_nothing_of_a_salt(
    life: Callable[[], Any], text: list[int], pair: Any, tools: SimpleNamespace, tmp_path: Path
) -> None:
    """Neither names nor contents hold it; each salt has objects of its own, as many as there are without one."""
    counts = []
    now = life()
    for salt in (None, "alice's secret"):
        found(now, text, salt, pair, tools)
        counts.append(len(tools.stored(tmp_path, "t")))
    assert counts[1] == 2 * counts[0]
    for half in "td":
        for path in tools.stored(tmp_path, half):
            for said in (str(path).encode(), path.read_bytes()):
                assert b"alice" not in said
                assert b"alice".hex().encode() not in said
    now.end()
