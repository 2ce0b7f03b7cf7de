"""Page tables, and the packing of a step's rows."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speccache_runtime.model.packing import Rows, pack
from speccache_runtime.model.tables import PageTables
from speccache_runtime.steps import Table

CPU = torch.device("cpu")
PAGE = 4


class Request:
    """Scattered pages, of which some of the first have no draft half."""

    def __init__(self, pages: list[int], absent: list[bool]) -> None:
        self.pages = pages
        self.absent = absent + [False] * (len(pages) - len(absent))

    def table(self, row: int, start: int, end: int) -> Table:
        """The piece of its page table from page `start` to `end`."""
        pages = self.pages[start:end]
        draft = [page for page, gone in zip(pages, self.absent[start:end], strict=True) if not gone]
        return Table(row, start, tuple(pages), tuple(draft))


def tables(requests: list[Request], pieces: int = 1) -> PageTables:
    """Page tables that were filled in so many pieces, over what other requests had left."""
    made = PageTables(len(requests), 24, PAGE, CPU)
    for row, request in enumerate(requests):
        made.append(Table(row, 0, tuple(range(24)), tuple(range(20))))
        count = len(request.pages)
        bounds = [count * n // pieces for n in range(pieces + 1)]
        for start, end in itertools.pairwise(bounds):
            made.append(request.table(row, start, end))
    return made


@st.composite
def requests(draw: st.DrawFn) -> tuple[Request, int, int]:
    """A request and rows of it behind its shared pages."""
    shared, private = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    pages = draw(st.permutations(range(20)))[: shared + private]
    request = Request(pages, draw(st.lists(st.booleans(), min_size=shared, max_size=shared)))
    slots = len(pages) * PAGE
    start = draw(st.integers(shared * PAGE, slots - 1))
    return request, start, draw(st.integers(1, slots - start))


@given(st.lists(requests(), min_size=1, max_size=4), st.booleans(), st.integers(1, 3))
def test_every_row_attends_what_lies_before_it_and_nothing_absent(
    work: list[tuple[Request, int, int]], draft: bool, pieces: int
) -> None:
    known = tables([request for request, _, _ in work], pieces)
    rows = [Rows(row, start, count) for row, (_, start, count) in enumerate(work)]
    packed = pack(rows, known, CPU, draft=draft)
    batch, at = packed.attention, 0
    for (request, start, count), segment in zip(work, batch.segments, strict=True):
        assert (segment.start, segment.length) == (at, count)
        attended = [page * PAGE + offset for page in segment.pages.tolist() for offset in range(PAGE)][: segment.kv_len]
        assert len(attended) == segment.kv_len
        for row in range(count):
            position = start + row
            assert packed.positions[at + row] == position
            assert batch.slots[at + row] == request.pages[position // PAGE] * PAGE + position % PAGE
            seen = attended[: segment.kv_len - count + row + 1]
            expected = [
                request.pages[p // PAGE] * PAGE + p % PAGE
                for p in range(position + 1)
                if not (draft and request.absent[p // PAGE])
            ]
            assert seen == expected
            assert seen[-1] == batch.slots[at + row]
        at += count
    assert len(batch.slots) == at


def test_layers_are_announced_to_whoever_waits_for_loads() -> None:
    seen: list[int] = []
    packed = pack([Rows(0, 0, 2)], tables([Request([3], [])]), CPU, before_layer=seen.append)
    packed.attention.before_layer(1)
    assert seen == [1]


def test_a_row_outside_of_its_pages_is_an_error() -> None:
    with pytest.raises(IndexError):
        pack([Rows(0, 3, 2)], tables([Request([3], [])]), CPU)


@given(st.integers(1, 5), st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), st.data())
def test_slots_follow_the_pages_in_the_order_of_the_tokens(
    page_size: int, pages: list[int], data: st.DataObject
) -> None:
    split = data.draw(st.integers(0, len(pages)))
    absent = data.draw(st.lists(st.booleans(), min_size=split, max_size=split))
    known = PageTables(1, len(pages), page_size, CPU)
    kept = [page for page, gone in zip(pages[:split], absent, strict=True) if not gone]
    known.append(Table(0, 0, tuple(pages[:split]), tuple(kept)))
    known.append(Table(0, split, tuple(pages[split:]), tuple(pages[split:])))
    slots = len(pages) * page_size
    start = data.draw(st.integers(0, slots - 1))
    rows = data.draw(st.integers(1, slots - start))
    expected = [pages[i // page_size] * page_size + i % page_size for i in range(start, start + rows)]
    assert known.slots(0, start, rows) == expected
    assert known.pages(0, slots, draft=False).tolist() == pages
    assert known.absent_slots(0) == sum(absent) * page_size
    assert known.pages(0, slots - known.absent_slots(0), draft=True).tolist() == kept + pages[split:]
