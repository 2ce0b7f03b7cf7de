"""An object's bytes between the caller's memory and the socket, without a second copy of them on the way.

Both ways go below what botocore offers for it, which costs a copy of every page:

* Download: `StreamingBody.readinto` lets urllib3 make a bytes object of that length and copies it over. The answer of
  http.client below has a `readinto` that receives into the caller's memory.
* Upload: botocore puts bytes into a file of its own and reads that in blocks of 128 KiB, a copy of each; and an object
  is two buffers, header and page, which would have to be joined for it. `Upload` is a file that answers with slices of
  the caller's memory, longer than it was asked for: http.client gives to the socket whatever `read` returns.
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Sequence
from typing import Any

SLICE_BYTES = 256 << 10
"""What is given to the socket at once, and so must be sent within one timeout."""


class Upload:
    """A file made of the caller's buffers, as botocore wants a request's body."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._slices = [
            buffer[start : start + SLICE_BYTES] for buffer in buffers for start in range(0, len(buffer), SLICE_BYTES)
        ]
        self._length = sum(map(len, buffers))
        self._next = 0

    def __len__(self) -> int:
        return self._length

    def read(self, size: int = -1) -> memoryview | bytes:
        """The next slice, however long; empty at the end."""
        if self._next == len(self._slices):
            return b""
        self._next += 1
        return self._slices[self._next - 1]

    def tell(self) -> int:
        """How much was read."""
        return sum(map(len, self._slices[: self._next]))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Back to the start, for another attempt; nobody asks for anything else."""
        if (offset, whence) != (0, os.SEEK_SET):
            raise OSError("an upload can only be sent again from its start")
        self._next = 0
        return 0


def receive(body: Any, buffers: Sequence[memoryview]) -> bool:
    """Fill the buffers with the body of a GetObject answer; False when it ended before.

    The connection goes back to its pool if the body ends with the buffers. The caller closes `body`.
    """
    raw = body._raw_stream  # the answer of urllib3 ...
    answer: http.client.HTTPResponse = raw._fp  # ... and of http.client
    for buffer in buffers:
        while buffer:
            count = answer.readinto(buffer)
            if not count:
                return False
            buffer = buffer[count:]
    if answer.isclosed():
        raw.release_conn()
    return True
