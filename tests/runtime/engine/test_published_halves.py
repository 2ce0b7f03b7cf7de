"""Whatever halves are lost: a draft half that is published as good holds what a clean run computes, byte for byte.

In the place of a draft model stands a rule in whole numbers, because a model's own sums depend on how many rows it
computes together. Everything else is real: target, runner, page tables, tiers.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speccache_api.drafts import DRAFTS, Draft
from speccache_api.geometry import KVGeometry, ModelFacts
from speccache_runtime.cache.keys import KeyChain
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.cache.pool import KVPool
from speccache_runtime.model.tables import PageTables
from speccache_runtime.speculative.kinds import ReadyDraft
from speccache_runtime.speculative.proposer import DraftWork

NEW = 10
LONGEST = 40
FACTS = ModelFacts(KVGeometry.heads(1, 1, 2), 0)
"""Four numbers of a token: K and V, two each."""

KINDS = {
    "a head of one layer": DRAFTS["EAGLE3"],
    "a model of its own": DRAFTS["Standalone"],
    "a deep head": Draft(model=True, pool=True, needs="features", lookahead=0, local=False),
}


def value_of(token: int, slot: int, before: bytes) -> Tensor:
    """KV of a slot: of its token, its place and, for a draft that is not local, of all KV before."""
    digest = hashlib.sha256(f"{token} {slot}".encode() + before).digest()
    return torch.tensor([float(int.from_bytes(digest[n : n + 3])) for n in range(0, 12, 3)])


class RuleProposer:
    """Writes `value_of` what the page tables let it see, and proposes what mostly follows a token."""

    def __init__(self, draft: Draft, pool: KVPool, successor: Sequence[int]) -> None:
        self._draft, self._pool, self._successor = draft, pool, successor

    def propose(self, work: Sequence[DraftWork], features: Any, tables: PageTables, into: Tensor) -> None:
        rows = [buffer.flatten(0, 1).flatten(1) for buffer in self._pool.layer(0)]
        for item in work:
            for number, token in enumerate(item.tokens):
                slot = item.start + number
                seen = self._seen(rows, tables, item.row, slot)
                (at,) = map(int, tables.slots(item.row, slot, 1))
                value = value_of(token, slot, b"" if self._draft.local else seen)
                rows[0][at], rows[1][at] = value[:2].to(rows[0].device), value[2:].to(rows[1].device)
            token = item.tokens[-1]
            for step in range(item.want):
                token = self._successor[token]
                into[item.row, step] = token

    def _seen(self, rows: list[Tensor], tables: PageTables, row: int, slot: int) -> bytes:
        count = slot - tables.absent_slots(row)
        pages = tables.pages(row, count, draft=True).cpu()
        at = (pages[:, None] * tables.page_size + torch.arange(tables.page_size)).flatten()[:count]
        return torch.cat([buffer.cpu()[at] for buffer in rows], dim=1).numpy().tobytes()


@cache
def clean(draft: Draft, tokens: tuple[int, ...]) -> Tensor:
    """KV of the slots whose tokens are all in `tokens`, computed from the beginning: [slots, 4]."""
    values: list[Tensor] = []
    for slot in range(len(tokens) - draft.lookahead):
        before = b"" if draft.local else torch.stack(values).numpy().tobytes() if values else b""
        values.append(value_of(tokens[slot + draft.lookahead], slot, before))
    return torch.stack(values)


@dataclass(frozen=True)
class LifePlan:
    """How one life is set up, what it serves, and what is lost in it and after it."""

    batches: list[list[int]]
    answer: MissingDraft
    max_running: int
    budget: int
    spare_pages: int
    host_pages: int
    losses: float
    damage: float


LIVES = st.builds(
    LifePlan,
    batches=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=3),
    answer=st.sampled_from(MissingDraft),
    max_running=st.integers(1, 4),
    budget=st.sampled_from([3, 7, 16, 64]),
    spare_pages=st.sampled_from([0, 2, 30]),
    host_pages=st.sampled_from([0, 6, 64]),
    losses=st.sampled_from([0.0, 0.3, 1.0]),
    damage=st.sampled_from([0.0, 0.3, 1.0]),
)


def prompts(tools: SimpleNamespace) -> list[list[int]]:
    trunk, tail = tools.random_tokens(LONGEST, seed=1), tools.random_tokens(LONGEST, seed=2)
    return [trunk, trunk[:33], [*trunk[:20], *tail[:17]], [*trunk[:16], *tail[:20]], tail[:24], trunk[:1]]


class Ledger:
    """The tokens of every page that any request ever had, by the page's key, with those that its draft half looks ahead
    to: its last slot may have been made for any of them."""

    def __init__(self, draft: Draft, page_size: int) -> None:
        self._draft, self._page_size = draft, page_size
        self._tokens: dict[bytes, set[tuple[int, ...]]] = {}

    def note(self, tokens: Sequence[int]) -> None:
        chain = KeyChain(self._page_size)
        chain.extend(tokens, len(tokens) // self._page_size)
        for page, key in enumerate(chain.keys):
            end = (page + 1) * self._page_size + self._draft.lookahead
            self._tokens.setdefault(key, set()).add(tuple(tokens[:end]))

    def check(self, life: Any) -> int:
        """Compares every half that is marked as good, on device and host; how many there were."""
        pool, arena, seen = life.cache._draft, life.cache._arena, 0
        for entry in life.cache.index.entries():
            size = self._page_size
            # The last page of a text lacks a token that the draft looks ahead to: nobody publishes it.
            wanted = [
                clean(self._draft, tokens)[-size:]
                for tokens in self._tokens[entry.key]
                if len(tokens) % size == self._draft.lookahead
            ]
            if entry.draft_on_device:
                found = torch.cat([buffer[entry.device].flatten(1).cpu() for buffer in pool.layer(0)], dim=1)
                assert is_one_of(found, wanted), "a draft half on the device is not what a clean run computes"
                seen += 1
            if entry.draft_on_host:
                half = torch.frombuffer(bytearray(arena.draft.page(entry.host)), dtype=torch.float32)
                found = half.view(2, size, 2).transpose(0, 1).reshape(size, 4)
                assert is_one_of(found, wanted), "a draft half on the host is not what a clean run computes"
                seen += 1
        return seen


def is_one_of(found: Tensor, wanted: list[Tensor]) -> bool:
    return any(torch.equal(found, each) for each in wanted)


def lose(entries: Iterable[Any], share: float, rng: random.Random) -> None:
    """Forgets that draft halves are there. Nobody runs and nothing is copied."""
    for entry in entries:
        if entry.draft_on_device and rng.random() < share:
            entry.draft_on_device = False
        if entry.draft_on_host and rng.random() < share:
            entry.draft_on_host = False


@settings(max_examples=settings().max_examples)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    lives=st.lists(LIVES, min_size=1, max_size=3),
    page_size=st.sampled_from([4, 8]),
    rng=st.randoms(use_true_random=False),
)
def test_what_is_published_as_a_draft_half_is_what_a_clean_run_computes(
    pair: Any, tools: SimpleNamespace, kind: str, lives: list[LifePlan], page_size: int, rng: random.Random
) -> None:
    draft, texts = KINDS[kind], prompts(tools)
    ledger = Ledger(draft, page_size)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for plan in lives:
            life = rule_life(pair, tools, draft, plan, page_size, folder)
            for batch in plan.batches:
                for request, number in zip(life.run([texts[n] for n in batch], NEW), batch, strict=True):
                    assert life.tokens(request) == pair.greedy(texts[number], NEW)
                    ledger.note([*texts[number], *life.tokens(request)])
                life.check_idle()
                ledger.check(life)
                lose(life.cache.index.entries(), plan.losses, rng)
            life.end()
            for path in tools.stored(folder, "d"):
                if rng.random() < plan.damage:
                    path.unlink()


def rule_life(
    pair: Any, tools: SimpleNamespace, draft: Draft, plan: LifePlan, page_size: int, folder: Path | None
) -> Any:
    lm_head, embed = pair.target.lm_head, pair.target.embed.weight
    successor = (embed @ lm_head.T).argmax(dim=-1).tolist()

    def make(pool: Callable[[ModelFacts], KVPool]) -> ReadyDraft:
        made = pool(FACTS)
        return ReadyDraft(draft, made, RuleProposer(draft, made, successor))

    return tools.Life(
        pair,
        folder=folder,
        page_size=page_size,
        device_pages=-(-(LONGEST + NEW) // page_size) + plan.spare_pages,
        host_pages=plan.host_pages,
        answer=plan.answer,
        max_running=plan.max_running,
        budget=plan.budget,
        draft=make,
    )


@pytest.mark.parametrize("said_to_be_local", [False, True])
def test_the_check_sees_a_contaminated_half(pair: Any, tools: SimpleNamespace, said_to_be_local: bool) -> None:
    """A deep head that is said to be local publishes what it computed behind masked pages."""
    deep = KINDS["a deep head"]
    plan = LifePlan([], MissingDraft.DEGRADE, 4, 64, 30, 64, 1.0, 0.0)
    life = rule_life(pair, tools, replace(deep, local=said_to_be_local), plan, 8, None)
    life.engine._runner._proposer._draft = deep
    ledger, long = Ledger(deep, 8), prompts(tools)[0]
    for text in (long[:17], long):
        lose(life.cache.index.entries(), 1.0, random.Random(0))
        (name,) = life.run([text], NEW)
        ledger.note([*text, *life.tokens(name)])
        life.check_idle()
    if said_to_be_local:
        with pytest.raises(AssertionError, match="not what a clean run computes"):
            ledger.check(life)
    else:
        assert ledger.check(life) == 0, "behind masked pages there is nothing to publish"
    life.end()
