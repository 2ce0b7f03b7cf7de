"""Log lines as one JSON object each: a constant message plus fields, so that they can be searched without regexes."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_FIELDS = "speccache_fields"


class Formatter(logging.Formatter):
    """JSON lines; fields that `fields()` attached become members beside time, level, logger and message."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON, with the traceback as a member when there is one."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def fields(**values: Any) -> dict[str, Any]:
    """The `extra=` argument of a logging call that carries these fields."""
    return {_FIELDS: values}


def configure(level: str) -> None:
    """Send every logger's records to stderr as JSON lines. kopf's own chatter is cut to warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("kopf", "aiohttp", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLevelName(level)))
