"""What all routes of one server share, and the answer to "may this request come in now?"."""

from __future__ import annotations

from speccache_runtime.server.admission import Room
from speccache_runtime.server.errors import ApiError, loading
from speccache_runtime.server.lengths import MAX_BODY_BYTES, body_limit
from speccache_runtime.server.prompts import Prompts
from speccache_runtime.server.protocol import Engine, Tokenizer

RETRY_AFTER_DRAINING = 1
"""Seconds; another replica, or this one's successor, takes the request."""


class ServerState:
    """One served model. `draining` is set by the process when it is told to end, before the engine knows.

    `places` is how many requests may run or wait; `per_token` the most characters that one token stands for. With
    `require_salt` requests without `cache_salt` are refused.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        served_name: str,
        created: int,
        places: int,
        per_token: int,
        *,
        require_salt: bool,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.served_name = served_name
        self.created = created
        self.require_salt = require_salt
        self.room = Room(places)
        self.prompts = Prompts(tokenizer, per_token)
        self._per_token = per_token
        self.draining = False

    @property
    def body_limit(self) -> int:
        """Larger bodies are refused. The model's own limit is known once it is loaded."""
        return body_limit(self.engine.limits, self._per_token) if self.engine.ready else MAX_BODY_BYTES

    def why_broken(self) -> str | None:
        """One line for /health, or None while the process is worth keeping."""
        return self.engine.failed or self.engine.stalled

    def why_not_ready(self) -> str | None:
        """One line for /ready, or None when requests can be taken."""
        broken = self.why_broken()
        if broken is not None:
            return broken
        if self.draining:
            return "draining: the server finishes its last requests"
        if not self.engine.ready:
            return loading().message
        return None

    def check_ready(self) -> None:
        """Raises ApiError (500 for a broken engine, 503 with Retry-After while loading or draining)."""
        broken, reason = self.why_broken(), self.why_not_ready()
        if broken is not None:
            raise ApiError(500, broken, code="engine_error")
        if reason is None:
            return
        if self.draining:
            raise ApiError(503, reason, code="draining", retry_after=RETRY_AFTER_DRAINING)
        raise loading()

    def check_model(self, name: str) -> None:
        """Raises ApiError (404) as OpenAI does for a model it does not have."""
        if name != self.served_name:
            raise ApiError(
                404,
                f"model: {name!r} is not served here; this server has {self.served_name!r}",
                param="model",
                code="model_not_found",
            )
