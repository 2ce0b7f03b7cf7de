"""The bytes of a request as a JSON object, or a 400 that says where they are wrong.

Where two names of one object are equal the last one counts, as with common JSON parsers: the fast parser does not tell,
and reading every body a second time would more than double what a large one costs on the event loop.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic_core import from_json

from speccache_runtime.errors import unicode_fault
from speccache_runtime.server.errors import ApiError, bad_field, field_path


def json_object(raw: bytes) -> dict[str, Any]:
    """Raises ApiError (400)."""
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise _named(raw) or ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


class _TooLong:
    """Stands for a number with more digits than Python reads."""


def _named(raw: bytes) -> ApiError | None:
    """The field at fault where the body is JSON but holds a value that the fast parser does not take."""
    try:
        body = json.loads(raw.decode(), parse_int=_integer)
    except (ValueError, RecursionError):
        return None
    left: list[tuple[tuple[int | str, ...], object]] = [((), body)]
    while left:
        location, value = left.pop()
        reason = _fault(value) or (_fault(location[-1]) if location else None)
        if reason is not None:
            path = field_path(location)
            return bad_field(path or None, f"{path}: {reason}" if path else reason, "invalid_value")
        if isinstance(value, dict | list):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            left += reversed([((*location, part), item) for part, item in parts])
    return None


def _integer(digits: str) -> int | _TooLong:
    return int(digits) if len(digits) <= sys.get_int_max_str_digits() else _TooLong()


def _fault(value: object) -> str | None:
    if isinstance(value, _TooLong):
        return "the number has too many digits"
    return unicode_fault(value) if isinstance(value, str) else None
