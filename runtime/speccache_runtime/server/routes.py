"""/v1/completions and /v1/chat/completions: check the body, make tokens, hand over to the engine, answer.

Bodies are read and parsed here instead of by FastAPI, so that every error has OpenAI's shape and a body can be refused
by its size before it is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from speccache_runtime.core import Usage
from speccache_runtime.errors import BadRequest, Unavailable
from speccache_runtime.server.answers import SSE_DONE, Answer, ChatCompletion, Completion, sse
from speccache_runtime.server.errors import CLIENT_GONE, MAX_NAME, ApiError, from_bad_request, from_unavailable
from speccache_runtime.server.generation import Generation
from speccache_runtime.server.openai import GenerationBody, parse_chat, parse_completion
from speccache_runtime.server.requests import make_request
from speccache_runtime.server.state import ServerState


def completion_routes(state: ServerState) -> APIRouter:
    """The two endpoints that generate text."""
    router = APIRouter(prefix="/v1")

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        body = parse_completion(await read_body(request, state.body_limit))
        state.check_model(body.model)
        return await _respond(state, request, body, Completion(body.model))

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse_chat(await read_body(request, state.body_limit))
        state.check_model(body.model)
        return await _respond(state, request, body, ChatCompletion(body.model))

    return router


def check_encoding(request: Request) -> None:
    """Raises ApiError (415) for a body that would have to be unpacked: its size says nothing about what is in it."""
    encodings = ", ".join(request.headers.getlist("content-encoding"))
    if encodings.strip().lower() not in ("", "identity"):
        shown = ascii(encodings[:MAX_NAME])
        raise ApiError(
            415, f"Content-Encoding: {shown} is not supported; send the body as it is", code="unsupported_encoding"
        )


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; raises ApiError (413) as soon as it is known to be too large, or at once (415) if packed."""
    check_encoding(request)
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


async def _respond(state: ServerState, request: Request, body: GenerationBody, answer: Answer) -> Response:
    if state.require_salt:
        body.check_salt()
    state.check_ready()
    try:
        generation = await _submit(state, request, body, answer.id)
    except BadRequest as error:
        raise from_bad_request(error, body.name_of(error.field)) from error
    except Unavailable as error:
        raise from_unavailable(error) from error
    if body.stream:
        return EventStream(generation, answer, body.include_usage)
    return await _whole(request, generation, answer)


async def _submit(state: ServerState, request: Request, body: GenerationBody, request_id: str) -> Generation:
    """A place first: an overloaded server has no time to tokenise what it refuses."""
    state.room.take()
    try:
        limits = state.engine.limits
        prompt = await state.prompts.tokens(body, limits.max_context, request.is_disconnected)
        engine_request = make_request(request_id, body, prompt, limits)
        generation = Generation(state.engine, state.tokenizer, engine_request, body.stop, state.room.give_back)
        generation.submit()
    except BaseException:
        state.room.give_back()
        raise
    return generation


async def _whole(request: Request, generation: Generation, answer: Answer) -> Response:
    """Wait for the last token, but not for a client that has gone."""
    reading = asyncio.create_task(_read(generation))
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            return Response(status_code=CLIENT_GONE)
        text, finish, usage = reading.result()
    finally:
        generation.close()
        reading.cancel()
        leaving.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)
    return JSONResponse(answer.whole(text, finish, usage))


async def _read(generation: Generation) -> tuple[str, str, Usage]:
    texts: list[str] = []
    async for piece in generation.pieces():
        texts.append(piece.text)
        if piece.finish is not None and piece.usage is not None:
            return "".join(texts), piece.finish, piece.usage
    raise ApiError(500, "the engine ended the request without a reason", code="engine_error")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A server-sent event stream that ends its generation however the stream ends.

    The generation is closed here and not by the event generator: when a client leaves while a chunk is being sent, that
    generator is suspended and would only be cleaned up some time later.
    """

    def __init__(self, generation: Generation, answer: Answer, include_usage: bool) -> None:
        super().__init__(
            _events(generation, answer, include_usage),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            return
        finally:
            self._generation.close()


async def _events(generation: Generation, answer: Answer, include_usage: bool) -> AsyncIterator[bytes]:
    """An error after the headers have left becomes an event, and the stream ends without [DONE]."""
    opening = answer.opening()
    if opening is not None:
        yield sse(opening)
    try:
        async for piece in generation.pieces():
            if piece.text:
                yield sse(answer.chunk(piece.text, None))
            if piece.finish is not None:
                yield sse(answer.chunk("", piece.finish))
                if include_usage and piece.usage is not None:
                    yield sse(answer.usage_chunk(piece.usage))
    except ApiError as error:
        yield sse(error.body())
        return
    yield SSE_DONE
