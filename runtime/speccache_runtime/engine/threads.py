"""How many CPU threads a step is worth.

Handing a small matrix product to a second thread and waiting for it costs more than the product. A decode step of a
small model is a hundred such products: measured on two cores, one thread takes 10.4 ms for a verify round of the
built-in pair, two take 14.7. A prefill of the same model, or any step of a large one, is worth every core.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

SERIAL_FLOP = 2e8
"""Steps below this many floating-point operations (a few milliseconds of one core) run on one thread."""


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may keep busy: those it may run on, and no more than its pod's CPU limit allows.

    A pod without a limit, or a process outside a container, has no quota (cgroup v2, `cpu.max`). Of a fraction the
    whole part counts: a thread beyond the quota is stopped in the middle of a step, and the others wait for it.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except OSError:
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


class CpuThreads:
    """Chooses torch's threads step by step. Belongs to the thread that computes: torch's setting is per thread."""

    def __init__(self, parameters: int) -> None:
        self._flop_per_row = 2 * parameters
        self._all = min(torch.get_num_threads(), usable_cores())
        self._current = torch.get_num_threads()

    def fit(self, rows: int) -> None:
        """Sets the number of threads for a pass over `rows` tokens."""
        wanted = 1 if rows * self._flop_per_row < SERIAL_FLOP else self._all
        if wanted != self._current:
            torch.set_num_threads(wanted)
            self._current = wanted
