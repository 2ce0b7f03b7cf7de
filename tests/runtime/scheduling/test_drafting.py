"""Drafts that are behind: what they make up for in which step. Leases are real, pages are flags."""

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from speccache_api.drafts import DRAFTS
from speccache_runtime.cache.lease import Lease
from speccache_runtime.core import Request, SamplingParams
from speccache_runtime.scheduling.drafting import Drafting
from speccache_runtime.scheduling.sequence import Sequence

PAGE = 4


@dataclass(eq=False)
class Entry:
    """What a lease asks of a page that is known."""

    draft_on_device: bool


def admitted(drafting: Drafting, pages: list[tuple[int, Entry]], extra: int = 3) -> Sequence:
    """A sequence whose hit is `pages`, with a few tokens more to compute."""
    lease = Lease(PAGE)
    numbers, entries = [number for number, _ in pages], [entry for _, entry in pages]
    lease.add([*numbers, 1000 + id(lease) % 1000], [*entries, None], [False] * (len(pages) + 1))  # type: ignore[list-item]
    tokens = tuple(range(len(pages) * PAGE + extra))
    seq = Sequence(Request(str(id(lease)), tokens, SamplingParams(max_tokens=50)), lease, None, 0.0)
    seq.computed = len(pages) * PAGE
    drafting.admit(seq)
    return seq


@given(
    st.lists(st.booleans(), max_size=8),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(1, 20),
)
def test_every_absent_half_is_made_once_in_order_and_within_the_budget(
    present: list[bool], requests: list[tuple[int, int]], budget: int
) -> None:
    """Requests share the beginning of one prefix. A page counts as made when the cursor is behind its end."""
    drafting = Drafting(DRAFTS["Standalone"])
    shared = [(number, Entry(has)) for number, has in enumerate(present)]
    seqs = [admitted(drafting, shared[: min(hit, len(shared))]) for hit, _ in requests]
    for seq in seqs:
        assert seq.drafted == PAGE * next(
            (n for n, entry in enumerate(seq.lease.entries) if entry is None or not entry.draft_on_device), 0
        )
    made: list[int] = []
    for _ in range(200):
        drafting.begin()
        left, before = budget, len(made)
        for seq in seqs:
            took = drafting.catch_up(seq, left)
            left -= took
            made += range(seq.drafted, seq.drafted + took)
        assert left >= 0
        for seq in seqs:
            share = drafting.share(seq, 0, chooses=False)
            if share is not None and seq.drafted < seq.computed:
                drafting.advance(seq, share)
            for page, entry in enumerate(seq.lease.entries):
                if entry is not None and (page + 1) * PAGE <= seq.drafted:
                    entry.draft_on_device = True
        if len(made) == before:
            break
    assert all(seq.drafted == seq.computed for seq in seqs), "a draft stays behind for ever"
    reach = max((min(hit, len(shared)) for hit, _ in requests), default=0)
    wanted = [page * PAGE + n for page in range(reach) if not present[page] for n in range(PAGE)]
    assert sorted(made) == wanted, "a half was made twice, or not, or although it was there"


def test_a_draft_that_is_behind_neither_follows_nor_proposes() -> None:
    drafting = Drafting(DRAFTS["Standalone"])
    seq = admitted(drafting, [(0, Entry(False)), (1, Entry(False))])
    drafting.begin()
    assert drafting.catch_up(seq, 5) == 5
    share = drafting.share(seq, 3, chooses=True)
    assert share is not None
    assert (share.rows, share.follows) == (5, False)
    assert drafting.behind(seq, share)
    drafting.advance(seq, share)
    assert seq.drafted == 5
    drafting.begin()
    assert drafting.catch_up(seq, 5) == 3
    share = drafting.share(seq, 3, chooses=True)
    assert share is not None
    assert (share.rows, share.follows) == (6, True), "what it lacked, then what the target computes"
    assert not drafting.behind(seq, share)


def test_a_head_is_never_behind() -> None:
    """It takes what the target computes; masked pages stay so."""
    drafting = Drafting(DRAFTS["EAGLE3"])
    seq = admitted(drafting, [(0, Entry(False)), (1, Entry(False))])
    assert seq.drafted == seq.computed == 2 * PAGE
    drafting.begin()
    assert drafting.catch_up(seq, 100) == 0
    share: Any = drafting.share(seq, 3, chooses=True)
    assert (share.rows, share.follows) == (2, True), "its KV of the last token waits for the chosen one"


def test_without_kv_there_is_nothing_to_do() -> None:
    for draft in (None, DRAFTS["NGram"]):
        drafting = Drafting(draft)
        seq = admitted(drafting, [(0, Entry(False))])
        drafting.begin()
        assert drafting.catch_up(seq, 100) == 0
        assert drafting.share(seq, 3, chooses=True) is None
        assert not drafting.behind(seq, None)
