"""From a checked body to prompt tokens, without letting one text stall or fill the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect

from speccache_runtime.core import TOO_LONG
from speccache_runtime.errors import BadRequest
from speccache_runtime.server.admission import Turns
from speccache_runtime.server.lengths import most_characters
from speccache_runtime.server.openai import ChatBody, CompletionBody, GenerationBody
from speccache_runtime.server.protocol import Tokenizer


class Prompts:
    """Makes prompts with one tokenizer. `per_token` is the most characters that one of its tokens stands for."""

    def __init__(self, tokenizer: Tokenizer, per_token: int) -> None:
        self._tokenizer = tokenizer
        self._per_token = per_token
        self._turns = Turns()

    async def tokens(self, body: GenerationBody, max_context: int, gone: Callable[[], Awaitable[bool]]) -> list[int]:
        """Raises BadRequest, Overloaded, and ClientDisconnect for a client that left meanwhile."""
        if isinstance(body, ChatBody):
            size = sum(len(message.content) for message in body.messages)
        else:
            assert isinstance(body, CompletionBody)
            if not isinstance(body.prompt, str):
                return list(body.prompt)
            self._check_length(body.prompt, max_context)
            size = len(body.prompt)
        async with self._turns.turn(size):
            if await gone():
                raise ClientDisconnect
            # In a thread: a long prompt takes long enough to stall every other stream.
            return await asyncio.to_thread(self._encode, body, max_context)

    def _encode(self, body: GenerationBody, max_context: int) -> list[int]:
        if isinstance(body, ChatBody):
            # Only what the template makes of the messages can be judged: it may leave some of their text out.
            text = self._tokenizer.render_chat(body.conversation())
            self._check_length(text, max_context)
            return self._tokenizer.encode(text, rendered=True)
        assert isinstance(body, CompletionBody)
        assert isinstance(body.prompt, str)
        return self._tokenizer.encode(body.prompt)

    def _check_length(self, text: str, max_context: int) -> None:
        """Before it is tokenised, and so by its characters; the engine counts the tokens."""
        most = most_characters(max_context, self._per_token)
        if len(text) > most:
            raise BadRequest(
                "prompt",
                f"{len(text)} characters; no text of more than {most} fits the context of "
                f"{max_context} tokens, new tokens included",
                TOO_LONG,
            )
