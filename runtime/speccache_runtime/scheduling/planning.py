"""Turns the scheduler's work into a plan of integers for the runner."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from speccache_runtime.scheduling.scheduler import Work
from speccache_runtime.scheduling.sequence import Sequence
from speccache_runtime.steps import Group, StepPlan, Table


def make_plan(work: Seq[Work], *, lookahead: int) -> StepPlan:
    """The plan for `work`, in its order; notes in each sequence how much of its page table the runner has from now on.

    `lookahead` is how many following tokens the draft's KV of a position depends on.
    """
    tables = [table for w in work if (table := _table(w.seq)) is not None]
    decode = tuple(_group(w, lookahead) for w in work if w.decode)
    extend = tuple(_group(w, lookahead) for w in work if not w.decode)
    return StepPlan(tuple(tables), decode, extend)


def _table(seq: Sequence) -> Table | None:
    at, lease = seq.tabled, seq.lease
    pages, absent = lease.pages[at:], lease.draft_absent[at:]
    if not pages:
        return None
    seq.tabled = len(lease.pages)
    draft = tuple(page for page, gone in zip(pages, absent, strict=True) if not gone)
    return Table(seq.row, at, tuple(pages), draft)


def _group(work: Work, lookahead: int) -> Group:
    seq, held = work.seq, work.seq.num_proposals if work.decode else 0
    end = work.start + work.rows
    return Group(
        row=seq.row,
        start=work.start,
        tokens=tuple(seq.tokens[work.start : end - held]),
        held=held,
        parents=tuple(range(held)),
        chooses=work.wants_token,
        sampling=seq.request.params.sampling,
        behind=tuple(seq.tokens[end : end + lookahead]),
        propose=work.propose,
        left=seq.tokens_left,
        loads=work.loads,
    )
