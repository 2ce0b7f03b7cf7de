"""What PUT /admin/storage may ask for: a storage target in the wire document's form, which this pod can reach."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from speccache_api import names
from speccache_api.spec_storage import Bucket
from speccache_api.storage_target import BucketTarget, StorageTarget, VolumeTarget, bucket_target
from speccache_runtime.config import StorageConfig
from speccache_runtime.server.body import json_object
from speccache_runtime.server.errors import bad_field, from_validation

MAX_FLUSH_S = 3600
"""The longest that a flush may be given."""

DEFAULT_FLUSH_S = 60


class _Body(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", strict=True, frozen=True)


class _Volume(_Body):
    kind: Literal["Volume"]
    path: Annotated[str, Field(min_length=1, max_length=4096, pattern="^/[^\\x00]*$")]
    claim: str | None = None


class _Flush(_Body):
    timeout_seconds: Annotated[int, Field(ge=1, le=MAX_FLUSH_S)] = DEFAULT_FLUSH_S


class _Capacity(_Body):
    capacity_bytes: Annotated[int, Field(ge=1)] | None = None


def parse_flush(raw: bytes) -> int:
    """Seconds; raises ApiError (400). No body at all asks for the default."""
    try:
        return _Flush.model_validate(json_object(raw)).timeout_seconds if raw else DEFAULT_FLUSH_S
    except ValidationError as error:
        raise from_validation(error) from error


def parse_storage(raw: bytes, at_start: StorageConfig | None) -> StorageConfig:
    """The storage to attach. Raises ApiError (400) that names the field.

    `at_start` is what the resource names: a volume can be reached only below its mount point, a bucket only with the
    credentials that are mounted for it, or with the pod's own. Looks at the file system, where links are followed.
    """
    body = json_object(raw)
    kind = body.get("kind")
    try:
        capacity = _Capacity.model_validate({"capacityBytes": body.pop("capacityBytes", None)}).capacity_bytes
        target: StorageTarget
        if kind == "Volume":
            target = _volume(_Volume.model_validate(body), at_start)
        elif kind == "Bucket":
            target = _bucket(body, at_start)
        else:
            raise bad_field("kind", "kind: must be Volume or Bucket", "invalid_value")
    except ValidationError as error:
        raise from_validation(error) from error
    return StorageConfig(target, at_start.missing_draft if at_start else "Recompute", capacity)


def _volume(body: _Volume, at_start: StorageConfig | None) -> VolumeTarget:
    mounted = at_start.target if at_start is not None and isinstance(at_start.target, VolumeTarget) else None
    root = Path(names.STORAGE_PATH if mounted is None else mounted.path)
    claim = None if mounted is None else mounted.claim
    if ".." in Path(body.path).parts or not Path(body.path).resolve().is_relative_to(root.resolve()):
        raise bad_field("path", f"path: must be {root}, where volumes are mounted, or below it", "invalid_value")
    _same("claim", body.claim, claim, "the claim that is mounted")
    return VolumeTarget(claim=claim, path=body.path)


def _bucket(body: dict[str, Any], at_start: StorageConfig | None) -> BucketTarget:
    fields = {name: value for name, value in body.items() if name != "kind"}
    if "serviceAccountName" in fields:
        raise bad_field("serviceAccountName", "serviceAccountName: this field is not known; remove it")
    if "serviceAccount" in fields:
        fields["serviceAccountName"] = fields.pop("serviceAccount")
    target = bucket_target(Bucket.model_validate(fields))
    mounted = at_start.target if at_start is not None and isinstance(at_start.target, BucketTarget) else None
    for field, what in (
        ("credentials_secret", "the Secret that is mounted"),
        ("ca_bundle_config_map", "the ConfigMap that is mounted"),
        ("service_account", "the ServiceAccount of this pod"),
    ):
        _same(to_camel(field), getattr(target, field), getattr(mounted, field, None), what)
    return target


def _same(field: str, given: str | None, mounted: str | None, what: str) -> None:
    if given is not None and given != mounted:
        there = "there is none" if mounted is None else f"that is {mounted}"
        raise bad_field(field, f"{field}: must be {what}, and {there}; leave it out", "invalid_value")
