"""Counting accepted proposals, and the packing of a step's rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speccache_runtime.cache.lease import Lease
from speccache_runtime.speculative.packing import Rows, pack
from speccache_runtime.speculative.verify import count_accepted

CPU = torch.device("cpu")


def accepted_one_by_one(chosen: list[int], proposed: list[int]) -> int:
    """The definition: walk along the proposals until the target would have said something else."""
    for n, (ours, theirs) in enumerate(zip(chosen, proposed, strict=False)):
        if ours != theirs:
            return n
    return len(proposed)


ROWS = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), min_size=6, max_size=6)))


@given(ROWS.filter(bool), st.integers(0, 2))
def test_accepted_proposals_are_those_before_the_first_difference(
    rows: list[tuple[list[int], list[int]]], filler: int
) -> None:
    width = max(len(proposed) for proposed, _ in rows)
    chosen = torch.tensor([row[: width + 1] for _, row in rows])
    padded = torch.tensor([p + [filler] * (width - len(p)) for p, _ in rows]).view(len(rows), width).long()
    counts = torch.tensor([len(p) for p, _ in rows])
    expected = [accepted_one_by_one(row, proposed) for proposed, row in rows]
    assert count_accepted(chosen, padded, counts).tolist() == expected


def test_without_proposals_nothing_is_accepted() -> None:
    found = count_accepted(torch.tensor([[3], [4]]), torch.empty(2, 0, dtype=torch.int64), torch.tensor([0, 0]))
    assert found.tolist() == [0, 0]


PAGE = 4


@st.composite
def leases(draw: st.DrawFn) -> tuple[Lease, int, int]:
    """A lease with scattered pages, some of the shared ones without draft half, and rows behind the shared pages."""
    shared, private = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    pages = draw(st.permutations(range(20)))[: shared + private]
    lease = Lease(PAGE)
    lease.add(pages[:shared], [None] * shared, draw(st.lists(st.booleans(), min_size=shared, max_size=shared)))
    lease.add(pages[shared:], [None] * private, [False] * private)
    start = draw(st.integers(shared * PAGE, lease.num_slots - 1))
    return lease, start, draw(st.integers(1, lease.num_slots - start))


@given(st.lists(leases(), min_size=1, max_size=4), st.booleans())
def test_every_row_attends_what_lies_before_it_and_nothing_absent(
    work: list[tuple[Lease, int, int]], draft: bool
) -> None:
    packed = pack([Rows(*w) for w in work], CPU, draft=draft, before_layer=lambda layer: None)
    batch, at = packed.attention, 0
    for (lease, start, count), segment in zip(work, batch.segments, strict=True):
        assert (segment.start, segment.length) == (at, count)
        attended = [page * PAGE + offset for page in segment.pages.tolist() for offset in range(PAGE)][: segment.kv_len]
        assert len(attended) == segment.kv_len
        for row in range(count):
            position = start + row
            assert packed.positions[at + row] == position
            assert batch.slots[at + row] == lease.pages[position // PAGE] * PAGE + position % PAGE
            seen = attended[: segment.kv_len - count + row + 1]
            expected = [
                lease.pages[p // PAGE] * PAGE + p % PAGE
                for p in range(position + 1)
                if not (draft and lease.draft_absent[p // PAGE])
            ]
            assert seen == expected
            assert seen[-1] == batch.slots[at + row]
        at += count
    assert len(batch.slots) == at


def test_layers_are_announced_to_whoever_waits_for_loads() -> None:
    lease, seen = Lease(PAGE), []
    lease.add([3], [None], [False])
    packed = pack([Rows(lease, 0, 2)], CPU, draft=False, before_layer=seen.append)
    packed.attention.before_layer(1)
    assert seen == [1]


def test_a_row_outside_of_its_pages_is_an_error() -> None:
    lease = Lease(PAGE)
    lease.add([3], [None], [False])
    with pytest.raises(IndexError):
        pack([Rows(lease, 3, 2)], CPU, draft=False, before_layer=lambda layer: None)
