"""Where a resource's pages are stored: one value that builders, conditions, wire document and runtime share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class _Target(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, strict=True)


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
    """"" or a run of path parts without a slash at either end."""
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


StorageTarget = Annotated[VolumeTarget | BucketTarget, Field(discriminator="kind")]
