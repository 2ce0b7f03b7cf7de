"""The FastAPI application: routes, health, metrics, and one shape for every error."""

from __future__ import annotations

import asyncio
import time

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from speccache_runtime.config import EngineConfig
from speccache_runtime.server.errors import CLIENT_GONE, ApiError
from speccache_runtime.server.lengths import ASSUMED_CHARACTERS
from speccache_runtime.server.protocol import Engine, Tokenizer
from speccache_runtime.server.routes import completion_routes
from speccache_runtime.server.state import ServerState


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    config: EngineConfig,
    registry: CollectorRegistry,
    per_token: int = ASSUMED_CHARACTERS,
) -> FastAPI:
    """The application for one engine. The engine may still be loading; until it is ready, requests get 503.

    `per_token` is the most characters that one token of `tokenizer` stands for. `app.state.server` is the ServerState,
    whose `draining` the process sets when it is told to end.
    """
    app = FastAPI(title="SpecCache", docs_url=None, redoc_url=None, openapi_url=None)
    state = ServerState(
        engine,
        tokenizer,
        config.served_name,
        int(time.time()),
        config.max_requests,
        per_token,
        require_salt=config.require_cache_salt,
    )
    app.state.server = state
    app.include_router(completion_routes(state))
    _add_models(app, state)
    _add_probes(app, state)
    _add_metrics(app, registry)
    add_error_answers(app)
    return app


def add_error_answers(app: FastAPI) -> None:
    """One shape for every error."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_unexpected)


def _add_models(app: FastAPI, state: ServerState) -> None:
    def entry() -> dict[str, object]:
        return {"id": state.served_name, "object": "model", "created": state.created, "owned_by": "speccache"}

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [entry()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        state.check_model(name)
        return JSONResponse(entry())


def _add_probes(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> Response:
        """The process is worth keeping: 200 also while it loads or drains, 500 when the engine has failed or hangs."""
        broken = state.why_broken()
        if broken is not None:
            return JSONResponse({"status": "failed", "reason": broken}, status_code=500)
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Requests can be sent here."""
        reason = state.why_not_ready()
        if reason is not None:
            return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})


def _add_metrics(app: FastAPI, registry: CollectorRegistry) -> None:
    @app.get("/metrics")
    async def metrics() -> Response:
        # In a thread: a collector may wait for a lock that the engine holds for a step.
        text = await asyncio.to_thread(generate_latest, registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same shape."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = ApiError(error.status_code, message, code="unknown_url" if error.status_code == 404 else None).response()
    answer.headers.update(error.headers or {})
    return answer


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    """The client left while its body was read, or before its turn: nobody's fault and nobody's answer."""
    return Response(status_code=CLIENT_GONE)


async def _on_unexpected(_request: Request, _error: Exception) -> Response:
    """A bug of ours. The server logs the traceback; the client gets an answer without internals."""
    return ApiError(500, "internal server error", code="internal_error").response()
