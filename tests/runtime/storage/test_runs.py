"""Where a stored run ends, found with few questions."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from speccache_runtime.cache.storage.runs import ROUND, run_length


class Asked:
    """Answers that page is there below `end`, and counts rounds; the round number `fails` gets no answer."""

    def __init__(self, end: int, fails: int | None = None) -> None:
        self.end = end
        self.fails = fails
        self.rounds = 0

    def __call__(self, positions: Sequence[int]) -> list[bool] | None:
        assert 1 <= len(positions) <= ROUND
        assert list(positions) == sorted(set(positions))
        self.rounds += 1
        return None if self.rounds == self.fails else [position < self.end for position in positions]


@given(st.integers(0, 5000), st.data())
def test_the_end_of_a_run_without_holes_is_found_exactly(pages: int, data: st.DataObject) -> None:
    ask = Asked(data.draw(st.integers(0, pages)))
    assert run_length(pages, ask) == ask.end
    assert ask.rounds <= 5


@given(st.integers(1, 5000), st.data())
def test_no_answer_ends_the_run_with_what_was_sure(pages: int, data: st.DataObject) -> None:
    ask = Asked(data.draw(st.integers(0, pages)), fails=data.draw(st.integers(1, 4)))
    assert 0 <= run_length(pages, ask) <= ask.end


@given(st.lists(st.booleans(), max_size=300))
def test_with_holes_it_ends_behind_a_page_that_is_there(there: list[bool]) -> None:
    found = run_length(len(there), lambda positions: [there[position] for position in positions])
    assert found == 0 or there[found - 1]
    if len(there) <= ROUND:
        assert found == next((i for i, page in enumerate(there) if not page), len(there))


def test_short_and_whole_runs_cost_one_round() -> None:
    for pages, end in ((ROUND, 3), (ROUND, ROUND), (2000, 2000), (2000, 0), (2000, 1)):
        ask = Asked(end)
        assert run_length(pages, ask) == end
        assert ask.rounds == 1
