"""One request as the scheduler sees it: its tokens, how far they are computed, and what it has cost."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from speccache_runtime.cache.lease import Lease, Prefetch
from speccache_runtime.core import Finish, Request, Tier, Usage


class Status(enum.Enum):
    """WAITING -> (LOADING ->) RUNNING -> FINISHED; a preempted sequence goes back to WAITING. Only the scheduler
    changes it. LOADING is a running sequence whose cached pages are still on their way to the device.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Counts:
    """What the speculative loop did for one sequence; see `core.Usage` for the meaning."""

    verify_steps: int = 0
    verify_steps_first64: int = 0
    tokens_first64: int = 0
    accepted_by_step: list[int] = field(default_factory=list)

    def add(self, accepted: int, tokens_before: int, tokens_after: int) -> None:
        """Counts one verify step that took the number of generated tokens from `tokens_before` to `tokens_after`."""
        self.verify_steps += 1
        self.accepted_by_step.append(accepted)
        if tokens_before < 64:
            self.verify_steps_first64 += 1
            self.tokens_first64 = tokens_after


class Sequence:
    """Positions of a running sequence:

        tokens     0 ............... computed ............ len(tokens)
                   | target KV valid | to compute (prefill: many; decoding: the newest token alone)
        proposals                                          | num_proposals suggested tokens follow
        draft      0 ... drafted                             draft KV valid, but for masked pages

    `drafted` is the draft's cursor: `computed`, less for a draft that is still making up for halves that were absent,
    one more for one that does not look ahead. `proposals` are those that the engine made; the runner keeps the others.
    `lease` holds its device pages, `prefetch` its wait for storage; both belong to the cache. While it runs, `row` is
    its place in the runner, whose page table for it has `tabled` of the lease's pages.
    """

    def __init__(self, request: Request, lease: Lease, prefetch: Prefetch | None, arrived: float) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.computed = 0
        self.drafted = 0
        self.num_proposals = 0
        self.proposals: tuple[int, ...] = ()
        self.row = -1
        self.tabled = 0
        self.status = Status.WAITING
        self.lease = lease
        self.prefetch = prefetch
        self.cached: dict[Tier, int] | None = None
        self.draft_absent = 0
        self.rebuilds = False
        """Whether the absent halves are made anew, instead of masked."""
        self.counts = Counts()
        self.arrived = arrived
        self.first_token_at: float | None = None
        self.last_token_at = arrived
        self.finish: Finish | None = None

    @property
    def num_generated(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def tokens_left(self) -> int:
        """How many more tokens the request may generate."""
        return self.request.params.max_tokens - self.num_generated

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is not computed."""
        return self.computed == len(self.tokens) - 1 and self.num_generated > 0

    def append(self, new: list[int]) -> list[int]:
        """Adds generated tokens up to the first that ends the request; returns those added and sets `finish`."""
        taken: list[int] = []
        for token in new[: self.tokens_left]:
            taken.append(token)
            if token in self.request.params.stop_token_ids:
                self.finish = Finish.STOP
                break
        self.tokens += taken
        if self.finish is None and self.tokens_left == 0:
            self.finish = Finish.LENGTH
        return taken

    @property
    def source(self) -> str:
        """Where its prefix came from: the slowest tier used or `cold`; if draft halves were absent, `degraded`, or
        `rebuilt` if they are made anew."""
        if self.draft_absent:
            return "rebuilt" if self.rebuilds else "degraded"
        used = [tier.value for tier in Tier if (self.cached or {}).get(tier)]
        return used[-1] if used else "cold"

    def usage(self) -> Usage:
        """What the request has used so far."""
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.num_generated,
            cached_tokens=dict(self.cached or {}),
            draft_absent_tokens=self.draft_absent,
            verify_steps=self.counts.verify_steps,
            tokens_first64=self.counts.tokens_first64,
            verify_steps_first64=self.counts.verify_steps_first64,
            accepted_by_step=tuple(self.counts.accepted_by_step),
        )
