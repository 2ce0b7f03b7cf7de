"""Log lines of the runtime: one constant message and its fields, so that they can be read and searched."""

from __future__ import annotations

import logging
import sys

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class FieldFormatter(logging.Formatter):
    """`2026-01-31T12:00:00 WARNING drain: requests aborted after timeout requests=3`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={value}" for name, value in record.__dict__.items() if name not in _STANDARD]
        return " ".join([super().formatMessage(record), *fields])


def set_up_logging(level: int = logging.INFO) -> None:
    """Everything of `level` and above to standard error. Call once, from a command."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FieldFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    # uvicorn's own messages about starting and stopping repeat ours.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
