"""A replica of two ranks: real processes, real storage, and the same text and acceptance as one rank.

In: engines over two ranks of the small pair, through every tier and restarts. Out: ranks that go wrong
(test_parallel_trouble.py), what they say to each other (test_parallel_messages.py), tensors (model/test_split.py).
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speccache_runtime.cache.keys import KeyChain
from speccache_runtime.core import Output, Tier

pytestmark = pytest.mark.program

NEW = 24


def text(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.tokens)


def counts(answers: list[list[Output]]) -> list[tuple[int, ...]]:
    return [answer[-1].usage.accepted_by_step for answer in answers if answer[-1].usage]


def cached(answers: list[list[Output]]) -> list[dict[Tier, int]]:
    return [{t: n for t, n in a[-1].usage.cached_tokens.items() if n} for a in answers if a[-1].usage]


def page_key(prompt: Sequence[int], page: int) -> bytes:
    chain = KeyChain(8)
    chain.extend(prompt, page + 1)
    return chain.keys[page]


def stored(folder: Path, half: str, key: bytes) -> list[Path]:
    """The objects of one half of a page, one for each rank."""
    return sorted(folder.glob(f"v2/*/{half}/*/*/{key.hex()}-*"))


def namespaces(folder: Path) -> list[Path]:
    """Of each half that somebody has stored, the directory."""
    return sorted(folder.glob("v2/*/[td]/*"))


@pytest.fixture(scope="module")
def prompts(texts: list[list[int]]) -> list[list[int]]:
    return texts[:4]


@dataclass(frozen=True)
class Life:
    """What one rank said of the prompts, and then two from every tier, on the same storage.

    `of_one` are the namespaces in `folder` that the one rank made.
    """

    folder: Path
    of_one: tuple[str, ...]
    alone: list[list[Output]]
    cold: list[list[Output]]
    from_device: list[list[Output]]
    from_host: list[list[Output]]
    left_behind: list[int]


@pytest.fixture(scope="module")
def life(pair: Any, tools: SimpleNamespace, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("storage")
    one = tools.Replica(tools.settings(pair, folder))
    alone = one.run(prompts)
    one.end()
    of_one = tuple(path.name for path in namespaces(folder))
    two = tools.Replica(tools.settings(pair, folder, tensor=2))
    cold = two.run(prompts)
    from_device = two.run(prompts)
    two.lose_the_device()
    from_host = two.run(prompts)
    two.end()
    return Life(folder, of_one, alone, cold, from_device, from_host, tools.follower_pids())


@pytest.fixture
def storage(life: Life, tmp_path: Path) -> Path:
    """What the two ranks have left in storage, to be changed."""
    return shutil.copytree(life.folder, tmp_path / "storage", ignore=shutil.ignore_patterns(*life.of_one))


def test_two_ranks_say_what_one_says_from_every_tier(
    pair: Any, tools: SimpleNamespace, prompts: list[list[int]], life: Life
) -> None:
    assert cached(life.cold) == [{}] * 4, "two ranks took what one rank had stored"
    assert [text(answer) for answer in life.cold] == [pair.greedy(prompt, NEW) for prompt in prompts]
    assert counts(life.cold) == counts(life.alone), "two ranks accept other proposals than one"
    assert counts(life.from_device) == counts(life.cold)
    assert {tier for answer in cached(life.from_host) for tier in answer} == {Tier.HOST}
    assert counts(life.from_host) == counts(life.cold)
    assert life.left_behind == []
    assert len(namespaces(life.folder)) == 6, "for one rank and each of two a target's and a draft's"


def test_two_ranks_find_everything_again_after_a_restart(
    pair: Any, tools: SimpleNamespace, prompts: list[list[int]], life: Life, storage: Path
) -> None:
    second = tools.Replica(tools.settings(pair, storage, tensor=2))
    restored = second.run(prompts)
    assert cached(restored) == [{Tier.STORAGE: (len(prompt) - 1) // 8 * 8} for prompt in prompts]
    assert [text(answer) for answer in restored] == [pair.greedy(prompt, NEW) for prompt in prompts]
    assert counts(restored) == counts(life.cold)
    second.end()


@pytest.mark.parametrize("algorithm", ["Standalone", "NGram"])
def test_two_ranks_accept_what_one_accepts_by_every_algorithm(
    pair: Any, tools: SimpleNamespace, prompts: list[list[int]], tmp_path: Path, algorithm: str
) -> None:
    has_model = algorithm == "Standalone"
    changes = {
        "algorithm": algorithm,
        "draft_path": pair.standalone_path if has_model else None,
        "draft_geometry": pair.standalone.facts.geometry if has_model else None,
    }
    one = tools.Replica(tools.settings(pair, tmp_path, **changes))
    alone = one.run(prompts)
    one.end()
    first = tools.Replica(tools.settings(pair, tmp_path, tensor=2, **changes))
    cold = first.run(prompts)
    assert [text(answer) for answer in cold] == [pair.greedy(prompt, NEW) for prompt in prompts]
    assert counts(cold) == counts(alone)
    first.end()
    second = tools.Replica(tools.settings(pair, tmp_path, tensor=2, **changes))
    restored = second.run(prompts)
    assert cached(restored) == [{Tier.STORAGE: (len(prompt) - 1) // 8 * 8} for prompt in prompts]
    assert counts(restored) == counts(cold)
    second.end()


def test_a_half_that_one_rank_lost_is_lost_for_all_and_made_again(
    pair: Any, tools: SimpleNamespace, prompts: list[list[int]], life: Life, storage: Path
) -> None:
    drafts = stored(storage, "d", page_key(prompts[1], 2))
    targets = stored(storage, "t", page_key(prompts[0], 1))
    assert (len(drafts), len(targets)) == (2, 2), "each rank has its own object of each half"
    drafts[0].unlink()
    data = bytearray(targets[1].read_bytes())
    data[5000] ^= 1
    targets[1].write_bytes(data)
    second = tools.Replica(tools.settings(pair, storage, tensor=2))
    again = second.run(prompts[:2])
    assert [text(answer) for answer in again] == [pair.greedy(prompt, NEW) for prompt in prompts[:2]]
    assert counts(again) == counts(life.cold[:2])
    assert cached(again) == [{Tier.STORAGE: 8}, {Tier.STORAGE: 16}]
    second.end()
    third = tools.Replica(tools.settings(pair, storage, tensor=2))
    assert cached(third.run(prompts[:2])) == [{Tier.STORAGE: 40}] * 2
    third.end()
