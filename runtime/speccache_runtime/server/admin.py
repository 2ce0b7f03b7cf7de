"""The admin port: the storage tier looked at and changed while the server serves.

    GET    /admin/storage         what is attached, and how it is
    PUT    /admin/storage         attach something else; what cannot be used changes nothing
    DELETE /admin/storage         use no storage
    POST   /admin/storage/flush   write what storage lacks

A change lasts as long as the pod: the next one is told what stands in the resource. Each pod is asked by itself; no
Service carries this port.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from speccache_api.storage_target import BucketTarget
from speccache_runtime.cache.storage.base import BackendError
from speccache_runtime.config import AdminConfig, StorageConfig
from speccache_runtime.engine.storage_report import StorageReport
from speccache_runtime.errors import BadRequest, Conflict, StorageError, Unavailable
from speccache_runtime.server.admin_token import OnlyWithToken
from speccache_runtime.server.app import add_error_answers
from speccache_runtime.server.errors import ApiError, from_bad_request, from_unavailable
from speccache_runtime.server.protocol import StorageAdmin
from speccache_runtime.server.routes import read_body
from speccache_runtime.server.state import ServerState
from speccache_runtime.server.storage_body import parse_flush, parse_storage
from speccache_runtime.server.threads import in_thread

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 65536

_T = TypeVar("_T")


def create_admin_app(
    state: ServerState, storage: Callable[[], StorageAdmin], config: AdminConfig, at_start: StorageConfig | None
) -> FastAPI:
    """The application of the admin port. `storage` is called when `state` says that the server is ready; `at_start` is
    the storage that the resource names."""
    app = FastAPI(title="SpecCache admin", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OnlyWithToken, token_path=config.token_path)
    add_error_answers(app)

    async def ask(work: Callable[[StorageAdmin], _T]) -> _T:
        state.check_ready()
        return await in_thread(lambda: _asked(work, storage), "admin")

    @app.get("/admin/storage")
    async def look() -> Response:
        return JSONResponse(shown(await ask(lambda admin: admin.report())))

    @app.put("/admin/storage")
    async def attach(request: Request) -> Response:
        raw = await read_body(request, MAX_BODY_BYTES)

        def change(admin: StorageAdmin) -> StorageReport:
            wanted = parse_storage(raw, at_start)
            admin.attach(wanted)
            logger.info("admin: attached %s", _place(wanted))
            return admin.report()

        return JSONResponse(shown(await ask(change)))

    @app.delete("/admin/storage")
    async def detach() -> Response:
        def change(admin: StorageAdmin) -> StorageReport:
            admin.detach()
            logger.info("admin: detached storage")
            return admin.report()

        return JSONResponse(shown(await ask(change)))

    @app.post("/admin/storage/flush")
    async def flush(request: Request) -> Response:
        seconds = parse_flush(await read_body(request, MAX_BODY_BYTES))
        done = await ask(lambda admin: admin.flush(seconds))
        return JSONResponse({"writtenPages": done.written, "leftPages": done.left})

    return app


def shown(report: StorageReport) -> dict[str, Any]:
    """The answer to GET. Numbers that nobody has told yet are null."""
    config, state = report.config, report.state
    if config is None or state is None:
        return {"attached": None, "endingStorages": report.ending}
    attached = {
        "kind": config.target.kind,
        "place": _place(config),
        "usedBytes": state.used,
        "objects": state.objects,
        "capacityBytes": state.capacity,
        "breakers": {"read": state.read.value, "write": state.write.value},
        "unstoredPages": report.unstored,
    }
    return {"attached": attached, "endingStorages": report.ending}


def _place(storage: StorageConfig) -> str:
    target = storage.target
    if not isinstance(target, BucketTarget):
        return target.path
    return target.url + (f" at {target.endpoint}" if target.endpoint else "")


def _asked(work: Callable[[StorageAdmin], _T], storage: Callable[[], StorageAdmin]) -> _T:
    try:
        return work(storage())
    except BadRequest as error:
        raise from_bad_request(error, error.field) from error
    except Conflict as error:
        raise ApiError(409, str(error), code=error.code) from error
    except Unavailable as error:
        raise from_unavailable(error) from error
    except StorageError as error:
        code = error.code if isinstance(error, BackendError) else "storage_unusable"
        raise ApiError(422, str(error), code=code) from error
