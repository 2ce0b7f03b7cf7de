"""How many CPU threads a step is worth.

Handing a small matrix product to a second thread and waiting for it costs more than the product. A decode step of a
small model is a hundred such products: measured on two cores, one thread takes 10.4 ms for a verify round of the
built-in pair, two take 14.7. A prefill of the same model, or any step of a large one, is worth every core.
"""

from __future__ import annotations

import torch

SERIAL_FLOP = 2e8
"""Steps below this many floating-point operations (a few milliseconds of one core) run on one thread."""


class CpuThreads:
    """Chooses torch's threads step by step. Belongs to the thread that computes: torch's setting is per thread."""

    def __init__(self, parameters: int) -> None:
        self._flop_per_row = 2 * parameters
        self._all = torch.get_num_threads()
        self._current = self._all

    def fit(self, rows: int) -> None:
        """Sets the number of threads for a pass over `rows` tokens."""
        wanted = 1 if rows * self._flop_per_row < SERIAL_FLOP else self._all
        if wanted != self._current:
            torch.set_num_threads(wanted)
            self._current = wanted
