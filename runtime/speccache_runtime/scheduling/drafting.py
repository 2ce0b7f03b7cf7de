"""What the draft computes in a step, behind the target's pass: integers only.

in step      the slots that the target computes, those of the tokens it chooses among them; then it can propose
behind       pages of the hit had no draft half: the draft makes them from the tokens, piece by piece, while the
             target goes on without proposals. Only a draft that reads nothing but tokens can be behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from speccache_api.drafts import Draft
from speccache_runtime.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DraftShare:
    """`rows` slots from the sequence's draft cursor on, of tokens that are known; with `follows` also those that the
    target chooses in this step."""

    rows: int
    follows: bool


class Drafting:
    """Decides it for one draft, step by step."""

    def __init__(self, draft: Draft | None) -> None:
        self._draft = draft if draft is not None and draft.pool else None
        self._rebuilds = self._draft is not None and self._draft.rebuilds
        self._pieces: dict[Sequence, int] = {}
        self._pages: set[int] = set()

    @property
    def spare(self) -> int:
        """Slots that a request needs behind those that the target computes: the draft's, of the newest token."""
        return max(0, 1 - self._draft.lookahead) if self._draft else 0

    def begin(self) -> None:
        """A new step."""
        self._pieces.clear()
        self._pages.clear()

    def admit(self, seq: Sequence) -> None:
        """Sets the draft's cursor of a sequence that was just admitted."""
        seq.drafted = seq.lease.first_undrafted(0) if self._rebuilds else seq.computed
        seq.rebuilds = self._rebuilds

    def catch_up(self, seq: Sequence, budget: int) -> int:
        """Gives a sequence that is behind at most `budget` slots of this step; returns how many it took.

        Pages that somebody else has made or brought meanwhile are passed over, and what another request makes in this
        very step is waited for.
        """
        if not self._rebuilds or seq.drafted >= seq.computed or seq in self._pieces:
            return 0
        lease = seq.lease
        seq.drafted = lease.first_undrafted(seq.drafted)
        rows = min(budget, lease.undrafted_run(seq.drafted, seq.computed, self._pages))
        if rows <= 0:
            return 0
        first, last = seq.drafted // lease.page_size, (seq.drafted + rows - 1) // lease.page_size
        self._pages.update(lease.pages[first : last + 1])
        self._pieces[seq] = rows
        return rows

    def share(self, seq: Sequence, known: int, *, chooses: bool) -> DraftShare | None:
        """The draft's part of a step in which the target computes `known` slots of known tokens, from `computed` on."""
        if self._draft is None:
            return None
        behind = seq.computed - seq.drafted
        if behind > 0:
            rows = self._pieces.get(seq, 0)
            if rows < behind:
                return DraftShare(rows, follows=False) if rows else None
        end = min(seq.computed + known, len(seq.tokens) - self._draft.lookahead)
        return DraftShare(end - seq.drafted, follows=chooses)

    def behind(self, seq: Sequence, share: DraftShare | None) -> bool:
        """Whether the draft will not have caught up at the end of this step, so that it cannot propose."""
        return self._draft is not None and (share is None or not share.follows)

    def advance(self, seq: Sequence, share: DraftShare | None) -> None:
        """Moves the cursor over what the draft has computed, after the chosen tokens were added to the sequence."""
        if share is None or self._draft is None:
            return
        if share.follows:
            seq.drafted = len(seq.tokens) - self._draft.lookahead
        else:
            seq.drafted += share.rows
