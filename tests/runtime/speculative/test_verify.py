"""Counting accepted proposals."""

import torch
from hypothesis import given
from hypothesis import strategies as st

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
