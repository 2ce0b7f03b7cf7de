"""Where a resource's pages are stored: one value that builders, conditions, wire document and runtime share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from speccache_api import names
from speccache_api.resource import SpecCacheDeployment
from speccache_api.spec_storage import Bucket


class BadStorageTarget(ValueError):
    """The text is not a storage target; the message names the field."""


class _Target(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, strict=True)

    def to_json(self) -> str:
        """The target for a command line or a record. It holds names of Secrets and never what is in them."""
        return self.model_dump_json(by_alias=True)


class VolumeTarget(_Target):
    """A directory: in a pod the mount point of claim `claim`; None where no claim is behind it (`serve -f`)."""

    kind: Literal["Volume"] = "Volume"
    claim: str | None
    path: str

    @property
    def place(self) -> str:
        """In the words of messages."""
        return f"storage path {self.path}"


class BucketTarget(_Target):
    """A bucket of an S3 server. None stands for what the client library finds by itself: the public endpoint, the
    region of the environment, the identity of the pod (`credentials_secret`), the system's certificate authorities.
    """

    kind: Literal["Bucket"] = "Bucket"
    bucket: str
    prefix: str
    """"" or path parts joined by slashes, without a slash at either end. Objects lie below it."""
    endpoint: str | None
    region: str | None
    force_path_style: bool
    credentials_secret: str | None
    """Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if wanted, AWS_SESSION_TOKEN, mounted as files at
    `names.S3_CREDENTIALS_PATH`. None on a user's machine, where the environment has them."""
    ca_bundle_config_map: str | None
    """ConfigMap whose key ca.crt is mounted at `names.S3_CA_BUNDLE_PATH`/ca.crt."""
    service_account: str | None
    """The ServiceAccount that the pods run as; None for the one that the operator makes."""

    @property
    def place(self) -> str:
        """In the words of messages."""
        return f"bucket {self.bucket}" + (f" at {self.endpoint}" if self.endpoint else "")

    @property
    def url(self) -> str:
        """In short: `s3://BUCKET/PREFIX`."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


StorageTarget = Annotated[VolumeTarget | BucketTarget, Field(discriminator="kind")]

_ANY: TypeAdapter[VolumeTarget | BucketTarget] = TypeAdapter(StorageTarget)


def from_json(text: str) -> VolumeTarget | BucketTarget:
    """What `to_json` wrote. Raises BadStorageTarget."""
    try:
        return _ANY.validate_json(text)
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, e['loc'])) or '(target)'}: {e['msg']}" for e in error.errors(include_url=False))
        raise BadStorageTarget("not a storage target: " + "; ".join(lines)) from error


def resolve(resource: SpecCacheDeployment) -> VolumeTarget | BucketTarget | None:
    """The target of `resource` in a cluster; None without a storage tier. Nothing else reads which kind it is."""
    storage = resource.spec.kv_cache.storage
    if storage is None:
        return None
    if storage.s3 is not None:
        return bucket_target(storage.s3)
    claim = storage.persistent_volume_claim
    assert claim is not None, "a storage tier is one of both kinds"
    return VolumeTarget(claim=claim.claim_name or names.claim_name(resource.name), path=names.STORAGE_PATH)


def bucket_target(s3: Bucket) -> BucketTarget:
    """The target that a resource's `s3` names."""
    return BucketTarget(
        bucket=s3.bucket,
        prefix=s3.prefix,
        endpoint=s3.endpoint,
        region=s3.region,
        force_path_style=s3.force_path_style,
        credentials_secret=s3.credentials_secret,
        ca_bundle_config_map=s3.ca_bundle_config_map,
        service_account=s3.service_account_name,
    )
