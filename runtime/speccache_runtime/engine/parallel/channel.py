"""Messages over a socket between two processes of one pod: length first, then JSON."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from speccache_runtime.engine.parallel.messages import Message, decode, encode
from speccache_runtime.errors import RankError

MAX_BYTES = 256 << 20
"""Longest message. The longest real one is a load of all pages of a large host tier, some 20 bytes a page."""

SEND_TIMEOUT_S = 60.0
"""How long a rank may leave its messages unread before it counts as hanging: a step is far shorter."""

_LENGTH = struct.Struct("<I")


class Channel:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        """Owns the socket from here on."""
        self._socket = connection
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_TIMEOUT_S), 0))
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends a message. Raises RankError when the other end is gone or does not read."""
        data = encode(message)
        if len(data) > MAX_BYTES:
            raise RankError(f"a message of {len(data)} bytes is longer than {MAX_BYTES}")
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise RankError(f"a rank cannot be reached: {error}") from error

    def receive(self) -> Message | None:
        """The next message; None when the other end has closed, cleanly between two messages. Waits for ever: silence
        is the normal state, and a process that ends closes its end."""
        head = self._read(_LENGTH.size)
        if not head:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > MAX_BYTES:
            raise RankError(f"a rank announced a message of {size} bytes")
        data = self._read(size)
        if len(data) < size:
            raise RankError("a rank ended in the middle of a message")
        return decode(data)

    def _read(self, size: int) -> bytes:
        """`size` bytes, or none if the other end closes before the first."""
        parts, missing = [], size
        while missing:
            try:
                part = self._socket.recv(min(missing, 1 << 20))
            except ConnectionResetError:
                part = b""
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        got = b"".join(parts)
        if got and missing:
            raise RankError("a rank ended in the middle of a message")
        return got

    def close(self) -> None:
        """Ends the connection, also for a thread that receives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
