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
        self._on_host = torch.zeros(rows, max_pages, dtype=torch.int64)
        self._target = self._on_host if device.type == "cpu" else torch.zeros_like(self._on_host, device=device)
        self._draft = torch.zeros_like(self._target)
        self._lengths = [0] * rows
        self._draft_lengths = [0] * rows
        self._device = device

    def append(self, more: Table) -> None:
        """Adds pages to a row, or begins it anew."""
        row = more.row
        if more.at == 0:
            self._lengths[row] = self._draft_lengths[row] = 0
        assert self._lengths[row] == more.at, "a part of the page table was not sent"
        end = more.at + len(more.pages)
        pages = torch.tensor(more.pages, dtype=torch.int64)
        self._on_host[row, more.at : end] = pages
        if self._target is not self._on_host:
            self._target[row, more.at : end] = send(pages, self._device)
        self._lengths[row] = end
        at = self._draft_lengths[row]
        self._draft_lengths[row] = at + len(more.draft)
        if more.draft:
            self._draft[row, at : at + len(more.draft)] = send(more.draft, self._device)

    def absent_slots(self, row: int) -> int:
        """Slots of this row that the draft does not see. They lie before every slot that is computed."""
        return (self._lengths[row] - self._draft_lengths[row]) * self.page_size

    def pages(self, row: int, slots: int, *, draft: bool) -> Tensor:
        """The pages of the first `slots` slots, for the draft of those that it sees: int64 `[n]` on the device.

        A view; valid until the row begins anew.
        """
        table = self._draft if draft else self._target
        return table[row, : -(-slots // self.page_size)]

    def slots(self, row: int, start: int, count: int) -> Tensor:
        """Pool slots (page * page_size + offset) of positions [start, start + count): int64 `[count]` on the host.

        Raises IndexError for a position outside of the row's pages.
        """
        if start + count > self._lengths[row] * self.page_size:
            raise IndexError(f"row {row} has {self._lengths[row]} pages, not one for position {start + count - 1}")
        positions = torch.arange(start, start + count)
        return self._on_host[row, positions // self.page_size] * self.page_size + positions % self.page_size
