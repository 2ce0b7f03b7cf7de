"""How long a stored run is, in few rounds of questions.

A page is stored after the pages before it and removed before them, so what is there of a prompt is nearly always its
beginning. Then the end of n pages is found in O(log n) rounds of at most `ROUND` questions at once; where pages are
missing from the middle the answer may be too long, and the read that finds the hole ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

ROUND = 16
"""Questions of one round: a backend asks them in parallel."""


def first_positions(pages: int) -> list[int]:
    """The first round: all of a short run, else the last page and powers of two, since most runs are short or whole."""
    if pages <= ROUND:
        return list(range(pages))
    positions = {0, pages - 1}
    step = 1
    while step < pages - 1 and len(positions) < ROUND:
        positions.add(step)
        step *= 2
    return sorted(positions)


def positions_between(there: int, absent: int) -> list[int]:
    """A later round: up to ROUND pages spread over those after page `there` and before page `absent`."""
    between = absent - there - 1
    count = min(between, ROUND)
    return [there + (number + 1) * (between + 1) // (count + 1) for number in range(count)]


def run_length(pages: int, ask: Callable[[Sequence[int]], Sequence[bool] | None]) -> int:
    """How many leading pages of `pages` are there. `ask` answers for positions in ascending order, or None when storage
    cannot say: then the run ends with the last page that it was sure of."""
    there, absent = -1, pages
    positions = first_positions(pages)
    while positions:
        answers = ask(positions)
        if answers is None:
            break
        for position, found in zip(positions, answers, strict=True):
            if not found:
                absent = position
                break
            there = position
        positions = positions_between(there, absent)
    return there + 1
