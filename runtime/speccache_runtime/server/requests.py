"""From a checked request body and its prompt tokens to what the engine takes, or a 400 that says what does not fit."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from speccache_runtime.core import Request, SamplingParams
from speccache_runtime.server.errors import bad_field
from speccache_runtime.server.openai import ChatBody, CompletionBody, GenerationBody
from speccache_runtime.server.protocol import EngineLimits

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; chat has none and may fill the context."""

DEFAULT_TEMPERATURE = 1.0
DEFAULT_TOP_P = 1.0


def make_request(
    request_id: str,
    body: GenerationBody,
    prompt: Sequence[int],
    limits: EngineLimits,
) -> Request:
    """Raises ApiError (400) with the field to change."""
    prompt_field = "messages" if isinstance(body, ChatBody) else "prompt"
    _check_prompt(prompt, limits, prompt_field)
    params = SamplingParams(
        max_tokens=_max_tokens(body, len(prompt), limits.max_context),
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        top_p=DEFAULT_TOP_P if body.top_p is None else body.top_p,
        # Without a seed every request draws its own, as at OpenAI.
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        stop_token_ids=limits.eos_token_ids,
    )
    return Request(request_id=request_id, prompt=tuple(prompt), params=params)


def _check_prompt(prompt: Sequence[int], limits: EngineLimits, field: str) -> None:
    if not prompt:
        raise bad_field(field, f"{field}: the prompt is empty; send at least one token", "invalid_value")
    if len(prompt) >= limits.max_context:
        raise bad_field(
            field,
            f"{field}: {len(prompt)} tokens; the context is {limits.max_context} tokens, new tokens included",
            "context_length_exceeded",
        )
    wrong = next((token for token in prompt if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        raise bad_field(
            field,
            f"{field}: token id {wrong} is outside the vocabulary (0 to {limits.vocab_size - 1})",
            "invalid_value",
        )


def _max_tokens(body: GenerationBody, prompt_tokens: int, max_context: int) -> int:
    room = max_context - prompt_tokens
    field, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        field, asked = "max_completion_tokens", body.max_completion_tokens
    if asked is None:
        return min(room, DEFAULT_COMPLETION_TOKENS) if isinstance(body, CompletionBody) else room
    if asked > room:
        raise bad_field(
            field,
            f"{field}: {prompt_tokens} prompt tokens and {asked} new ones exceed the context of {max_context} tokens; "
            f"at most {room} new ones fit",
            "context_length_exceeded",
        )
    return asked
