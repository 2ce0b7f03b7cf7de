"""Proposals by looking up the end of a text in the text itself."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccache_runtime.speculative.ngram import LONGEST, PromptLookup

TOKENS = st.lists(st.sampled_from([0, 1, 2, 256, 65536, 2**24]), max_size=40)
"""Few tokens, so that much repeats itself; their bytes look alike when they are shifted."""


def plain(tokens: Sequence[int], most: int) -> tuple[int, ...]:
    """The same in the most obvious way."""
    for length in range(min(LONGEST, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                text = list(tokens)
                for number in range(most):
                    text.append(text[start + length + number])
                return tuple(text[len(tokens) :])
    return ()


@given(TOKENS, st.integers(1, 8))
def test_it_is_the_last_place_of_the_longest_end(tokens: list[int], most: int) -> None:
    assert PromptLookup().propose(tokens, most) == plain(tokens, most)


@given(TOKENS, st.lists(st.integers(1, 5), max_size=12))
def test_a_growing_text_is_looked_up_as_a_whole(tokens: list[int], pieces: list[int]) -> None:
    lookup, end = PromptLookup(), 0
    for piece in pieces:
        end = min(len(tokens), end + piece)
        assert lookup.propose(tokens[:end], 4) == plain(tokens[:end], 4)


@pytest.mark.parametrize(
    ("tokens", "proposed"),
    [
        ([], ()),
        ([5], ()),
        ([5, 6, 7], ()),
        ([5, 6, 7, 5], (6, 7, 5, 6)),
        ([5, 5], (5, 5, 5, 5)),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], (9, 2, 3, 8)),
        ([2, 3, 9, 2, 3, 8, 2, 3], (8, 2, 3, 8)),
    ],
)
def test_examples(tokens: list[int], proposed: tuple[int, ...]) -> None:
    assert PromptLookup().propose(tokens, 4) == proposed
