"""One step as numbers: what the engine decides, and what a runner answers. No torch, no I/O, nothing but integers and
the three numbers that say how a request samples.

A `StepPlan` holds all that a runner needs beside its own memory (pools, page tables, held proposals), so that the same
plan run by every rank of a replica does the same thing on each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from speccache_runtime.core import Sampling


@dataclass(frozen=True, slots=True)
class Table:
    """More pages for the page table of one request.

    `row` is the request's place in the runner, `at` how many pages its table holds already; with 0 the table begins
    anew. `pages` are device page numbers in the order of the tokens, `draft` those of them that the draft may see.
    """

    row: int
    at: int
    pages: tuple[int, ...]
    draft: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What the draft computes of one request behind the target's pass: slots [start, start + tokens).

    `tokens` are known before the step: the draft's KV at slot `start + i` takes the i-th of them, which is the token
    at that slot or, for a draft that looks ahead, the one so many behind it. With `follows`, those that the target
    chooses in this step come after them, and proposals can be made; without, the draft has not caught up.
    """

    start: int
    tokens: tuple[int, ...]
    follows: bool


NO_ROWS = DraftRows(0, (), follows=False)
"""The draft does nothing for this request."""


@dataclass(frozen=True, slots=True)
class Group:
    """One request's rows of a pass: positions [start, start + rows).

    `tokens` are known to the engine: when decoding the newest token, then the proposals that the engine made. `held`
    proposals follow them, which the runner made itself and keeps for this row.
    `parents` has an entry for each proposal (`tokens` behind the first, when decoding, and the held ones): the row of
    this group that it follows. Today's drafts make chains, so it is (0, 1, 2, ...), and a runner refuses others.

    A decoding group chooses a token behind each of its rows, an extending one behind its last row, if `chooses`.
    Slot s of the request lies in page `s // page_size` of its table, at `s % page_size`.

    `draft` are the rows of the draft on the device, if there is one and it has something to do. `propose` is how many
    proposals are wanted of it afterwards, at most; there is room for as many slots. `left` is how many tokens the
    request may still generate, those of this step included. `loads` are the jobs that bring its pages.
    """

    row: int
    start: int
    tokens: tuple[int, ...]
    held: int
    parents: tuple[int, ...]
    chooses: bool
    sampling: Sampling
    draft: DraftRows
    propose: int
    left: int
    loads: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Positions that are computed."""
        return len(self.tokens) + self.held


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `decode` and `extend` are separate passes of the target; only `extend` waits for loads."""

    tables: tuple[Table, ...]
    decode: tuple[Group, ...]
    extend: tuple[Group, ...]

    def groups(self) -> Iterator[Group]:
        """All groups, in the order of the result's."""
        yield from self.decode
        yield from self.extend


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the target said to one group: `accepted` of its proposals are right, and these are the new `tokens`.

    A decoding group gets `accepted` + 1 tokens, an extending one that chooses gets one, another gets none.
    """

    tokens: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """One `Chosen` for every group of the plan, in the order of `StepPlan.groups`."""

    chosen: tuple[Chosen, ...]
