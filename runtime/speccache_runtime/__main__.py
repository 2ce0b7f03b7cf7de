"""`python -m speccache_runtime` and the `speccache-runtime` command."""

from __future__ import annotations

import os
import signal
import sys

EXIT_TERMINATED = 128 + signal.SIGTERM


def main() -> int:
    """Run the command line; returns its exit code."""
    # Before anything is imported: a container's first process loses a signal that it has no handler for.
    signal.signal(signal.SIGTERM, _end)
    from speccache_runtime.cli import main as run

    code = run()
    if _group_left():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _group_left() -> bool:
    """Whether ranks on GPUs are still a group: torch would end it when the interpreter ends, and never come back."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _end(_number: int, _frame: object) -> None:
    """SIGTERM until the command has a handler of its own: nothing has begun that would have to be finished."""
    if sys.argv[1:2] == ["serve"]:
        os.write(sys.stdout.fileno(), b"stopped\n")
        os._exit(0)
    os._exit(EXIT_TERMINATED)


if __name__ == "__main__":
    raise SystemExit(main())
