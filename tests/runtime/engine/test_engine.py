"""One engine, step by step: ends of requests, aborts in any state, failures, what is reported."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccache_runtime.cache import paired
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.core import Finish, Request, SamplingParams, Tier

NEW = 12


@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 5)), max_size=6), st.sampled_from([0, 3]))
def test_an_abort_in_any_state_ends_one_request_and_no_other(
    pair: Any, tools: SimpleNamespace, aborts: list[tuple[int, int]], steps: int
) -> None:
    """Aborts come while waiting, prefilling in pieces, decoding, preempted, or after the end."""
    life = tools.Life(pair, device_pages=14, max_running=3, budget=16, steps=steps)
    texts = [tools.random_tokens(20 + 5 * n, seed=20 + n) for n in range(6)]
    names = [life.add(text, NEW) for text in texts]
    for step in range(15):
        for at, n in aborts:
            if at == step:
                life.engine.abort(names[n])
        if life.engine.num_requests:
            life.step()
        life.cache.check_integrity()
    while life.engine.num_requests:
        life.step()
    for n, (name, text) in enumerate(zip(names, texts, strict=True)):
        said = life.tokens(name)
        assert said == pair.greedy(text, NEW)[: len(said)]
        finish = life.outputs[name][-1].finish
        assert finish in ({Finish.LENGTH, Finish.ABORT} if n in [m for _, m in aborts] else {Finish.LENGTH})
        assert finish is Finish.ABORT or len(said) == NEW
    life.end()


def test_an_unknown_abort_is_ignored(pair: Any, tools: SimpleNamespace) -> None:
    life = tools.Life(pair)
    life.engine.abort("nobody")
    (name,) = life.run([tools.random_tokens(9, seed=1)], 2)
    life.engine.abort(name)
    assert len([o for o in life.outputs[name] if o.finish is not None]) == 1
    life.end()


@pytest.mark.parametrize("steps", [0, 3])
def test_a_stop_token_ends_the_text_wherever_it_comes_in_a_step(pair: Any, tools: SimpleNamespace, steps: int) -> None:
    """Also among accepted proposals: what the draft had proposed behind it does not count."""
    text = tools.random_tokens(37, seed=31)
    whole = pair.greedy(text, 24)
    life = tools.Life(pair, steps=steps)
    for stop in set(whole):
        (name,) = life.run([text], 24, stop_token_ids=frozenset({stop}))
        assert life.tokens(name) == whole[: whole.index(stop) + 1]
        assert life.outputs[name][-1].finish is Finish.STOP
        life.check_idle()
    # The ends of those requests have published pages; they must serve longer requests rightly.
    more = [*text, *whole[:10]]
    (name,) = life.run([more], 14)
    assert life.tokens(name) == whole[10:]
    life.end()


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5])
def test_no_token_too_many(pair: Any, tools: SimpleNamespace, new: int) -> None:
    life = tools.Life(pair)
    (name,) = life.run([tools.random_tokens(20, seed=3)], new)
    assert len(life.tokens(name)) == new
    usage = life.usage(name)
    assert usage.completion_tokens == new
    assert usage.verify_steps <= new - 1
    assert sum(n + 1 for n in usage.accepted_by_step) + 1 == new
    life.end()


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_seeded_request_draws_the_same_with_and_without_speculation(
    pair: Any, tools: SimpleNamespace, temperature: float
) -> None:
    texts = [tools.random_tokens(30 + n, seed=40 + n) for n in range(4)]
    said = []
    for steps, budget, running in ((0, 64, 8), (3, 64, 8), (3, 7, 2), (1, 64, 1)):
        life = tools.Life(pair, steps=steps, budget=budget, max_running=running)
        names = [life.add(text, 20, temperature=temperature, top_p=0.95, seed=n) for n, text in enumerate(texts)]
        while life.engine.num_requests:
            life.step()
        said.append([life.tokens(name) for name in names])
        if steps == 3:
            assert any(life.usage(name).accepted_by_step for name in names)
        life.end()
    assert said[1:] == said[:1] * 3
    assert said[0] != [pair.greedy(text, 20) for text in texts]


def test_many_requests_with_one_prompt_share_its_pages(pair: Any, tools: SimpleNamespace) -> None:
    text = tools.random_tokens(41, seed=5)
    life = tools.Life(pair, device_pages=22)
    life.run([text], 1)
    names = life.run([text] * 6, NEW)  # 5 shared pages and 2 or 3 of each one's own
    assert {life.tokens(name) for name in names} == {pair.greedy(text, NEW)}
    assert all(life.usage(name).cached_tokens[Tier.DEVICE] == 40 for name in names)
    assert life.engine.scheduler.preemptions == 0
    life.end()


def test_what_a_request_generated_is_cached_for_the_next_turn(pair: Any, tools: SimpleNamespace) -> None:
    text = tools.random_tokens(19, seed=6)
    life = tools.Life(pair)
    (first,) = life.run([text], NEW)
    turn = [*text, *life.tokens(first), 1, 2]
    (second,) = life.run([turn], NEW)
    assert life.tokens(second) == pair.greedy(turn, NEW)
    # 19 + 12 tokens: the last one was never computed, and the draft needs one token more than the target.
    assert life.usage(second).cached_tokens[Tier.DEVICE] == 24
    life.end()


def test_usage_and_metrics_tell_what_happened(pair: Any, tools: SimpleNamespace, tmp_path: Path) -> None:
    text = tools.random_tokens(41, seed=7)
    life = tools.Life(pair, folder=tmp_path)
    cold, warm = life.run([text], NEW) + life.run([text], NEW)
    assert life.value("cached_tokens", tier="device") == 40
    assert life.value("prompt_tokens") == 82
    assert life.value("generated_tokens") == 2 * NEW
    assert life.value("requests", finish="length") == 2
    for name, source in ((cold, "cold"), (warm, "device")):
        usage = life.usage(name)
        assert usage.prompt_tokens == 41
        assert life.value("verify_steps", source=source) == usage.verify_steps > 0
        assert life.value("verified_tokens", source=source) == NEW
        assert life.value("verify_steps_first64", source=source) == usage.verify_steps
        assert usage.accept_length == NEW / usage.verify_steps
        assert len(usage.accepted_by_step) == usage.verify_steps
    life.engine.update_gauges()
    assert life.value("running") == life.value("waiting") == 0
    life.end()


def test_a_failure_in_a_step_ends_every_request_once(pair: Any, tools: SimpleNamespace) -> None:
    """Also those that had their answer in the very step that failed behind it."""
    life = tools.Life(pair)
    names = [life.add(tools.random_tokens(20, seed=n), new) for n, new in enumerate((1, 5, 5))]

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    life.engine._runner._proposer.propose = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        life.step()
    life.engine.fail_all("engine failed")
    finishes = [[o.finish for o in life.outputs[name] if o.finish is not None] for name in names]
    assert finishes == [[Finish.LENGTH], [Finish.ERROR], [Finish.ERROR]]
    for name in names[1:]:
        assert life.outputs[name][-1].error == "engine failed"
        assert life.usage(name).completion_tokens == 1
    assert life.engine.num_requests == 0
    life.cache.close()


def test_a_request_whose_storage_never_answers_is_computed_after_its_deadline(
    pair: Any, tools: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: Any
) -> None:
    monkeypatch.setattr(paired, "PREFETCH_DEADLINE_S", 0.05)
    text = tools.random_tokens(30, seed=8)
    first = tools.Life(pair, folder=tmp_path)
    first.run([text], 2)
    first.end()
    second = tools.Life(pair, backend=hanging)
    name = second.add(text, NEW)
    while second.engine.num_requests:
        if not second.engine.step():
            second.woken.wait(0.01)
    assert second.tokens(name) == pair.greedy(text, NEW)
    assert second.value("prefetch_deadlines") == 1
    hanging.go_on.set()
    second.end()


@pytest.fixture
def hanging(tmp_path: Path) -> Any:
    """A volume whose reads answer when the test says so."""

    class Hanging(FileBackend):
        go_on = threading.Event()

        def read(self, *args: Any) -> Any:
            assert self.go_on.wait(30)
            return super().read(*args)

    return Hanging(tmp_path)


def test_prompts_of_one_token_and_of_whole_pages(pair: Any, tools: SimpleNamespace) -> None:
    life = tools.Life(pair, page_size=8)
    for length in (1, 7, 8, 9, 16, 17):
        text = tools.random_tokens(length, seed=50 + length)
        for _ in range(2):
            (name,) = life.run([text], 5)
            assert life.tokens(name) == pair.greedy(text, 5)
    life.end()


def test_the_longest_request_that_the_pages_hold_finishes_alone_and_in_company(
    pair: Any, tools: SimpleNamespace
) -> None:
    life = tools.Life(pair, page_size=8, device_pages=6, host_pages=4)
    texts = [tools.random_tokens(36, seed=60 + n) for n in range(3)]
    names = life.run(texts, 12)
    for name, text in zip(names, texts, strict=True):
        assert life.tokens(name) == pair.greedy(text, 12)
    life.end()


def test_requests_keep_their_order_within_one_step(pair: Any, tools: SimpleNamespace) -> None:
    life = tools.Life(pair)
    for n in range(3):
        life.engine.add(Request(f"x{n}", tuple(tools.random_tokens(5, seed=n)), SamplingParams(max_tokens=1)))
    life.step()
    assert list(life.outputs) == ["x0", "x1", "x2"]
    life.end()
