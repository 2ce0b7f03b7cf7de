"""`spec.kvCache.storage`: the tier that outlives pods, on a volume or in a bucket."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from speccache_api.fields import BucketName, BucketPrefix, Endpoint, ObjectName, Region, Size
from speccache_api.quantity import MIB, format_bytes
from speccache_api.rules import Rule, SpecModel, Transition, exactly_one

AccessMode = Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]

_ADDRESS = r"^[0-9]+([.][0-9]+){3}$"
_RESERVED_STARTS = ("xn--", "sthree-", "amzn-s3-demo-")
_RESERVED_ENDS = ("--ol-s3", ".mrap", "--x-s3", "--table-s3")
"""Of S3's rules for names; `-s3alias` is left out, as an access point's alias serves as well as its bucket."""

LEAST_CAPACITY = 1 * MIB
"""Less is a slip of the pen for every model. What one page pair of this model takes is compared when that is known."""

_UNCHANGED = " && ".join(
    f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})"
    for name in ("claimName", "storageClassName", "accessModes")
)
_IN_USE = (
    "the claim of the storage tier cannot change while it is in use, but for a larger size; create another"
    " SpecCacheDeployment with the new claim, or remove kvCache.storage first"
)


class StorageClaim(SpecModel):
    """A volume: one that exists (`claimName`), or one that the operator creates (`size`)."""

    claim_name: ObjectName | None = None
    """Name of an existing PersistentVolumeClaim in this namespace. It is never deleted by the operator."""
    size: Size | None = None
    """Size of the PersistentVolumeClaim that the operator creates: `100Gi`. A larger one makes the claim grow where its
    StorageClass allows that (allowVolumeExpansion); a claim never shrinks.
    """
    storage_class_name: ObjectName | None = None
    """StorageClass of the created claim. Default: the cluster's default class."""
    access_modes: Annotated[list[AccessMode], Field(min_length=1, max_length=3)] | None = None
    """Access modes of the created claim. Default: [ReadWriteOnce]. More than one replica needs ReadWriteMany."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        exactly_one("claimName", "size"),
        Rule(
            cel="!has(self.claimName) || !(has(self.storageClassName) || has(self.accessModes))",
            message="storageClassName and accessModes belong to a claim that is created; remove them beside claimName",
            check=lambda c: c.claim_name is None or (c.storage_class_name is None and c.access_modes is None),
        ),
        Rule(
            cel="!has(self.accessModes) || !('ReadWriteOncePod' in self.accessModes) || self.accessModes.size() == 1",
            message="ReadWriteOncePod cannot be one mode of several; give it alone, or remove it",
            check=lambda c: "ReadWriteOncePod" not in (c.access_modes or ()) or len(c.access_modes) == 1,
            at=".accessModes",
        ),
    )
    TRANSITIONS: ClassVar[tuple[Transition, ...]] = (Transition(cel=_UNCHANGED, message=_IN_USE),)

    @property
    def created(self) -> bool:
        """True when the operator creates the claim."""
        return self.claim_name is None

    @property
    def modes(self) -> tuple[AccessMode, ...]:
        """Access modes of the created claim, with the default filled in."""
        return tuple(self.access_modes or ["ReadWriteOnce"])


class Bucket(SpecModel):
    """A bucket of an S3 server. It must exist. The server must honour `If-None-Match: *` on PUT: pods, and other
    resources, may write the same page at the same time. Before any pod serves, a Job with the pods' identity lists,
    writes, reads and deletes in it; the condition StorageReady tells what is wrong.
    """

    bucket: BucketName
    """Name of the bucket."""
    prefix: BucketPrefix = ""
    """Path below which all objects lie, such as `speccache/chat`, without a slash at either end. Default: none. Two
    resources with the same model, bucket and prefix share their pages.
    """
    endpoint: Endpoint | None = None
    """Address of the server, as `https://minio.storage:9000`. Default: that of AWS for the region. Neither user nor
    password, path or query belongs into it.
    """
    region: Region | None = None
    """Region of the bucket. Default: that of the pod's environment (AWS_REGION), else us-east-1."""
    force_path_style: bool = False
    """True puts the bucket's name into the path of requests and not into the host's name. Most servers of one's own
    need that. Default: false.
    """
    credentials_secret: ObjectName | None = None
    """Secret in this namespace with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_SESSION_TOKEN if there is one.
    It is mounted into the pods, which notice a change; the operator never reads it. Without it the pod's own identity
    counts: web identity of its ServiceAccount, else that of the node.
    """
    ca_bundle_config_map: ObjectName | None = None
    """ConfigMap in this namespace whose key `ca.crt` has the certificates to trust, in place of the system's."""
    service_account_name: ObjectName | None = None
    """ServiceAccount in this namespace that the pods run as, for web identity. Default: one that the operator makes,
    without rights.
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!self.bucket.contains('..') && !self.bucket.matches(r'" + _ADDRESS + "')",
            message="a bucket's name has no two dots in a row and is no IP address; correct it",
            check=lambda b: ".." not in b.bucket and re.fullmatch(_ADDRESS, b.bucket) is None,
            at=".bucket",
        ),
        Rule(
            cel=" && ".join(
                [f"!self.bucket.startsWith('{word}')" for word in _RESERVED_STARTS]
                + [f"!self.bucket.endsWith('{word}')" for word in _RESERVED_ENDS]
            ),
            message="S3 keeps names that begin or end so for itself, and what they name lacks operations that are"
            " needed here; give the name of a general-purpose bucket",
            check=lambda b: not b.bucket.startswith(_RESERVED_STARTS) and not b.bucket.endswith(_RESERVED_ENDS),
            at=".bucket",
        ),
        Rule(
            cel="!has(self.caBundleConfigMap) || !has(self.endpoint) || !self.endpoint.startsWith('http://')",
            message="a connection by http:// has no certificate to check; give an https:// endpoint, or remove"
            " caBundleConfigMap",
            check=lambda b: b.ca_bundle_config_map is None or not (b.endpoint or "").startswith("http://"),
            at=".caBundleConfigMap",
        ),
    )


class Storage(SpecModel):
    """The storage tier: pages as files on a volume or as objects in a bucket. They outlive the pod, and every replica
    reads them. Without it, cached pages are lost with the pod. Exactly one of persistentVolumeClaim, s3.
    """

    persistent_volume_claim: StorageClaim | None = None
    """A volume. Pages are kept in a folder whose name is a digest of model, dtype and page size, so models can share
    it.
    """
    s3: Bucket | None = None
    """A bucket. Pages are kept below a digest of model, dtype and page size, so models can share it. Another bucket
    replaces the pods and starts from what is there.
    """
    capacity: Size | None = None
    """Bytes that pages of this model may take: `90Gi`. When they take more, the least recently used ones are removed.
    Default: no bound; a full volume then keeps what it has and takes nothing new. Of a created claim it is at most its
    size. Resources that share a volume or a bucket, the model and the dtype must give the same.
    """
    missing_draft: Literal["Recompute", "Degrade"] = "Recompute"
    """What to do when storage has the target's half of a page but not the draft's; for EAGLE3. `Recompute` (default)
    uses only whole pairs and prefills the rest. `Degrade` uses the target's half and drafts without the missing part:
    less prefill, shorter accepts. Standalone does neither: its target's half is used, and its draft's half is made anew
    from the tokens while the target goes on. NGram and None have no draft's half.
    """
    retention: Literal["Retain", "Delete"] = "Retain"
    """What happens to stored pages when this resource is deleted. `Retain` (default) keeps them. `Delete` deletes a
    created claim; in a bucket a Job removes all that is stored for this model there, by the operator's hand: nothing
    is removed while no operator runs, or when the namespace, the Secret or the bucket goes first.
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        exactly_one("persistentVolumeClaim", "s3"),
        Rule(
            cel="self.retention != 'Delete' || !has(self.persistentVolumeClaim)"
            " || !has(self.persistentVolumeClaim.claimName)",
            message="retention Delete needs a claim that the operator creates; set Retain, or give size, not claimName",
            check=lambda s: (
                s.retention != "Delete" or s.persistent_volume_claim is None or s.persistent_volume_claim.created
            ),
            at=".retention",
        ),
        Rule(
            cel="!has(self.capacity)"
            f" || quantity(string(self.capacity)).compareTo(quantity('{format_bytes(LEAST_CAPACITY)}')) >= 0",
            message=f"a capacity below {format_bytes(LEAST_CAPACITY)} holds no page pair; give more, or remove it",
            check=lambda s: s.capacity is None or s.capacity >= LEAST_CAPACITY,
            at=".capacity",
        ),
        Rule(
            cel="!has(self.capacity) || !has(self.persistentVolumeClaim) || !has(self.persistentVolumeClaim.size) ||"
            " quantity(string(self.capacity)).compareTo(quantity(string(self.persistentVolumeClaim.size))) <= 0",
            message="capacity cannot be above the size of the claim that is created; lower it, or raise size",
            check=lambda s: (
                s.capacity is None
                or s.persistent_volume_claim is None
                or s.persistent_volume_claim.size is None
                or s.capacity <= s.persistent_volume_claim.size
            ),
            at=".capacity",
        ),
    )
    TRANSITIONS: ClassVar[tuple[Transition, ...]] = (
        Transition(cel="!has(oldSelf.persistentVolumeClaim) || has(self.persistentVolumeClaim)", message=_IN_USE),
    )
