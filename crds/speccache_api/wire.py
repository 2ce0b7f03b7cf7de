"""The wire document: all that a pod is told, in one JSON file.

The operator writes it into a ConfigMap and puts its digest on the pod template, so any change rolls the pods; the
runtime reads it strictly. Both come from one release, and `version` refuses a mix of two.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from speccache_api import names
from speccache_api.drafts import Algorithm
from speccache_api.geometry import Inspection, KVDtype, KVGeometry
from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import MemoryPlan, kv_dtype
from speccache_api.spec import Device, Spec
from speccache_api.storage_target import StorageTarget, resolve
from speccache_api.uris import claim_and_folder

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]


class BadWireDocument(ValueError):
    """The text is not a wire document of this version; the message names the field."""


class WireModel(BaseModel):
    """Base of the document's parts: camelCase, nothing unknown, nothing converted, immutable."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, strict=True)


class WireSource(WireModel):
    """A model: `path` is its directory in the pod; None for `builtin://`, which is inside the image."""

    uri: str
    path: str | None


class WireSpeculative(WireModel):
    """Speculation. `draft` is None for an algorithm without a model. With algorithm None: 0 steps, 1 row to verify."""

    algorithm: Algorithm
    draft: WireSource | None
    num_steps: Count
    num_draft_tokens: Positive


class WireStorage(WireModel):
    """The storage tier: where, the answer to a target half without its draft half, and the most bytes (None: any)."""

    target: StorageTarget
    missing_draft: Literal["Recompute", "Degrade"]
    capacity_bytes: Positive | None


class WireKVCache(WireModel):
    """The tiers. Exactly one of `device_pages` and `device_memory_fraction` is set. All counts are page pairs."""

    dtype: KVDtype
    page_size: Positive
    device_pages: Positive | None
    device_memory_fraction: str | None
    host_pages: Positive
    storage: WireStorage | None
    require_cache_salt: bool


class WireAdmin(WireModel):
    """The admin port, and the file with the token that its requests must carry."""

    port: Port
    token_path: str


class WireDrain(WireModel):
    """Seconds for running requests, then seconds for writing host pages to storage."""

    request_timeout_seconds: Count
    flush_timeout_seconds: Count


class WireGeometry(WireModel):
    """What the memory was sized for; a model that keeps something else must not start. `draft` is None without one."""

    target: KVGeometry
    draft: KVGeometry | None


class WireParallelism(WireModel):
    """Processes that share the models: `tensor` ranks."""

    tensor: Positive


class WireDocument(WireModel):
    """The whole document. Equal values have equal JSON and equal digests. `admin` is None without an admin port."""

    version: Literal[2]
    name: str
    namespace: str
    served_name: str
    device: Device
    target: WireSource
    speculative: WireSpeculative
    parallelism: WireParallelism
    kv_cache: WireKVCache
    drain: WireDrain
    geometry: WireGeometry
    port: Port
    admin: WireAdmin | None

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, camelCase."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> WireDocument:
        """The document that `to_json` wrote. Raises BadWireDocument, naming each wrong field."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            lines = (
                f"{'.'.join(map(str, e['loc'])) or '(document)'}: {e['msg']}" for e in error.errors(include_url=False)
            )
            raise BadWireDocument("not a wire document of version 2: " + "; ".join(lines)) from error

    def digest(self) -> str:
        """SHA-256 hex of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def build_wire(resource: SpecCacheDeployment, inspection: Inspection, plan: MemoryPlan) -> WireDocument:
    """The document for the pods of `resource`. Pure: the same arguments give the same bytes."""
    spec = resource.spec
    return WireDocument(
        version=2,
        name=resource.name,
        namespace=resource.namespace,
        served_name=resource.served_name,
        device=spec.device,
        target=_source(spec.model.uri, names.TARGET_MODEL_PATH),
        speculative=_speculative(spec),
        parallelism=WireParallelism(tensor=spec.parallelism.tensor),
        kv_cache=_kv_cache(resource, plan),
        drain=WireDrain(
            request_timeout_seconds=spec.drain.request_timeout_seconds,
            flush_timeout_seconds=spec.drain.flush_timeout_seconds,
        ),
        geometry=WireGeometry(target=plan.target, draft=plan.draft),
        port=names.HTTP_PORT,
        admin=WireAdmin(port=names.ADMIN_PORT, token_path=names.ADMIN_TOKEN_PATH) if spec.admin else None,
    )


def _source(uri: str, mount: str) -> WireSource:
    return WireSource(uri=uri, path=model_path(uri, mount))


def model_path(uri: str, mount: str) -> str | None:
    """Where the model `uri` is inside the container, with its claim at `mount`; None for a built-in one.

    The claim's root is mounted, read-only: a folder mounted by `subPath` would be made where it does not exist.
    """
    place = claim_and_folder(uri)
    if place is None:
        return None
    _, folder = place
    return f"{mount}/{folder}" if folder else mount


def _speculative(spec: Spec) -> WireSpeculative:
    if spec.speculative is None or spec.algorithm == "None":
        return WireSpeculative(algorithm="None", draft=None, num_steps=0, num_draft_tokens=1)
    return WireSpeculative(
        algorithm=spec.speculative.algorithm,
        draft=None if spec.draft is None else _source(spec.draft.uri, names.DRAFT_MODEL_PATH),
        num_steps=spec.speculative.steps,
        num_draft_tokens=spec.speculative.draft_tokens,
    )


def _kv_cache(resource: SpecCacheDeployment, plan: MemoryPlan) -> WireKVCache:
    spec = resource.spec
    return WireKVCache(
        dtype=kv_dtype(spec),
        page_size=spec.kv_cache.page_size,
        device_pages=plan.device_pages,
        device_memory_fraction=spec.kv_cache.device.memory_fraction,
        host_pages=plan.host_pages,
        storage=_storage(resource),
        require_cache_salt=spec.kv_cache.require_cache_salt,
    )


def _storage(resource: SpecCacheDeployment) -> WireStorage | None:
    storage, target = resource.spec.kv_cache.storage, resolve(resource)
    if storage is None or target is None:
        return None
    return WireStorage(target=target, missing_draft=storage.missing_draft, capacity_bytes=storage.capacity)
