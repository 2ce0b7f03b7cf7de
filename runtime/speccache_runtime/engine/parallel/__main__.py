"""The process of a rank behind rank 0, which starts it: `python -m speccache_runtime.engine.parallel FD`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from speccache_runtime.engine.parallel.channel import Channel
from speccache_runtime.imports import large_imports
from speccache_runtime.logs import set_up_logging

with large_imports():
    from speccache_runtime.engine.parallel.follower import follow


def main() -> int:
    """Follows rank 0 over the inherited socket FD; the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a drain goes on until rank 0 says stop
    set_up_logging()
    try:
        follow(Channel(socket.socket(fileno=int(sys.argv[1]))))
    except Exception:
        logging.getLogger(__name__).exception("rank %s failed", os.environ.get("SPECCACHE_RANK"))
        return 1
    return 0


if __name__ == "__main__":
    # Threads that hang in storage must not keep the process; nothing is left to be flushed.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
