"""Greedy chain drafting over a batch of equal-length prompts, with the draft KV of the prompt kept or withheld.

Written apart from the serving engine on purpose: it is the second opinion on the engine's accept lengths.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from tinypair.model import Cache, Head, Target

SLICE = 8
"""Prompts prefilled at once: logits of whole prompts are large."""


class DraftKV(enum.StrEnum):
    """What became of the draft KV of the restored slots."""

    COLD = "cold"
    MASKED = "masked"
    ZEROED = "zeroed"


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts [B, P] that went through the target once: their KV, features [B, P, 3H] and first new tokens [B]."""

    prompts: Tensor
    cache: Cache
    features: Tensor
    first: Tensor


@torch.no_grad()
def prefill(target: Target, prompts: Tensor, room: int) -> Prefilled:
    """Runs the prompts; the caches have `room` more slots."""
    batch, length = prompts.shape
    cache = Cache(target.shape, target.shape.layers, batch, length + room, target.model.embed_tokens.weight)
    features, first = [], []
    for start in range(0, batch, SLICE):
        part = prompts[start : start + SLICE]
        view = _rows_of(cache, target, start, len(part))
        positions = torch.arange(length, device=prompts.device).expand(len(part), length)
        logits, feature = target(part, positions, view)
        features.append(feature)
        first.append(logits[:, -1].argmax(-1))
    return Prefilled(prompts, cache, torch.cat(features), torch.cat(first))


@torch.no_grad()
def plain_greedy(target: Target, prompts: Tensor, new_tokens: int) -> Tensor:
    """[B, new_tokens] without speculation."""
    state = prefill(target, prompts, new_tokens)
    token, out = state.first, [state.first]
    for i in range(new_tokens - 1):
        positions = torch.full((len(prompts), 1), prompts.shape[1] + i, device=prompts.device)
        token = target(token[:, None], positions, state.cache)[0][:, -1].argmax(-1)
        out.append(token)
    return torch.stack(out, 1)


class Speculation:
    """Prompts [B, P], prefilled once; each `run()` drafts over its own copy of their KV."""

    def __init__(self, target: Target, head: Head, prompts: Tensor, new_tokens: int, steps: int) -> None:
        self.target, self.head, self.steps, self.new_tokens = target, head, steps, new_tokens
        self.state = prefill(target, prompts, new_tokens + 2 * steps + 8)
        self._target_cache = _clone(self.state.cache)

    @torch.no_grad()
    def run(self, kind: DraftKV, restored: int) -> tuple[Tensor, Tensor]:
        """The first `restored` slots of the prompt have target KV, but draft KV only as `kind` says.

        Returns the tokens [B, new_tokens] and, per verify step, the tokens each row gained [rounds, B] (0 once done).
        """
        state, batch = self.state, len(self.state.prompts)
        _copy_into(self._target_cache, state.cache)
        cache, absent = self._draft_cache(kind, restored)
        hidden = self._extend_prompt(cache, absent, restored)
        length = torch.full((batch,), state.prompts.shape[1], device=hidden.device)
        made, root = torch.ones_like(length), state.first
        out = torch.zeros(batch, self.new_tokens + self.steps + 2, dtype=torch.long, device=hidden.device)
        out[:, 0] = root
        rounds, rows = [], torch.arange(batch, device=hidden.device)
        while bool((made < self.new_tokens).any()):
            active = made < self.new_tokens
            drafts = self._draft(hidden, length, cache, absent)
            choice, features = self._verify(root, drafts, length)
            accepted = (choice[:, :-1] == drafts).long().cumprod(1).sum(1)
            fresh = self._refresh(choice, features, length, cache, absent)
            gained = torch.where(active, accepted + 1, 0)
            _commit(out, made, choice, gained)
            rounds.append(gained)
            hidden = torch.where(active[:, None], fresh[rows, accepted], hidden)
            root = torch.where(active, choice[rows, accepted], root)
            length, made = length + gained, made + gained
        return out[:, : self.new_tokens], torch.stack(rounds).cpu()

    def _draft_cache(self, kind: DraftKV, restored: int) -> tuple[Cache, Tensor]:
        state, head = self.state, self.head
        batch, length = state.prompts.shape
        total = self._target_cache.k[0].shape[2]
        cache = Cache(head.shape, 1, batch, total, self.target.model.embed_tokens.weight)
        absent = torch.zeros(batch, total, dtype=torch.bool, device=state.prompts.device)
        following = torch.cat([state.prompts[:, 1:], state.first[:, None]], 1)
        embedded = self.target.model.embed_tokens(following)
        _, k, v = head.before_attention(embedded, head.fc(state.features), head.rope.span(0, length))
        if kind is DraftKV.COLD:
            cache.k[0][:, :, :restored], cache.v[0][:, :, :restored] = k[:, :, :restored], v[:, :, :restored]
        absent[:, :restored] = kind is DraftKV.MASKED
        return cache, absent

    def _extend_prompt(self, cache: Cache, absent: Tensor, restored: int) -> Tensor:
        """Draft prefill of the slots that were not restored; returns the hidden state of the last one [B, H]."""
        state = self.state
        batch, length = state.prompts.shape
        following = torch.cat([state.prompts[:, restored + 1 :], state.first[:, None]], 1)
        positions = torch.arange(restored, length, device=absent.device).expand(batch, length - restored)
        fused = self.head.fc(state.features[:, restored:])
        return self.head.step(self.target.model.embed_tokens(following), fused, positions, cache, absent)[:, -1]

    def _draft(self, hidden: Tensor, length: Tensor, cache: Cache, absent: Tensor) -> Tensor:
        drafts = []
        for step in range(self.steps):
            token = self.head.to_target_ids(self.head.logits(hidden).argmax(-1))
            drafts.append(token)
            if step + 1 < self.steps:
                embedded = self.target.model.embed_tokens(token)[:, None]
                positions = (length + step)[:, None]
                hidden = self.head.step(embedded, hidden[:, None], positions, cache, absent)[:, 0]
        return torch.stack(drafts, 1)

    def _verify(self, root: Tensor, drafts: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        positions = length[:, None] + torch.arange(self.steps + 1, device=length.device)
        logits, features = self.target(torch.cat([root[:, None], drafts], 1), positions, self._target_cache)
        return logits.argmax(-1), features

    def _refresh(self, choice: Tensor, features: Tensor, length: Tensor, cache: Cache, absent: Tensor) -> Tensor:
        """Overwrites the drafted slots with verified ones; returns their hidden states [B, steps + 1, H]."""
        positions = length[:, None] + torch.arange(self.steps + 1, device=length.device)
        embedded = self.target.model.embed_tokens(choice)
        return self.head.step(embedded, self.head.fc(features), positions, cache, absent)


def _commit(out: Tensor, made: Tensor, choice: Tensor, gained: Tensor) -> None:
    steps = torch.arange(choice.shape[1], device=out.device)
    spots = (made[:, None] + steps).clamp(max=out.shape[1] - 1)
    out.scatter_(1, spots, torch.where(steps < gained[:, None], choice, out.gather(1, spots)))


def _rows_of(cache: Cache, target: Target, start: int, count: int) -> Cache:
    view = Cache(target.shape, 0, count, 0, cache.k[0])
    view.k = [k[start : start + count] for k in cache.k]
    view.v = [v[start : start + count] for v in cache.v]
    return view


def _clone(cache: Cache) -> Cache:
    copy = Cache.__new__(Cache)
    copy.__dict__ = dict(cache.__dict__, k=[k.clone() for k in cache.k], v=[v.clone() for v in cache.v])
    return copy


def _copy_into(to: Cache, source: Cache) -> None:
    for mine, other in zip([*to.k, *to.v], [*source.k, *source.v], strict=True):
        mine.copy_(other)
