"""Turns positions of running requests into the tensors of one packed forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speccache_runtime.model.attention import AttentionBatch, Segment, no_wait
from speccache_runtime.model.tables import PageTables
from speccache_runtime.tensors import send


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive token positions [start, start + count) of the request in row `row` of the page tables."""

    row: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Packed:
    """`positions` [T] int64 on the device, and where the rows' KV goes and what they attend."""

    positions: Tensor
    attention: AttentionBatch


def pack(
    rows: Sequence[Rows],
    tables: PageTables,
    device: torch.device,
    *,
    draft: bool = False,
    before_layer: Callable[[int], None] = no_wait,
) -> Packed:
    """Packs `rows` in order. With `draft`, pages whose draft half is absent are not attended.

    Absent pages lie before every row that is computed, so leaving them out keeps the causal order of the rest.
    """
    segments: list[Segment] = []
    positions: list[int] = []
    slots: list[int] = []
    for row in rows:
        kv_len = row.start + row.count - (tables.absent_slots(row.row) if draft else 0)
        pages = tables.pages(row.row, kv_len, draft=draft)
        segments.append(Segment(len(positions), row.count, pages, kv_len))
        positions += range(row.start, row.start + row.count)
        slots += tables.slots(row.row, row.start, row.count)
    where = send([positions, slots], device)
    return Packed(where[0], AttentionBatch(where[1], tuple(segments), before_layer))
