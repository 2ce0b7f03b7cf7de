"""Decisions about cached pages, as pure functions over what is known of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence


class MissingDraft(enum.StrEnum):
    """What to do with a target hit whose draft halves are absent and can only be made with the target's features.

    RECOMPUTE gives the hit up from the first page that is not a whole pair, so the draft's KV is built anew with the
    target's. DEGRADE keeps the hit; the absent pages are masked out of the draft's attention, which costs accept
    length, not correctness.
    """

    RECOMPUTE = "Recompute"
    DEGRADE = "Degrade"


def usable_pages(draft_present: Sequence[bool], answer: MissingDraft, *, rebuilds: bool = False) -> int:
    """How many leading pages of a target hit to use; `draft_present` has one item per page of the hit.

    A draft that `rebuilds` makes absent halves anew from tokens: nothing has to be given up for it.
    """
    if rebuilds or answer is MissingDraft.DEGRADE:
        return len(draft_present)
    for page, present in enumerate(draft_present):
        if not present:
            return page
    return len(draft_present)


def cacheable_pages(num_tokens: int, page_size: int) -> int:
    """How many whole pages of a prompt a hit may cover.

    The last token is always computed: its logits give the next token, and its features the first proposal.
    """
    return max(0, num_tokens - 1) // page_size


def publishable_pages(num_tokens: int, computed: int, page_size: int, lookahead: int) -> int:
    """How many leading pages are final: their KV is computed and the `lookahead` tokens behind them are known."""
    return max(0, min(computed, num_tokens - lookahead)) // page_size
