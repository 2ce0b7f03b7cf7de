"""Page tables of the running requests: which device page holds which tokens, for the target and for the draft.

They live on the device, one row per request, and are only ever added to, so that a step sends what is new and not
hundreds of page numbers per request. A mirror on the host serves what is computed there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speccache_runtime.steps import Table
from speccache_runtime.tensors import send


class PageTables:
    """Tables of `rows` requests with at most `max_pages` pages each. Engine thread only."""

    def __init__(self, rows: int, max_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self._pages: list[list[int]] = [[] for _ in range(rows)]
        self._target = torch.zeros(rows, max_pages, dtype=torch.int64, device=device)
        self._draft = torch.zeros_like(self._target)
        self._draft_lengths = [0] * rows
        self._device = device

    def append(self, more: Table) -> None:
        """Adds pages to a row, or begins it anew."""
        row = more.row
        if more.at == 0:
            self._pages[row], self._draft_lengths[row] = [], 0
        assert len(self._pages[row]) == more.at, "a part of the page table was not sent"
        self._pages[row] += more.pages
        self._target[row, more.at : more.at + len(more.pages)] = send(more.pages, self._device)
        at = self._draft_lengths[row]
        self._draft_lengths[row] = at + len(more.draft)
        if more.draft:
            self._draft[row, at : at + len(more.draft)] = send(more.draft, self._device)

    def absent_slots(self, row: int) -> int:
        """Slots of this row that the draft does not see. They lie before every slot that is computed."""
        return (len(self._pages[row]) - self._draft_lengths[row]) * self.page_size

    def pages(self, row: int, slots: int, *, draft: bool) -> Tensor:
        """The pages of the first `slots` slots, for the draft of those that it sees: int64 `[n]` on the device.

        A view; valid until the row begins anew.
        """
        table = self._draft if draft else self._target
        return table[row, : -(-slots // self.page_size)]

    def slots(self, row: int, start: int, count: int) -> list[int]:
        """Pool slots (page * page_size + offset) of positions [start, start + count).

        Raises IndexError for a position outside of the row's pages.
        """
        size, pages = self.page_size, self._pages[row]
        if start + count > len(pages) * size:
            raise IndexError(f"row {row} has {len(pages)} pages, not one for position {start + count - 1}")
        slots: list[int] = []
        at = start
        while at < start + count:
            page, offset = divmod(at, size)
            end = min(size, offset + start + count - at)
            slots += range(pages[page] * size + offset, pages[page] * size + end)
            at += end - offset
        return slots
