"""One step of serving: schedule, plan, run, answer, draft, publish. One thread; no I/O and no tensors of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from speccache_api.drafts import Draft
from speccache_runtime.cache.keys import salted_root
from speccache_runtime.cache.lease import Lease
from speccache_runtime.cache.paired import PairedCache
from speccache_runtime.core import Finish, Output, Request
from speccache_runtime.metrics import Metrics
from speccache_runtime.scheduling.planning import make_plan
from speccache_runtime.scheduling.scheduler import Scheduler, Work
from speccache_runtime.scheduling.sequence import Sequence
from speccache_runtime.steps import Chosen, StepPlan, StepResult


class StepRunner(Protocol):
    """What an engine needs of a runner (`runner.Runner`, or `parallel.leader.LeadRunner` when there are several)."""

    def submit(self, plan: StepPlan) -> None: ...
    def result(self) -> StepResult: ...
    def propose(self, ended: frozenset[int]) -> tuple[int, ...]: ...


class Lookup(Protocol):
    """Proposes from the tokens of one request alone (`speculative.ngram.PromptLookup`)."""

    def propose(self, tokens: Seq[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow `tokens`, which have only been added to since the last call."""


class Engine:
    """Decides what is computed, and turns requests into outputs one step at a time; the runner computes.

    `emit` gets every output of every request; it is called inside `step`, `abort` and `fail_all`.
    """

    def __init__(
        self,
        *,
        runner: StepRunner,
        cache: PairedCache,
        num_steps: int,
        max_running: int,
        prefill_budget: int,
        metrics: Metrics,
        emit: Callable[[Output], None],
        draft: Draft | None = None,
        lookup: Callable[[], Lookup] | None = None,
    ) -> None:
        """`num_steps` is the most proposals that a request gets at once, `draft` what makes them: 0 and None without
        speculation. `lookup` makes a request's own proposer, if they are made here and not by the runner."""
        self._lookahead = draft.lookahead if draft else 0
        self._make_lookup = lookup
        self._lookups: dict[Sequence, Lookup] = {}
        self._runner = runner
        self.cache = cache
        self._metrics = metrics
        self._emit = emit
        self._sequences: dict[str, Sequence] = {}
        self._preemptions = 0
        self.scheduler = Scheduler(
            cache, max_running=max_running, prefill_budget=prefill_budget, num_steps=num_steps, draft=draft
        )

    # ---- requests

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._sequences)

    def add(self, request: Request) -> None:
        """Queues a request and starts to fetch its prefix from storage."""
        lease = Lease(self.cache.page_size, salted_root(request.salt))
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
        self._runner.submit(make_plan(work, lookahead=self._lookahead))
        for item, chosen in zip(work, self._runner.result().chosen, strict=True):
            self._apply(item, chosen)
        ended = frozenset(w.seq.row for w in work if w.seq.finish is not None)
        for item, proposed in zip(work, self._runner.propose(ended), strict=True):
            item.seq.num_proposals = proposed
        if self._make_lookup is not None:
            self._look_up(work)
        self.cache.publish([(w.seq.lease, w.seq.tokens, w.seq.computed, w.seq.drafted) for w in work])
        for seq in [w.seq for w in work if w.seq.finish is not None]:
            self._end(seq)
        return True

    def _look_up(self, works: list[Work]) -> None:
        """Proposals that are integers from the beginning: the next plan holds them."""
        assert self._make_lookup is not None
        for work in works:
            seq = work.seq
            if not work.wants_token or seq.finish is not None:
                continue
            if seq not in self._lookups:
                self._lookups[seq] = self._make_lookup()
            most = min(work.propose, seq.tokens_left - 1)
            seq.proposals = self._lookups[seq].propose(seq.tokens, most) if most > 0 else ()
            seq.num_proposals = len(seq.proposals)

    def _apply(self, work: Work, chosen: Chosen) -> None:
        """Moves a sequence on by what the target chose, and answers."""
        seq = work.seq
        before = seq.num_generated
        if not work.wants_token:
            seq.computed = work.start + work.rows
            self.scheduler.drafting.advance(seq, work.draft)
            return
        new = seq.append(list(chosen.tokens))
        # Accepted proposals are computed already; behind the end of a finished request nothing counts.
        computed = work.start + (1 + chosen.accepted if work.decode else work.rows)
        seq.computed = min(computed, len(seq.tokens))
        self.scheduler.drafting.advance(seq, work.draft)
        if work.decode:
            seq.counts.add(chosen.accepted, before, seq.num_generated)
        self._answer(seq, new)

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
        self._lookups.pop(seq, None)
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
