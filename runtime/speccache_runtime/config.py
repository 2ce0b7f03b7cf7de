"""The engine's settings, resolved once: nothing after this module says "auto" or fills in a default.

The operator (or `speccache-runtime serve -f`) writes a wire document; `from_wire` turns it into an EngineConfig, in
which URIs have become directories and every choice is made. Constants that no resource sets yet live here too, with
their reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from speccache_api import drafts
from speccache_api.drafts import DRAFTS, Algorithm
from speccache_api.geometry import KVDtype, KVGeometry
from speccache_api.names import HTTP_PORT
from speccache_api.storage_target import StorageTarget
from speccache_api.uris import BUILTIN_SCHEME, builtin_name
from speccache_api.wire import BadWireDocument, WireDocument, WireSource, WireStorage
from speccache_runtime.errors import ConfigError

MAX_RUNNING = 32
"""Requests in one step. Each costs at most numSteps + 1 rows to verify, so 32 keep a step within a few hundred rows."""

MAX_WAITING = 256
"""Requests in the queue; later ones get 503. With 32 running, the last one already waits for eight rounds of them."""

PREFILL_BUDGET_CPU = 512
"""Prompt tokens of one step. On two cores a step of 512 takes a small model about 0.1 s, which is how long decoding
requests wait for it; a smaller step wastes time on its fixed costs."""

PREFILL_BUDGET_GPU = 4096
"""Prompt tokens of one step. About where a current GPU is busy with an 8B model; more only lengthens the pauses of
decoding."""


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """The storage tier: where, and what to do with a target half whose draft half is missing."""

    target: StorageTarget
    missing_draft: Literal["Recompute", "Degrade"]
    capacity_bytes: int | None = None
    """The most bytes that this model's pages may take there; None for no bound."""


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """The admin port, and the file with the token that its requests must carry."""

    port: int
    token_path: Path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine and its server need to know. Immutable; make a changed copy with `dataclasses.replace`."""

    name: str
    """Name of the resource."""
    namespace: str
    """Namespace of the resource."""
    served_name: str
    """What clients write as `model`."""
    device: Literal["cpu", "cuda"]
    kv_dtype: KVDtype
    """Of KV and of the computation: float32 on the CPU, bfloat16 on a GPU."""
    target_uri: str
    """As the user wrote it; for messages."""
    target_path: Path
    """Directory of the target."""
    algorithm: Algorithm
    draft_uri: str | None
    draft_path: Path | None
    """Directory of the draft; None exactly when `algorithm` has no model."""
    num_steps: int
    """The most tokens proposed at once; 0 when `algorithm` is None."""
    page_size: int
    """Tokens of a page."""
    device_pages: int | None
    """Pages of the device tier, or None: then `device_memory_fraction` says how much of the GPU to take."""
    device_memory_fraction: float | None
    """Share of the GPU's memory for weights, activations and pages together."""
    host_pages: int
    """Pages of the host tier; the target's half and the draft's half of each."""
    storage: StorageConfig | None
    target_geometry: KVGeometry
    """What the memory limit was computed from. A model that keeps something else stops the start."""
    draft_geometry: KVGeometry | None
    """Same, for the draft; None without one."""
    request_timeout: float
    """Seconds that running requests get when the server drains."""
    flush_timeout: float
    """Seconds to write host pages to storage after the last request."""
    require_cache_salt: bool = False
    """True refuses requests without `cache_salt`."""
    admin: AdminConfig | None = None
    tensor: int = 1
    """Tensor-parallel ranks, each a process of its own."""
    port: int = HTTP_PORT
    host: str = "0.0.0.0"
    """Address to listen on. In a pod all of them; `serve -f` on a user's machine takes the loopback address."""
    max_running: int = MAX_RUNNING
    max_waiting: int = MAX_WAITING
    prefill_budget: int = PREFILL_BUDGET_CPU
    """Prompt tokens computed in one step."""

    def to_json(self) -> str:
        """The settings for another process of this pod."""
        return _SETTINGS.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """What `to_json` wrote. Raises ConfigError for anything else."""
        try:
            return _SETTINGS.validate_json(text)
        except ValidationError as error:
            raise ConfigError(f"settings from another process cannot be read: {error}") from error

    @property
    def max_requests(self) -> int:
        """Requests that may run or wait; more are refused."""
        return self.max_running + self.max_waiting


_SETTINGS = TypeAdapter(EngineConfig)


def read_wire(path: Path) -> WireDocument:
    """The wire document in a file. Raises ConfigError that names the file and the remedy."""
    try:
        return WireDocument.from_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the wire document {path}: {error.strerror or error}") from error
    except BadWireDocument as error:
        raise ConfigError(f"{path}: {error}; operator and runtime image must be of one release") from error


def from_wire(wire: WireDocument) -> EngineConfig:
    """The settings for `wire`. Raises ConfigError with the field and the remedy when its parts do not fit together.

    Pure but for the packaged models, whose directory is looked up. Whether other directories exist is the loader's
    business.
    """
    _check_parts(wire)
    speculative, cache, admin = wire.speculative, wire.kv_cache, wire.admin
    draft = speculative.draft
    return EngineConfig(
        name=wire.name,
        namespace=wire.namespace,
        served_name=wire.served_name,
        device=wire.device,
        kv_dtype=cache.dtype,
        target_uri=wire.target.uri,
        target_path=_directory(wire.target, "target"),
        algorithm=speculative.algorithm,
        draft_uri=None if draft is None else draft.uri,
        draft_path=None if draft is None else _directory(draft, DRAFTS[speculative.algorithm].builtin),
        num_steps=speculative.num_steps,
        page_size=cache.page_size,
        device_pages=cache.device_pages,
        device_memory_fraction=_fraction(cache.device_memory_fraction),
        host_pages=cache.host_pages,
        storage=_storage(wire.kv_cache.storage),
        target_geometry=wire.geometry.target,
        draft_geometry=wire.geometry.draft,
        request_timeout=float(wire.drain.request_timeout_seconds),
        flush_timeout=float(wire.drain.flush_timeout_seconds),
        require_cache_salt=cache.require_cache_salt,
        admin=None if admin is None else AdminConfig(admin.port, Path(admin.token_path)),
        tensor=wire.parallelism.tensor,
        port=wire.port,
        prefill_budget=PREFILL_BUDGET_GPU if wire.device == "cuda" else PREFILL_BUDGET_CPU,
    )


def builtin_directory(name: str, half: Literal["target", "draft"]) -> Path:
    """Where the packaged model lies. Raises ConfigError when this release does not have it."""
    directory = Path(__file__).parent / "builtin" / name / half
    if not directory.is_dir():
        raise ConfigError(f"{BUILTIN_SCHEME}{name} is not part of this release: {directory} does not exist")
    return directory


def _directory(source: WireSource, half: Literal["target", "draft"]) -> Path:
    if source.path is not None:
        return Path(source.path)
    name = builtin_name(source.uri)
    if name is None:
        raise ConfigError(f"{half}.path: {source.uri} needs the directory it is mounted at")
    return builtin_directory(name, half)


def _storage(storage: WireStorage | None) -> StorageConfig | None:
    if storage is None:
        return None
    return StorageConfig(storage.target, storage.missing_draft, storage.capacity_bytes)


def _fraction(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction < 1:
        raise ConfigError(f'kvCache.deviceMemoryFraction: {text!r} must be a share between 0 and 1, such as "0.85"')
    return fraction


def _check_parts(wire: WireDocument) -> None:
    """What the document's types cannot say. The operator never writes such a document; a person might."""
    speculative, cache = wire.speculative, wire.kv_cache
    draft = DRAFTS.get(speculative.algorithm)
    has_model, has_pool = draft is not None and draft.model, draft is not None and draft.pool
    if has_model != (speculative.draft is not None):
        raise ConfigError(
            "speculative.draft: needed exactly when speculative.algorithm is"
            f" {drafts.any_of(lambda draft: draft.model)}"
        )
    if (draft is not None) != (speculative.num_steps > 0):
        raise ConfigError("speculative.numSteps: must be at least 1, and 0 when speculative.algorithm is None")
    if speculative.num_draft_tokens != speculative.num_steps + 1:
        raise ConfigError("speculative.numDraftTokens: must be numSteps + 1")
    if has_pool != (wire.geometry.draft is not None):
        raise ConfigError("geometry.draft: needed exactly when speculative.algorithm has a draft that keeps KV")
    if (cache.device_pages is None) == (cache.device_memory_fraction is None):
        raise ConfigError("kvCache: exactly one of devicePages and deviceMemoryFraction must be set")
    if cache.device_memory_fraction is not None and wire.device == "cpu":
        raise ConfigError("kvCache.deviceMemoryFraction: only with device cuda; set devicePages")
    if cache.dtype != ("bfloat16" if wire.device == "cuda" else "float32"):
        raise ConfigError(f"kvCache.dtype: {cache.dtype} is not served on {wire.device}")
