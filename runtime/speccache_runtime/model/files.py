"""Reading a model directory without torch: its config.json and the headers of its weight files.

The inspection Job, the loaders and the tests all see a directory through this module, so a broken file has one message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccache_runtime.errors import ModelError

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_BIN = "pytorch_model.bin"

MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit; a larger number means that the file is something else."""

FLOAT_DTYPES = frozenset({"F32", "F16", "BF16", "F64"})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a safetensors file: its bytes are `[begin, end)` of `file`. `dtype` is the format's own name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one safetensors file as bytes, and its tensors in the order of their data."""

    raw: bytes
    tensors: tuple[TensorInfo, ...]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError if it is missing, unreadable, not JSON or not an object."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: no {path.name} found; a model directory must hold one") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object, found {type(data).__name__}")
    return data


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ModelError."""
    if not directory.is_dir():
        raise ModelError(f"{directory}: model directory not found")
    return read_json(directory / CONFIG)


def safetensors_files(directory: Path) -> tuple[Path, ...]:
    """The directory's safetensors files, sorted by name; empty if it has none.

    Raises ModelError if the index is broken or names a shard that is not there.
    """
    if (directory / SAFETENSORS).is_file():
        return (directory / SAFETENSORS,)
    index = directory / INDEX
    if not index.is_file():
        return ()
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ModelError(f"{index}: weight_map must map tensor names to file names")
    files = []
    for name in sorted(set(shards.values())):
        if Path(name).name != name:
            raise ModelError(f"{index}: shard {name!r} must be a file name without a folder")
        if not (directory / name).is_file():
            raise ModelError(f"{directory}: shard {name} is named in {INDEX} but missing")
        files.append(directory / name)
    return tuple(files)


def read_header(file: Path) -> Header:
    """Header of a safetensors file. Raises ModelError if the file is cut off or is something else."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{file}: truncated or not a safetensors file")
            raw = stream.read(length)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        entries = json.loads(raw)
        tensors = [_tensor(file, name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(f"{file}: broken safetensors header: {error}") from error
    end = max((tensor.end for tensor in tensors), default=8 + length)
    if end != size:
        kind = "truncated" if end > size else "longer than its header says"
        raise ModelError(f"{file}: {kind}: {size} bytes where the header needs {end}")
    return Header(raw=raw, tensors=tuple(sorted(tensors, key=lambda tensor: tensor.begin)))


def _tensor(file: Path, name: str, entry: dict[str, Any], data: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    if not 0 <= begin <= end:
        raise ValueError(f"{name} has offsets {begin}..{end}")
    return TensorInfo(name, str(entry["dtype"]), shape, file, data + int(begin), data + int(end))


def tensor_table(files: tuple[Path, ...]) -> dict[str, TensorInfo]:
    """All tensors of these files by name. Raises ModelError for a broken file or a name that two files hold."""
    table: dict[str, TensorInfo] = {}
    for file in files:
        for tensor in read_header(file).tensors:
            if tensor.name in table:
                raise ModelError(f"{file}: tensor {tensor.name} is also in {table[tensor.name].file.name}")
            table[tensor.name] = tensor
    return table


def reason(error: BaseException) -> str:
    """Why a library could not use a file, in one line."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return " ".join(str(error).split()) or type(error).__name__
