"""Turns the scheduler's work into the tensors of one packed forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speccache_runtime.cache.lease import Lease
from speccache_runtime.model.attention import AttentionBatch, Segment
from speccache_runtime.tensors import send


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive token positions [start, start + count) of one request."""

    lease: Lease
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Packed:
    """`positions` [T] int64 on the device, and where the rows' KV goes and what they attend."""

    positions: Tensor
    attention: AttentionBatch


def pack(rows: Sequence[Rows], device: torch.device, *, draft: bool, before_layer: Callable[[int], None]) -> Packed:
    """Packs `rows` in order. With `draft`, pages whose draft half is absent are not attended.

    Absent pages lie before every row that is computed, so leaving them out keeps the causal order of the rest.
    """
    segments, positions, slots, at = [], [], [], 0
    for row in rows:
        lease = row.lease
        absent = lease.num_absent * lease.page_size if draft else 0
        kv_len = row.start + row.count - absent
        pages = lease.table(device, draft=draft)[: -(-kv_len // lease.page_size)]
        segments.append(Segment(at, row.count, pages, kv_len))
        positions.append(torch.arange(row.start, row.start + row.count))
        slots.append(lease.slots(row.start, row.count))
        at += row.count
    where = send(torch.stack([torch.cat(positions), torch.cat(slots)]), device)
    return Packed(where[0], AttentionBatch(where[1], tuple(segments), before_layer))
