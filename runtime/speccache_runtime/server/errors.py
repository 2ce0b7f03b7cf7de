"""The one border where errors become answers in OpenAI's shape.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Clients branch on the status and on `code`, people read `message`, and `param` names the field to change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.responses import JSONResponse

from speccache_runtime.errors import BadRequest, Draining, Unavailable

RETRY_AFTER_LOADING = 2
"""Seconds a client should wait while the model loads; loading a small model takes about this long."""


CLIENT_GONE = 499
"""The status for a client that left before its answer: written to nobody, only seen in logs."""


MAX_NAME = 64
"""Characters shown of a field name that nobody knows; it may be as long as a body."""

_PLAIN = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME}}}")


class ApiError(Exception):
    """An answer that is not a result. `param` is the request field at fault, as the client wrote it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error object; also what a stream sends when it breaks after its headers have left."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers: Mapping[str, str] | None = None
        if self.retry_after is not None:
            headers = {"Retry-After": str(self.retry_after)}
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def loading() -> ApiError:
    """The answer to every request before the model is loaded."""
    message = "loading: the model is not loaded yet"
    return ApiError(503, message, code="loading", retry_after=RETRY_AFTER_LOADING)


def bad_field(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def from_validation(error: ValidationError) -> ApiError:
    """The first problem pydantic found, with the field's path as a client would write it: `messages[1].role`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = field_path(first["loc"])
    if first["type"] == "extra_forbidden":
        return bad_field(path, f"{path}: this field is not known; remove it", "unknown_parameter")
    if first["type"] == "missing":
        return bad_field(path, f"{path}: this field is required", "missing_required_parameter")
    message = first["msg"]
    return bad_field(path or None, f"{path}: {message}" if path else message, "invalid_value")


def field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 1, "role")` → `messages[1].role`. Names that are no plain words are quoted and cut to one line."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part if _PLAIN.fullmatch(part) else ascii(part[:MAX_NAME])
            path += f".{name}" if path else name
    return path


def from_bad_request(error: BadRequest, param: str) -> ApiError:
    """`param` is what the client calls the field at fault."""
    return bad_field(param, f"{param}: {error}", error.code)


def from_unavailable(error: Unavailable) -> ApiError:
    """503 with Retry-After: the same request may succeed later, or now on another replica."""
    code = "draining" if isinstance(error, Draining) else "overloaded"
    return ApiError(503, str(error), code=code, retry_after=error.retry_after)
