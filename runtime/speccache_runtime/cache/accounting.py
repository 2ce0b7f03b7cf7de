"""What the cache tells of itself: lookups per tier, and pages per state."""

from __future__ import annotations

from collections.abc import Sequence

from speccache_runtime.cache.index import Entry, Index
from speccache_runtime.core import Tier
from speccache_runtime.metrics import Metrics


def count_lookups(
    metrics: Metrics, wanted: int, found: Sequence[Entry], draft_present: Sequence[bool], absent: str
) -> None:
    """Counts one admission that looked for `wanted` pages, of which the tiers knew `found`.

    `draft_present` has an item for each page that is used, `absent` says what becomes of those without. Call it before
    pages are loaded: then an entry without device page is a hit of the host.
    """
    on_device = sum(entry.device is not None for entry in found)
    for tier, half, result, count in (
        (Tier.DEVICE, "target", "hit", on_device),
        (Tier.DEVICE, "target", "miss", wanted - on_device),
        (Tier.HOST, "target", "hit", len(found) - on_device),
        (Tier.HOST, "target", "miss", wanted - len(found)),
        (Tier.HOST, "draft", "clamped", len(found) - len(draft_present)),
        (Tier.HOST, "draft", absent, sum(not present for present in draft_present)),
    ):
        if count:
            metrics.page_lookups.labels(tier=tier, half=half, result=result).inc(count)


class PageGauges:
    """The gauges of both tiers' pages, and the counters of their evictions."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._evicted = {Tier.DEVICE: 0, Tier.HOST: 0}

    def refresh(self, index: Index) -> None:
        """Brings them up to date with `index`."""
        for tier, pages in ((Tier.DEVICE, index.device), (Tier.HOST, index.host)):
            states = {"free": pages.num_free, "cached": len(pages.evictable)}
            states["in_use"] = pages.total - sum(states.values())
            for state, count in states.items():
                self._metrics.pages.labels(tier=tier, state=state).set(count)
            self._metrics.evicted_pages.labels(tier=tier).inc(pages.evictions - self._evicted[tier])
            self._evicted[tier] = pages.evictions
