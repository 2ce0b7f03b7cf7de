"""Runs what the engine has decided: target passes, verification, draft passes. Owns all that lives on the device.

    submit(plan)   the target's passes, tokens chosen, proposals verified     nothing comes back
    result()       what was chosen, as integers: the step's one transfer to the host
    propose(...)   the draft is brought up to date and proposes for the next step

A runner decides nothing: the same plans give the same bytes on every rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from speccache_runtime.cache.loads import Loads
from speccache_runtime.cache.pool import KVPool
from speccache_runtime.engine.sampler import choose
from speccache_runtime.engine.threads import CpuThreads
from speccache_runtime.model.attention import no_wait
from speccache_runtime.model.packing import Rows, pack
from speccache_runtime.model.tables import PageTables
from speccache_runtime.model.target import Target, TargetOutput
from speccache_runtime.speculative.proposer import DraftWork, Proposer
from speccache_runtime.speculative.verify import count_accepted
from speccache_runtime.steps import Chosen, Group, StepPlan, StepResult
from speccache_runtime.tensors import send

Timer = Callable[[str], AbstractContextManager[object]]
"""Called with "target" or "draft" around the work of that name; for benchmarks."""


def untimed(part: str) -> AbstractContextManager[object]:
    """The timer of everybody who measures nothing."""
    return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class _Pass:
    """A target pass that was run: its groups, the first row of each, its tokens [T] and its output."""

    decode: bool
    groups: tuple[Group, ...]
    firsts: tuple[int, ...]
    tokens: Tensor
    output: TargetOutput


@dataclass(frozen=True, slots=True)
class _Step:
    """A submitted step. `chosen` are its tokens and then its accepted counts, on the device; None if it chose none."""

    plan: StepPlan
    passes: tuple[_Pass, ...]
    chosen: Tensor | None


class Runner:
    """One rank's models, pools and page tables. One thread; one step at a time."""

    def __init__(
        self,
        *,
        target: Target,
        pool: KVPool,
        proposer: Proposer | None,
        loads: Loads,
        rows: int,
        num_steps: int,
        timer: Timer = untimed,
    ) -> None:
        """`rows` is how many requests run at once, `num_steps` the most proposals of one request.

        `loads` are those of the cache whose pages the plans name.
        """
        self._target = target
        self._pool = pool
        self._device = pool.device
        self._threads = CpuThreads(target.facts.parameters) if self._device.type == "cpu" else None
        self._proposer = proposer
        self._loads = loads
        self._timer = timer
        self._tables = PageTables(rows, pool.num_pages, pool.shape.page_size, self._device)
        self._proposals = torch.zeros(rows, num_steps, dtype=torch.int64, device=self._device)
        self._step: _Step | None = None
        self._result: StepResult | None = None

    # ---- the three calls of a step

    def submit(self, plan: StepPlan) -> None:
        """Starts the target's part of a step; the one before must have been proposed for."""
        with torch.inference_mode(), self._timer("target"):
            for more in plan.tables:
                self._tables.append(more)
            passes = []
            if plan.decode:
                passes.append(self._run(plan.decode, no_wait, decode=True))
            if plan.extend:
                loads = {number for group in plan.extend for number in group.loads}
                wait = functools.partial(self._loads.wait_target_layer, loads)
                passes.append(self._run(plan.extend, wait, decode=False))
            self._step = _Step(plan, tuple(passes), self._choose(passes))
            self._result = None

    def result(self) -> StepResult:
        """What the target chose in the step that was submitted. Waits for the device, once."""
        assert self._step is not None
        if self._result is None:
            numbers = [] if self._step.chosen is None else self._step.chosen.tolist()
            self._result = _as_result(self._step.plan, numbers)
        return self._result

    def adopt(self, result: StepResult) -> None:
        """What rank 0 chose in the step that was submitted here too; on the other ranks, instead of `result`."""
        self._result = result

    def propose(self, ended: frozenset[int] = frozenset()) -> tuple[int, ...]:
        """Writes the draft's KV of the step's slots and makes proposals; how many for each group of the plan.

        Rows in `ended` get none: their requests are over. Callable before or after `result`.
        """
        step, result = self._step, self.result()
        assert step is not None
        if self._proposer is None:
            return (0,) * len(result.chosen)
        with torch.inference_mode(), self._timer("draft"):
            work = _draft_work(step, result, ended)
            known = [w for w in work if w is not None]
            if known:
                if self._threads is not None:
                    self._threads.fit(max(sum(len(w.tokens) for w in known), sum(len(p.tokens) for p in step.passes)))
                self._loads.wait_draft({number for group in step.plan.extend for number in group.loads})
                features = _features(step.passes) if self._target.aux_layers else None
                self._proposer.propose(known, features, self._tables, self._proposals)
        return tuple(0 if w is None else w.want for w in work)

    # ---- the target's part

    def _run(self, groups: tuple[Group, ...], before_layer: Callable[[int], None], *, decode: bool) -> _Pass:
        firsts, total = [], 0
        for group in groups:
            if group.parents != tuple(range(group.rows - 1 if decode else 0)):
                raise ValueError(f"proposals of row {group.row} are no chain: {group.parents}")
            firsts.append(total)
            total += group.rows
        if self._threads is not None:
            self._threads.fit(total)
        tokens = self._tokens(groups, firsts)
        rows = [Rows(group.row, group.start, group.rows) for group in groups]
        packed = pack(rows, self._tables, self._device, before_layer=before_layer)
        output = self._target.forward(tokens, packed.positions, self._pool, packed.attention)
        return _Pass(decode, groups, tuple(firsts), tokens, output)

    def _tokens(self, groups: Sequence[Group], firsts: Sequence[int]) -> Tensor:
        """The tokens of all rows, held proposals included: int64 [T] on the device."""
        tokens = send([t for group in groups for t in (*group.tokens, *(0,) * group.held)], self._device)
        width = self._proposals.shape[1]
        held = [
            (first + len(group.tokens) + number, group.row * width + number)
            for group, first in zip(groups, firsts, strict=True)
            for number in range(group.held)
        ]
        if held:
            to, place = send(list(zip(*held, strict=True)), self._device)
            tokens.index_copy_(0, to, self._proposals.view(-1).index_select(0, place))
        return tokens

    def _choose(self, passes: Sequence[_Pass]) -> Tensor | None:
        """Tokens of all rows that choose one, then the accepted proposals of each decoding group, on the device."""
        hidden, sampling, positions = [], [], []
        for each in passes:
            rows: list[int] = []
            for group, first in zip(each.groups, each.firsts, strict=True):
                picked = _choosing_rows(group, first, decode=each.decode)
                rows += picked
                sampling += [group.sampling] * len(picked)
                positions += [group.start + row - first + 1 for row in picked]
            if rows:
                whole = len(rows) == len(each.output.hidden)
                hidden.append(each.output.hidden if whole else each.output.hidden[send(rows, self._device)])
        if not hidden:
            return None
        logits = self._target.logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
        if logits is None:
            return None  # rank 0 chooses, and tells
        tokens = choose(logits, sampling, positions)
        accepted = [self._count_accepted(each, tokens) for each in passes if each.decode]
        return torch.cat([tokens, *accepted])

    def _count_accepted(self, decode: _Pass, tokens: Tensor) -> Tensor:
        """Accepted proposals of each group of the decode pass, whose row r chose `tokens[r]`: int64 [groups]."""
        width = max(group.rows for group in decode.groups)
        rows = [
            [*(first + min(number, group.rows - 1) for number in range(width)), group.rows - 1]
            for group, first in zip(decode.groups, decode.firsts, strict=True)
        ]
        sent = send(rows, self._device)
        at, counts = sent[:, :-1], sent[:, -1]
        return count_accepted(tokens.take(at), decode.tokens.take(at[:, 1:]), counts)


def _choosing_rows(group: Group, first: int, *, decode: bool) -> range:
    """Rows of the pass whose logits choose a token: every row when decoding, else the last or none."""
    end = first + group.rows
    return range(first if decode else end - 1, end) if group.chooses else range(0)


def _as_result(plan: StepPlan, numbers: Sequence[int]) -> StepResult:
    """Takes the transferred numbers apart: tokens of all choosing rows, then a count for each decoding group."""
    counts = iter(numbers[len(numbers) - len(plan.decode) :])
    chosen, at = [], 0
    for group in plan.decode:
        accepted = next(counts)
        chosen.append(Chosen(tuple(numbers[at : at + accepted + 1]), accepted))
        at += group.rows
    for group in plan.extend:
        chosen.append(Chosen(tuple(numbers[at : at + group.chooses]), 0))
        at += group.chooses
    return StepResult(tuple(chosen))


def _draft_work(step: _Step, result: StepResult, ended: frozenset[int]) -> list[DraftWork | None]:
    """What the draft does for each group of the plan; None where it has nothing to do."""
    work: list[DraftWork | None] = []
    answers = iter(result.chosen)
    before = 0
    for each in step.passes:
        for group, first in zip(each.groups, each.firsts, strict=True):
            chosen = next(answers)
            rows = group.draft
            tokens = (*rows.tokens, *chosen.tokens) if rows.follows else rows.tokens
            want = min(group.propose, group.left - len(chosen.tokens) - 1) if group.chooses else 0
            want = 0 if group.row in ended else max(0, want)
            feature = before + first + rows.start - group.start
            work.append(DraftWork(group.row, rows.start, tokens, feature, want) if tokens else None)
        before += len(each.tokens)
    return work


def _features(passes: Sequence[_Pass]) -> Tensor:
    """The features of all passes of a target with aux layers, in the order of their rows."""
    features = [each.output.features for each in passes if each.output.features is not None]
    return features[0] if len(features) == 1 else torch.cat(features)
