"""Page moves on an NVIDIA GPU: one Triton kernel that reads or writes the page-locked host pages in place.

Host pages are page-first (all layers of a page together, as storage wants them), device pools are layer-first (as
attention wants them). A gather kernel over page-locked memory reaches more than nine tenths of the copy engine at any
page size, so no staging buffer and no third layout is needed; one call to the copy engine per page would be several
times slower for small pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from speccache_runtime.cache.pool import HostArena, KVPool
from speccache_runtime.cache.transfer import HalfCopy, Job, Move, halves
from speccache_runtime.tensors import send

_WORD = 8  # bytes per element that the kernel moves
_TILE = 2048  # elements that one program has in flight: 16 KiB
_PROGRAMS = 16  # programs per launch: they fill the link (see docs/benchmarks.md), the other SMs stay with the model


# Compiled once for all numbers of pages: a variant for each kind of number would cost a request its compilation.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["items"], do_not_specialize_on_alignment=["dst_pages", "src_pages"]
)
def _move_pages(  # type: ignore[no-untyped-def]
    dst, src, dst_pages, src_pages, dst_stride, src_stride, words, tiles, items, TILE: tl.constexpr
):
    """dst[dst_pages[i], :words] = src[src_pages[i], :words] in 8-byte words; strides in words.

    An item is one tile of one page; there are `items` = pages * `tiles` of them, dealt out to the programs in turn.
    """
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        page = item // tiles
        column = (item % tiles) * TILE + tl.arange(0, TILE)
        from_row = tl.load(src_pages + page) * src_stride
        to_row = tl.load(dst_pages + page) * dst_stride
        inside = column < words
        tl.store(dst + to_row + column, tl.load(src + from_row + column, mask=inside), mask=inside)


class _EventJob:
    """A job whose parts are known by events on its stream."""

    def __init__(
        self,
        nbytes: int,
        began: torch.cuda.Event,
        layers: list[torch.cuda.Event],
        ended: torch.cuda.Event,
        keep: list[Tensor],
    ) -> None:
        self.nbytes = nbytes
        self._began, self._layers, self._ended = began, layers, ended
        self._keep = keep  # index tensors must outlive the kernels that read them

    @property
    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1e3

    def done(self) -> bool:
        return bool(self._ended.query())

    def wait_target_layer(self, layer: int) -> None:
        torch.cuda.current_stream().wait_event(self._layers[layer])

    def wait_draft(self) -> None:
        torch.cuda.current_stream().wait_event(self._ended)


class _Half:
    """A half in words: of each buffer the device's rows, and the host's rows from where it begins in them."""

    def __init__(self, half: HalfCopy) -> None:
        rows = half.host.rows.view(torch.int64)
        self.owned = half.host.owned
        self.words = [(view.view(torch.int64), rows[:, start // _WORD :]) for view, start, _ in half.columns]


class CudaTransfer:
    """Backups and loads each have a stream, so that a load never waits for a backup."""

    def __init__(self, arena: HostArena, target: KVPool, draft: KVPool | None) -> None:
        self._device = target.device
        target_half, draft_half = halves(arena, target, draft)
        self._target = _Half(target_half)
        self._draft = _Half(draft_half) if draft_half else None
        self._layer_of = [b.layer for b in target.layout.buffers]
        self._num_layers = target.layout.num_layers
        self._backup_stream = torch.cuda.Stream(self._device)
        self._load_stream = torch.cuda.Stream(self._device)

    def backup(self, moves: Sequence[Move]) -> Job:
        return self._run(moves, self._backup_stream, to_host=True)

    def load(self, moves: Sequence[Move]) -> Job:
        return self._run(moves, self._load_stream, to_host=False)

    def _run(self, moves: Sequence[Move], stream: torch.cuda.Stream, *, to_host: bool) -> Job:
        both = [m for m in moves if m.draft]
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        layers = [torch.cuda.Event() for _ in range(self._num_layers)]
        keep: list[Tensor] = []
        nbytes = 0
        # What the compute stream still writes (backup) or reads (load into a page it just gave up) comes first.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            began.record()
            device_pages, host_pages = self._numbers(moves, keep)
            if self._target.owned or not to_host:
                for at, (view, host) in enumerate(self._target.words):
                    nbytes += self._launch(view, host, device_pages, host_pages, to_host)
                    layers[self._layer_of[at]].record()
            if both and self._draft and (self._draft.owned or not to_host):
                device_pages, host_pages = self._numbers(both, keep)
                for view, host in self._draft.words:
                    nbytes += self._launch(view, host, device_pages, host_pages, to_host)
            ended.record()
        return _EventJob(nbytes, began, layers, ended, keep)

    def _numbers(self, moves: Sequence[Move], keep: list[Tensor]) -> tuple[Tensor, Tensor]:
        both = send([[m.device for m in moves], [m.host for m in moves]], self._device)
        keep.append(both)
        return both[0], both[1]

    def _launch(self, view: Tensor, host: Tensor, device_pages: Tensor, host_pages: Tensor, to_host: bool) -> int:
        """Starts the copy of one buffer of these pages; the bytes that it moves."""
        words = view.shape[1]
        dst, src = (host, view) if to_host else (view, host)
        dst_pages, src_pages = (host_pages, device_pages) if to_host else (device_pages, host_pages)
        tiles = triton.cdiv(words, _TILE)
        items = tiles * len(device_pages)
        _move_pages[(min(items, _PROGRAMS),)](
            dst, src, dst_pages, src_pages, dst.stride(0), src.stride(0), words, tiles, items, TILE=_TILE
        )
        return words * _WORD * len(device_pages)
