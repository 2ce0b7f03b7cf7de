"""Which transfer fits the device that the pools are on. A GPU's needs triton, which is imported only there."""

from __future__ import annotations

from speccache_runtime.cache.pool import HostArena, KVPool
from speccache_runtime.cache.transfer import Transfer
from speccache_runtime.cache.transfer_cpu import CpuTransfer


def make_transfer(arena: HostArena, target: KVPool, draft: KVPool | None) -> Transfer:
    """The transfer between these pools and this arena, which it uses as long as it lives."""
    if target.device.type == "cuda":
        from speccache_runtime.cache.transfer_cuda import CudaTransfer

        return CudaTransfer(arena, target, draft)
    return CpuTransfer(arena, target, draft)
