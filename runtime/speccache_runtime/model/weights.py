"""Streams a model's weights from disk to its device, one tensor at a time.

Only one tensor is held twice at any moment, so loading a model needs its size in memory, not two or three times that.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speccache_runtime.errors import ModelError
from speccache_runtime.model.files import FLOAT_DTYPES, SAFETENSORS, TORCH_BIN, safetensors_files, tensor_table
from speccache_runtime.model.split import Split


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint: `part` is what this rank needs of it, on the CPU and in the dtype it is stored in;
    `shape` is that of the whole.

    `part` may refer to the mapped file: copy what is kept (see `own`).
    """

    name: str
    shape: tuple[int, ...]
    part: Tensor


def stream_weights(directory: Path, split: Split) -> Iterator[Stored]:
    """Yields all weights, of each the part of `split`; no more than that is read of a safetensors file.

    Raises ModelError for missing or broken files and for quantised weights.
    """
    files = safetensors_files(directory)
    if files:
        yield from _from_safetensors(files, split)
    elif (directory / TORCH_BIN).is_file():
        yield from _from_torch(directory / TORCH_BIN, split)
    else:
        raise ModelError(f"{directory}: no weights found; expected {SAFETENSORS} (or its shards with an index)")


def _from_safetensors(files: tuple[Path, ...], split: Split) -> Iterator[Stored]:
    table = tensor_table(files)
    for file in files:
        names = [info.name for info in table.values() if info.file == file]
        with _open(file) as opened:
            for name in names:
                _refuse_quantised(name, table[name].dtype, file)
                shape = table[name].shape
                part = opened.get_slice(name)[split(name, shape)] if shape else opened.get_tensor(name)
                yield Stored(name, shape, part)


@contextlib.contextmanager
def _open(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error


def _from_torch(file: Path, split: Split) -> Iterator[Stored]:
    """A pickled checkpoint, read with pickle's tensors-only subset: nothing in the file can run code."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(
            f"{file}: cannot be read as a torch checkpoint of plain tensors: {_first_line(error)}"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ModelError(f"{file}: must hold a dictionary of tensors")
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        yield Stored(str(name), shape, tensor[split(str(name), shape)])


def own(tensor: Tensor, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A contiguous copy on `device` that does not refer to the file; floating-point numbers in `dtype`."""
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device=device, dtype=wanted, copy=True).contiguous()


def _refuse_quantised(name: str, dtype: str, file: Path) -> None:
    if dtype.startswith("F") and dtype not in FLOAT_DTYPES:
        raise ModelError(f"{file}: tensor {name} is stored as {dtype}; quantised weights are not served yet")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
