"""Number formats by name, and small index tensors sent to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speccache_api.geometry import KVDtype

TORCH_DTYPES: dict[KVDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def send(values: Sequence[int] | Sequence[Sequence[int]] | Tensor, device: torch.device) -> Tensor:
    """`values` as int64 on `device`; on a CPU a tensor is returned as it is.

    The copy is queued, not waited for. That is safe from ordinary memory: the driver has staged the bytes when the call
    returns. A plain `.to(device)` would wait for everything that is queued on the device, many times a step.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return tensor.to(device, non_blocking=True)
