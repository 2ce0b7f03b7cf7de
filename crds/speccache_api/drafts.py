"""What each algorithm's draft is: one table, which schema, inspection, sizing and runtime read.

A draft is described by facts, so that nothing else asks for an algorithm by its name. The runtime registers how each is
loaded under the same names (`speccache_runtime.speculative.kinds`, `speccache_runtime.model.inspect`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["None", "EAGLE3", "Standalone", "NGram"]
"""How tokens are proposed, or `None`: not at all."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What proposes tokens by one algorithm.

    `model`: it has weights, named by `draftModel`. `pool`: it keeps KV, so that pages have a draft half. `needs`: what
    it reads besides its own KV: the target's features, nothing but tokens, or nothing of the device at all.
    `lookahead`: how many of the tokens behind a slot its KV there depends on. `local`: its KV at a slot depends on
    nothing else of the draft's, so a slot computed behind a masked page is as good as any (a head of one layer); if
    not, it depends on the draft's KV of all slots before. `builtin`: which model of a `builtin://` pair serves as the
    draft.
    """

    model: bool
    pool: bool
    needs: Literal["features", "tokens", "nothing"]
    lookahead: int
    local: bool
    builtin: Literal["target", "draft"] = "draft"

    def __post_init__(self) -> None:
        if self.lookahead and not self.local:
            # The last slot of a shared page may have been made for another successor. That is harmless where it stays
            # alone, but here all slots behind would depend on it.
            raise ValueError("a draft that looks ahead must be local")

    @property
    def rebuilds(self) -> bool:
        """Whether an absent half is made anew from the request's tokens, whatever `missingDraft` says. The others need
        the target's features, which exist only while the target computes a slot.
        """
        return self.pool and self.needs == "tokens"


DRAFTS: dict[str, Draft] = {
    "EAGLE3": Draft(model=True, pool=True, needs="features", lookahead=1, local=True),
    "Standalone": Draft(model=True, pool=True, needs="tokens", lookahead=0, local=False, builtin="target"),
    "NGram": Draft(model=False, pool=False, needs="nothing", lookahead=0, local=True),
}
"""Every algorithm but `None`, which has no draft."""


def names(that: Callable[[Draft], bool] = lambda draft: True) -> tuple[str, ...]:
    """The algorithms whose draft is so, in the order of the table."""
    return tuple(name for name, draft in DRAFTS.items() if that(draft))


def any_of(that: Callable[[Draft], bool] = lambda draft: True) -> str:
    """The same as words for a message: `EAGLE3 or Standalone`."""
    return " or ".join(names(that))
