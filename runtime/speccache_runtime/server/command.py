"""`speccache-runtime serve`: from a file to a served model, with words for a person on the way."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from speccache_api.names import HTTP_PORT
from speccache_api.quantity import MIB
from speccache_api.sizing import MemoryPlan
from speccache_runtime.config import EngineConfig, from_wire, read_wire
from speccache_runtime.imports import large_imports
from speccache_runtime.local import LOCAL_HOST, LocalOptions, parse_claims, parse_resource, plan_locally, read_resource
from speccache_runtime.logs import set_up_logging
from speccache_runtime.server.early import early_answers, listen
from speccache_runtime.server.words import say, timed


def serve_wire(path: Path, host: str | None, port: int | None) -> None:
    """Serve the wire document in `path`. Raises SpecCacheError in one line."""
    config = from_wire(read_wire(path))
    changes: dict[str, str | int] = {}
    if host is not None:
        changes["host"] = host
    if port is not None:
        changes["port"] = port
    _serve(replace(config, **changes))  # type: ignore[arg-type]


def serve_resource(
    path: Path, claims: Sequence[str], storage_dir: Path | None, host: str | None, port: int | None
) -> None:
    """Serve the resource in `path` on this machine. Raises SpecCacheError in one line."""
    options = LocalOptions(
        claims=parse_claims(claims),
        storage_dir=storage_dir,
        host=LOCAL_HOST if host is None else host,
        port=HTTP_PORT if port is None else port,
    )
    plan = plan_locally(parse_resource(read_resource(path), path), options)
    say(memory_table(plan.memory))
    if plan.config.storage is not None:
        say(f"storage tier: {plan.config.storage.target.place}\n")
    _serve(plan.config)


def memory_table(memory: MemoryPlan) -> str:
    """Every term of the memory that a pod with these tiers would get."""
    pages = "pages by share of the GPU" if memory.device_pages is None else f"{memory.device_pages} pages"
    rows = [
        ("device", memory.device, f"weights and {pages}" if memory.device else f"on the GPU: {pages}"),
        ("hostTarget", memory.host_target, f"{memory.host_pages} pages x {memory.target_bytes_per_page} bytes"),
        ("hostDraft", memory.host_draft, f"{memory.host_pages} pages x {memory.draft_bytes_per_page} bytes"),
        ("sharedMemory", memory.shared_memory, "/dev/shm"),
        ("overhead", memory.overhead, "runtime, libraries, loading"),
        ("limit", memory.limit, "what a pod would request"),
    ]
    lines = [f"  {name:<13}{size / MIB:>10.1f} MiB   {text}" for name, size, text in rows]
    return "\n".join([f"memory plan ({memory.page_size} tokens a page)", *lines, ""])


def _serve(config: EngineConfig) -> None:
    set_up_logging()
    _wait_without_spinning()
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(listen(config.host, config.port))
        admin_listener = _listen_for_admin(config, sockets)
        with early_answers(listener):
            # Only once everything else is known to be right.
            with timed(say, "importing torch and transformers"), large_imports():
                from speccache_runtime.engine.service import EngineService
                from speccache_runtime.model.tokenizer import Tokenizer
                from speccache_runtime.server.lengths import characters_per_token
                from speccache_runtime.server.run import AdminPort, serve
            with timed(say, f"reading the tokenizer of {config.target_uri}"):
                tokenizer = Tokenizer.from_dir(config.target_path)
                per_token = characters_per_token(tokenizer.backend)
        registry = CollectorRegistry()
        engine = EngineService(config, registry)
        admin = None
        if config.admin is not None and admin_listener is not None:
            admin = AdminPort(admin_listener, config.admin, lambda: engine.storage)
        serve(listener, engine, tokenizer, config, registry, say, per_token, admin)


def _listen_for_admin(config: EngineConfig, sockets: contextlib.ExitStack) -> socket.socket | None:
    """The admin port's socket, if there is such a port. Nobody is answered there before the libraries are imported."""
    if config.admin is None:
        return None
    remedy = "the admin port must be free, and another one than the server's"
    return sockets.enter_context(listen(config.host, config.admin.port, remedy))


def _wait_without_spinning() -> None:
    """Let idle compute threads sleep. Call before torch is imported: OpenMP reads this once.

    By default they spin for some milliseconds after each small operation. When the cores are shared (a pod with half a
    core, a busy machine), a spinning thread holds the core that the working thread waits for: decoding with the
    built-in model on two busy cores took 63 to 100 ms a token with spinning and 3 to 13 ms without. A value that is set
    already stands.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
