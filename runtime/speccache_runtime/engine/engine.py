"""One step of serving: schedule, target pass, verify, answer, draft, publish. One thread; no I/O of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from speccache_runtime.cache.lease import Lease
from speccache_runtime.cache.paired import PairedCache
from speccache_runtime.cache.pool import KVPool
from speccache_runtime.core import Finish, Output, Request
from speccache_runtime.engine.sampler import choose
from speccache_runtime.engine.threads import CpuThreads
from speccache_runtime.metrics import Metrics
from speccache_runtime.model.target import Target, TargetOutput
from speccache_runtime.scheduling.scheduler import Scheduler, Work
from speccache_runtime.scheduling.sequence import Sequence
from speccache_runtime.speculative.packing import Rows, pack
from speccache_runtime.speculative.proposer import DraftWork, Proposer
from speccache_runtime.speculative.verify import count_accepted
from speccache_runtime.tensors import send


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What the target said to one work item: its tokens, and how many proposals it accepted."""

    work: Work
    row: int
    tokens: list[int]
    accepted: int


class Engine:
    """Owns the models and the cache, and turns requests into outputs one step at a time.

    `emit` gets every output of every request; it is called inside `step`, `abort` and `fail_all`.
    """

    def __init__(
        self,
        *,
        target: Target,
        pool: KVPool,
        cache: PairedCache,
        proposer: Proposer | None,
        num_steps: int,
        max_running: int,
        prefill_budget: int,
        metrics: Metrics,
        emit: Callable[[Output], None],
    ) -> None:
        self._target = target
        self._pool = pool
        self._device = pool.k[0].device
        self._threads = CpuThreads(target.facts.parameters) if self._device.type == "cpu" else None
        self.cache = cache
        self._proposer = proposer
        self._num_steps = num_steps
        self._metrics = metrics
        self._emit = emit
        self._proposals: dict[str, Tensor] = {}
        self._sequences: dict[str, Sequence] = {}
        self._preemptions = 0
        self.scheduler = Scheduler(cache, max_running=max_running, prefill_budget=prefill_budget)

    # ---- requests

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._sequences)

    @property
    def speculates(self) -> bool:
        """Whether a draft proposes tokens."""
        return self._proposer is not None

    def add(self, request: Request) -> None:
        """Queues a request and starts to fetch its prefix from storage."""
        lease = Lease(self.cache.page_size)
        prefetch = self.cache.prefetch(lease, request.prompt)
        seq = Sequence(request, lease, prefetch, time.monotonic())
        self._sequences[request.request_id] = seq
        self._metrics.prompt_tokens.inc(len(request.prompt))
        self.scheduler.add(seq)

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> None:
        """Ends a request now with what it has, for the reason `finish`; ignores unknown ids."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            seq.finish = finish
            self._answer(seq, [])
            self._end(seq)

    def fail_all(self, error: str) -> None:
        """Ends every request with `error`; the engine cannot be used afterwards."""
        for seq in list(self._sequences.values()):
            del self._sequences[seq.request.request_id]
            if seq.finish is not None:
                continue  # answered in the step that failed
            self._metrics.requests.labels(finish=Finish.ERROR).inc()
            self._emit(Output(seq.request.request_id, (), Finish.ERROR, seq.usage(), error))

    # ---- one step

    def step(self) -> bool:
        """Computes one step; False when there was nothing that could be computed now."""
        self.cache.poll()
        work = self.scheduler.schedule()
        if not work:
            return False
        with torch.inference_mode():
            output = self._target_pass(work)
            chosen = self._choose(work, output)
            for item in chosen:
                self._apply(item)
            if self._proposer is not None:
                self._draft(chosen, output)
        self.cache.publish([(w.seq.lease, w.seq.tokens, w.seq.computed) for w in work])
        for seq in [w.seq for w in work if w.seq.finish is not None]:
            self._end(seq)
        return True

    def _target_pass(self, work: Seq[Work]) -> TargetOutput:
        tokens = torch.cat([self._row_tokens(w) for w in work])
        if self._threads is not None:
            self._threads.fit(len(tokens))
        rows = [Rows(w.seq.lease, w.start, w.rows) for w in work]
        packed = pack(rows, self._device, draft=False, before_layer=self.cache.wait_target_layer)
        return self._target.forward(tokens, packed.positions, self._pool, packed.attention)

    def _row_tokens(self, work: Work) -> Tensor:
        """The tokens at the positions that `work` computes, proposals included: int64 [rows] on the device."""
        seq = work.seq
        known = send(seq.tokens[work.start : work.start + work.rows], self._device)
        return torch.cat([known, self._proposals[seq.request.request_id]]) if seq.num_proposals else known

    def _choose(self, work: Seq[Work], output: TargetOutput) -> list[_Chosen]:
        """Samples every row that chooses a token and counts accepted proposals, with one transfer to the host."""
        first_rows, at = [], 0
        for w in work:
            first_rows.append(at)
            at += w.rows
        picks = [_picked_rows(w, row) for w, row in zip(work, first_rows, strict=True)]
        rows = [row for pick in picks for row in pick]
        if not rows:
            return [_Chosen(w, row, [], 0) for w, row in zip(work, first_rows, strict=True)]
        params = [w.seq.request.params for w, pick in zip(work, picks, strict=True) for _ in pick]
        positions = [
            w.start + row - first + 1 for w, first, pick in zip(work, first_rows, picks, strict=True) for row in pick
        ]
        logits = self._target.logits(output.hidden[send(rows, self._device)])
        tokens = choose(logits, params, positions)
        accepted = self._count_accepted(work, picks, tokens)
        flat = torch.cat([tokens, accepted]).tolist()
        out, at = [], 0
        for i, (w, pick) in enumerate(zip(work, picks, strict=True)):
            count = flat[len(rows) + i]
            out.append(_Chosen(w, first_rows[i], flat[at : at + count + 1] if pick else [], count))
            at += len(pick)
        return out

    def _count_accepted(self, work: Seq[Work], picks: Seq[range], tokens: Tensor) -> Tensor:
        """Accepted proposals per work item: int64 [len(work)] on the device."""
        width = max(w.seq.num_proposals for w in work)
        chosen = tokens.new_zeros(len(work), width + 1)
        proposed = tokens.new_zeros(len(work), width)
        at = 0
        for i, (w, pick) in enumerate(zip(work, picks, strict=True)):
            chosen[i, : len(pick)] = tokens[at : at + len(pick)]
            if w.seq.num_proposals:
                proposed[i, : w.seq.num_proposals] = self._proposals[w.seq.request.request_id]
            at += len(pick)
        counts = send([w.seq.num_proposals for w in work], self._device)
        return count_accepted(chosen, proposed, counts)

    def _apply(self, item: _Chosen) -> None:
        """Moves a sequence on by what the target chose, and answers."""
        work, seq = item.work, item.work.seq
        before = seq.num_generated
        seq.num_proposals = 0
        self._proposals.pop(seq.request.request_id, None)
        if not work.wants_token:
            seq.computed = work.start + work.rows
            return
        new = seq.append(item.tokens)
        # Accepted proposals are computed already; behind the end of a finished request nothing counts.
        computed = work.start + (1 + item.accepted if work.decode else work.rows)
        seq.computed = min(computed, len(seq.tokens))
        if work.decode:
            seq.counts.add(item.accepted, before, seq.num_generated)
        self._answer(seq, new)

    def _draft(self, chosen: Seq[_Chosen], output: TargetOutput) -> None:
        """Brings the draft up to date behind every work item and asks for the next proposals."""
        assert self._proposer is not None
        assert output.features is not None
        items, work = [], []
        for item in chosen:
            seq = item.work.seq
            upto = min(seq.computed, len(seq.tokens) - 1)
            if upto <= item.work.start:
                continue
            want = min(self._num_steps, seq.tokens_left - 1) if seq.decoding and seq.finish is None else 0
            next_tokens = seq.tokens[item.work.start + 1 : upto + 1]
            work.append(DraftWork(seq.lease, item.work.start, next_tokens, item.row, want))
            items.append(seq)
        if not work:
            return
        # Room for the slots that proposing writes; without it the next step runs without proposals.
        work = [w if self._has_room(w) else _without_proposals(w) for w in work]
        for seq, proposals in zip(items, self._proposer.propose(work, output.features), strict=True):
            seq.num_proposals = len(proposals)
            if len(proposals):
                self._proposals[seq.request.request_id] = proposals

    def _has_room(self, work: DraftWork) -> bool:
        return self.cache.grow(work.lease, work.start + len(work.next_tokens) + work.want)

    # ---- answers

    def _answer(self, seq: Sequence, tokens: list[int]) -> None:
        now = time.monotonic()
        if tokens:
            self._metrics.generated_tokens.inc(len(tokens))
            if seq.first_token_at is None:
                seq.first_token_at = now
                self._metrics.ttft.labels(source=seq.source).observe(now - seq.arrived)
            else:
                self._metrics.itl.observe(now - seq.last_token_at)
            seq.last_token_at = now
        usage = seq.usage() if seq.finish is not None else None
        if tokens or usage is not None:
            self._emit(Output(seq.request.request_id, tuple(tokens), seq.finish, usage))

    def _end(self, seq: Sequence) -> None:
        """Takes an answered sequence out and counts what it cost."""
        self.scheduler.finish(seq)
        self._proposals.pop(seq.request.request_id, None)
        del self._sequences[seq.request.request_id]
        assert seq.finish is not None
        metrics, counts, source = self._metrics, seq.counts, seq.source
        metrics.requests.labels(finish=seq.finish).inc()
        for tier, tokens in (seq.cached or {}).items():
            metrics.cached_tokens.labels(tier=tier).inc(tokens)
        if seq.num_generated > 1 and seq.first_token_at is not None:
            mean = (seq.last_token_at - seq.first_token_at) / (seq.num_generated - 1)
            metrics.tpot.labels(source=source).observe(mean)
        metrics.verify_steps.labels(source=source).inc(counts.verify_steps)
        metrics.verified_tokens.labels(source=source).inc(seq.num_generated if counts.verify_steps else 0)
        metrics.verify_steps_first64.labels(source=source).inc(counts.verify_steps_first64)
        metrics.verified_tokens_first64.labels(source=source).inc(counts.tokens_first64)

    def update_gauges(self) -> None:
        """Refreshes the gauges of queues and pages."""
        self._metrics.running.set(len(self.scheduler.running))
        self._metrics.waiting.set(len(self.scheduler.waiting))
        self._metrics.preemptions.inc(self.scheduler.preemptions - self._preemptions)
        self._preemptions = self.scheduler.preemptions
        self.cache.update_gauges()


def _picked_rows(work: Work, first: int) -> range:
    """Rows of the packed pass whose logits choose a token: every row when decoding, else the last or none."""
    if not work.wants_token:
        return range(0)
    return range(first, first + work.rows) if work.decode else range(first + work.rows - 1, first + work.rows)


def _without_proposals(work: DraftWork) -> DraftWork:
    return DraftWork(work.lease, work.start, work.next_tokens, work.feature_row, 0)
