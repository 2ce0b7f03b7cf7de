"""Turns the scheduler's work into a plan of integers for the runner."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from speccache_runtime.scheduling.scheduler import Work
from speccache_runtime.scheduling.sequence import Sequence
from speccache_runtime.steps import NO_ROWS, DraftRows, Group, StepPlan, Table


def make_plan(work: Seq[Work], *, lookahead: int) -> StepPlan:
    """The plan for `work`, in its order; notes in each sequence how much of its page table the runner has from now on.

    `lookahead` is how many of the tokens behind a slot the draft's KV there depends on.
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
    seq = work.seq
    proposed = seq.num_proposals if work.decode else 0
    end = work.start + work.rows - proposed
    return Group(
        row=seq.row,
        start=work.start,
        tokens=(*seq.tokens[work.start : end], *seq.proposals),
        held=proposed - len(seq.proposals),
        parents=tuple(range(proposed)),
        chooses=work.wants_token,
        sampling=seq.request.params.sampling,
        draft=_draft(work, lookahead),
        propose=work.propose,
        left=seq.tokens_left,
        loads=work.loads,
    )


def _draft(work: Work, lookahead: int) -> DraftRows:
    share, first = work.draft, work.seq.drafted + lookahead
    if share is None:
        return NO_ROWS
    return DraftRows(work.seq.drafted, tuple(work.seq.tokens[first : first + share.rows]), share.follows)
