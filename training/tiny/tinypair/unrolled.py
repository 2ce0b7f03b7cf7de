"""The head's loss: it drafts several tokens in a row from its own hidden states, as it will when serving.

Training on the first step only gives a head whose second guess is useless; unrolling is what makes drafting pay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinypair.chain_attention import ChainAttention
from tinypair.config import Unroll
from tinypair.model import Head, Target

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target says about rows [B, T]: `probs` [B, T, draft_vocab] for the next token, `weight` [B, T] (0 where
    the target's choice is outside the draft vocabulary), `features` [B, T, 3 * hidden], `embedded` [B, T, hidden]."""

    probs: Tensor
    weight: Tensor
    features: Tensor
    embedded: Tensor


class Teacher:
    """The frozen target. `kept` are the target ids of the draft vocabulary."""

    def __init__(self, target: Target, kept: Tensor, compiler: Compile) -> None:
        self._target, self._kept = target, kept
        self._known = torch.zeros(target.shape.vocab, dtype=torch.bool, device=kept.device)
        self._known[kept] = True
        self._run = compiler(self._forward)

    @torch.no_grad()
    def teach(self, rows: Tensor) -> Lesson:
        return Lesson(*self._run(rows))

    def _forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits, features = self._target(rows)
        probs = torch.softmax(logits[..., self._kept].float(), -1).to(features.dtype)
        weight = self._known[logits.argmax(-1)].float()
        return probs, weight, features, self._target.model.embed_tokens(rows)


@dataclass(frozen=True, slots=True)
class UnrolledLoss:
    """`total` for the gradient; per step the loss and the share of slots whose first choice is the target's."""

    total: Tensor
    by_step: Tensor
    agreement: Tensor


class HeadTrainer:
    def __init__(self, head: Head, unroll: Unroll, compiler: Compile) -> None:
        self._head, self._unroll = head, unroll
        self._before = compiler(head.before_attention)
        self._after = compiler(head.after_attention)
        self._score = compiler(self._soft_loss)

    def loss(self, lesson: Lesson) -> UnrolledLoss:
        """At step s slot i is fed token i + 1 + s and its own last hidden state, and is judged on token i + 2 + s."""
        length = lesson.embedded.shape[1]
        repeat = self._head.shape.heads // self._head.shape.kv_heads
        hidden = self._head.fc(lesson.features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        losses, agreement = [], []
        for step in range(self._unroll.steps):
            shift = 1 + step
            rope = self._head.rope.span(step, length)
            q, k, v = self._before(torch.roll(lesson.embedded, -shift, 1), hidden, rope)
            keys.append(k.repeat_interleave(repeat, 1))
            values.append(v.repeat_interleave(repeat, 1))
            hidden = self._after(hidden, _chain(q, keys, values))
            weight = torch.roll(lesson.weight, -shift, 1)
            weight[:, length - shift :] = 0
            loss, agree = self._score(hidden, torch.roll(lesson.probs, -shift, 1), weight)
            losses.append(loss)
            agreement.append(agree)
        decays = [self._unroll.decay**s for s in range(len(losses))]
        total = sum(d * loss for d, loss in zip(decays, losses, strict=True)) / sum(decays)
        return UnrolledLoss(total, torch.stack(losses).detach(), torch.stack(agreement))

    def _soft_loss(self, hidden: Tensor, probs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._head.logits(hidden).float()
        loss = -(probs.float() * F.log_softmax(logits, -1)).sum(-1)
        agree = (logits.argmax(-1) == probs.argmax(-1)).float()
        return (loss * weight).sum() / weight.sum(), ((agree * weight).sum() / weight.sum()).detach()


def _chain(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    if len(keys) == 1:
        return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    mixed: Tensor = ChainAttention.apply(q, keys[0], values[0], torch.stack(keys[1:]), torch.stack(values[1:]))
    return mixed.contiguous()
