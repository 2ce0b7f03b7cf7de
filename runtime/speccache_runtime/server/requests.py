"""From a checked request body and its prompt tokens to what the engine takes. The engine says whether it fits."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from speccache_runtime.core import Limits, Request, SamplingParams
from speccache_runtime.server.openai import CompletionBody, GenerationBody

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; chat has none and may fill the context."""

DEFAULT_TEMPERATURE = 1.0
DEFAULT_TOP_P = 1.0


def make_request(request_id: str, body: GenerationBody, prompt: Sequence[int], limits: Limits) -> Request:
    """Every choice that the client has left open is made here."""
    params = SamplingParams(
        max_tokens=_default_tokens(body, limits.room(prompt)) if body.new_tokens is None else body.new_tokens,
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        top_p=DEFAULT_TOP_P if body.top_p is None else body.top_p,
        # Without a seed every request draws its own, as at OpenAI.
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        stop_token_ids=limits.eos_token_ids,
    )
    return Request(request_id=request_id, prompt=tuple(prompt), params=params, salt=body.cache_salt)


def _default_tokens(body: GenerationBody, room: int) -> int:
    return min(room, DEFAULT_COMPLETION_TOKENS) if isinstance(body, CompletionBody) else room
