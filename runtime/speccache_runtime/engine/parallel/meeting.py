"""How the ranks of a replica find each other: one process group per process, over the loopback interface."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from speccache_runtime.config import EngineConfig
from speccache_runtime.engine.parts import device_of
from speccache_runtime.errors import RankError
from speccache_runtime.model.collective import ProcessGroup

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def meet(config: EngineConfig, rank: int, store: Path, timeout: float) -> ProcessGroup:
    """Joins the group of all ranks, which meet by the file `store`; `leave` ends it.

    `timeout` seconds is also what each later operation may take. Raises RankError when the others do not come.
    """
    # Ranks are processes of one pod. A pod's own name may have no address, and nothing should leave it anyway.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = device_of(config, rank)
    try:
        dist.init_process_group(
            _BACKENDS[config.device],
            store=dist.FileStore(str(store), config.tensor),  # type: ignore[attr-defined]
            rank=rank,
            world_size=config.tensor,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {rank} cannot join the others: {error}") from error
    return ProcessGroup(rank, config.tensor)


def leave() -> None:
    """Ends this process's group, if it has one and that can be ended; the process must end soon after."""
    # NCCL's end waits for the other ranks, each in its own time, and for ever for a dead one; on two H200 neither it
    # nor its abort came back at all. The driver frees what a process had.
    if dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()
