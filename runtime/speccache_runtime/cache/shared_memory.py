"""Memory that all ranks of a replica map: there once, however many read it.

It is a file without a name, which rank 0 makes before it starts the others and which they inherit. No file system has
it, so no mount limits its size; it counts as memory of the pod as any other, and is gone with the last process.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor


class SharedMemory:
    """`fd` is the open file. The owner writes the memory, the others only read it."""

    def __init__(self, fd: int, *, owner: bool) -> None:
        """Owns `fd` from here on."""
        self.fd = fd
        self.owner = owner

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """New memory of zeros. Other processes get it by inheriting `fd`."""
        fd = os.memfd_create("speccache-host")
        os.ftruncate(fd, nbytes)
        return cls(fd, owner=True)

    @property
    def nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    def map(self) -> Tensor:
        """All of it as uint8 `[nbytes]`; valid as long as the tensor, also after `close`."""
        return torch.frombuffer(mmap.mmap(self.fd, self.nbytes), dtype=torch.uint8)

    def close(self) -> None:
        """Closes the file."""
        os.close(self.fd)
