"""Who may use the admin port: whoever sends the token. It is read from its file for every request, so that a changed
Secret counts at once, and without a token nobody may."""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from speccache_runtime.server.errors import ApiError

logger = logging.getLogger(__name__)

MAX_TOKEN_BYTES = 4096


class OnlyWithToken:
    """Answers every request without `Authorization: Bearer TOKEN` itself; nothing of it gets further."""

    def __init__(self, app: ASGIApp, token_path: Path) -> None:
        self._app = app
        self._token_path = token_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            check_token(Headers(scope=scope).getlist("authorization"), self._token_path)
        except ApiError as error:
            answer = error.response()
            if error.status == 401:
                answer.headers["WWW-Authenticate"] = "Bearer"
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


def check_token(authorization: list[str], token_path: Path) -> None:
    """Raises ApiError: 401 unless there is one header and it has the token, 503 when there is no token to compare."""
    token = _read(token_path)
    scheme, _, given = (authorization[0] if len(authorization) == 1 else "").partition(" ")
    # Digests, so that neither the time nor the length of the comparison depends on the token.
    right = hmac.compare_digest(_digest(given.strip().encode("latin-1")), _digest(token))
    if scheme.lower() != "bearer" or not right:
        raise ApiError(401, "send the admin token as `Authorization: Bearer TOKEN`", code="unauthorized")


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _read(path: Path) -> bytes:
    """The token without the white space around it."""
    reason = "is empty"
    token = b""
    try:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
    if len(token) > MAX_TOKEN_BYTES:
        reason, token = f"is longer than {MAX_TOKEN_BYTES} bytes", b""
    if not token:
        logger.warning("the admin port refuses everybody: its token %s %s", path, reason)
        raise ApiError(503, "there is no admin token; check the Secret of spec.admin.tokenSecret", code="no_token")
    return token
