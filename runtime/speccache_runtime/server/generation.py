"""One request's way through the engine, as text: the bridge between the engine's thread and the event loop.

The engine calls back from its own thread with tokens. Here they cross into the event loop, become text, and are cut
at a stop string. Whoever stops reading early (a client that went away, a stop string) aborts the request in the engine,
so that nothing is computed for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from speccache_runtime.core import Finish, Output, Request, Usage
from speccache_runtime.server.errors import ApiError
from speccache_runtime.server.protocol import Engine, Tokenizer
from speccache_runtime.server.text import StopFinder

FAILURE_CHECK_SECONDS = 1.0
"""How often a waiting request looks whether the engine hangs, or has died without a word: no client waits for ever."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one request. The last piece has `finish` ("stop" or "length") and `usage`."""

    text: str
    finish: str | None = None
    usage: Usage | None = None


class Generation:
    """A submitted request. Read `pieces()` once; call `close()` when done, however it ended.

    `on_end` is called once, on the event loop, when the engine has ended the request, however slowly it is read.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        request: Request,
        stops: Sequence[str],
        on_end: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._request = request
        self._detokenizer = tokenizer.detokenizer(request.prompt)
        self._stops = StopFinder(stops)
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._finished = False
        self._on_end = on_end

    def submit(self) -> None:
        """Raises BadRequest, Overloaded or Draining, as the engine does."""
        self._engine.submit(self._request, self._on_output)

    def close(self) -> None:
        """Abort the request unless it has ended. Safe to call twice."""
        if not self._finished:
            self._finished = True
            self._engine.abort(self._request.request_id)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of text until the request ends. Raises ApiError when the engine could not finish it."""
        aborted = False
        while True:
            output = await self._next()
            text = self._stops.push(self._detokenizer.push(self._visible(output)))
            if output.finish is not None:
                self._finished = True
                yield self._last(output, text)
                return
            if text:
                yield Piece(text)
            if self._stops.found and not aborted:
                # The last output still comes, and brings the usage.
                aborted = True
                self._engine.abort(self._request.request_id, Finish.STOP)

    def _last(self, output: Output, text: str) -> Piece:
        if not self._stops.found:
            text += self._stops.push(self._detokenizer.flush())
        if not self._stops.found:
            text += self._stops.flush()
        if output.finish is Finish.ERROR:
            raise ApiError(500, output.error or "the engine failed", code="engine_error")
        if self._stops.found:
            return Piece(text, Finish.STOP.value, output.usage)
        if output.finish is Finish.ABORT:
            raise ApiError(503, "the server stopped before the request was finished", code="aborted", retry_after=1)
        assert output.finish is not None
        return Piece(text, output.finish.value, output.usage)

    def _visible(self, output: Output) -> tuple[int, ...]:
        """A token that ended the request (end of text) counts in `usage` but is no text."""
        if output.finish is Finish.STOP and output.tokens and output.tokens[-1] in self._request.params.stop_token_ids:
            return output.tokens[:-1]
        return output.tokens

    async def _next(self) -> Output:
        while True:
            try:
                async with asyncio.timeout(FAILURE_CHECK_SECONDS):
                    return await self._outputs.get()
            except TimeoutError:
                broken = self._engine.failed or self._engine.stalled
                if broken is not None and self._outputs.empty():
                    raise ApiError(500, broken, code="engine_error") from None

    def _on_output(self, output: Output) -> None:
        """Called from the engine's thread. After shutdown the loop is closed and nobody waits for the answer."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, output)

    def _take(self, output: Output) -> None:
        self._outputs.put_nowait(output)
        if output.finish is not None:
            self._on_end()
