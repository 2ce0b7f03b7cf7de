"""The device pages of one request, in the order of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from speccache_runtime.cache.index import Entry
from speccache_runtime.cache.keys import KeyChain
from speccache_runtime.tensors import send


class Lease:
    """Which device pages a request uses, who owns each, and which of their draft halves are absent.

        pages      0 .......... shared .......... | ...... private ......
        entries    pinned entries of the index    | None: owned by this request until published

    A private page that was published but equals one that another request published first stays private.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.chain = KeyChain(page_size)
        self.pages: list[int] = []
        self.entries: list[Entry | None] = []
        self.draft_absent: list[bool] = []
        self.published = 0
        self._numbers: Tensor | None = None
        self._tables: dict[bool, Tensor] = {}

    @property
    def num_slots(self) -> int:
        """Token slots that the pages hold."""
        return len(self.pages) * self.page_size

    @property
    def num_absent(self) -> int:
        """Pages whose draft half is absent; all of them lie before the private pages."""
        return sum(self.draft_absent)

    def add(self, pages: list[int], entries: list[Entry | None], draft_absent: list[bool]) -> None:
        """Appends pages; the three lists have one item per page."""
        self.pages += pages
        self.entries += entries
        self.draft_absent += draft_absent
        self._numbers = None
        self._tables.clear()

    def clear(self) -> None:
        """Forgets all pages; the caller has given them back."""
        self.pages, self.entries, self.draft_absent = [], [], []
        self.published = 0
        self._numbers = None
        self._tables.clear()

    def private_pages(self) -> list[int]:
        """Pages that this request owns."""
        return [page for page, entry in zip(self.pages, self.entries, strict=True) if entry is None]

    def slots(self, start: int, rows: int) -> Tensor:
        """Pool slots (page * page_size + offset) of token positions [start, start + rows): int64 [rows] on the CPU."""
        if self._numbers is None:
            self._numbers = torch.tensor(self.pages, dtype=torch.int64)
        positions = torch.arange(start, start + rows)
        return self._numbers[positions // self.page_size] * self.page_size + positions % self.page_size

    def table(self, device: torch.device, *, draft: bool) -> Tensor:
        """Page numbers as int64 on `device`; for the draft without the pages whose draft half is absent.

        Valid until the next `add`.
        """
        if draft not in self._tables:
            pages = self.pages
            if draft:
                pages = [p for p, absent in zip(self.pages, self.draft_absent, strict=True) if not absent]
            self._tables[draft] = send(pages, device)
        return self._tables[draft]
