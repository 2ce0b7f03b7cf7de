"""The ConfigMap that says what is to be removed from a bucket once the resource is gone, and the Job that removes it.

A resource has no finalizer, so nothing of it is there when the removal begins. What is needed then is kept in a record
without an owner: the place, the fingerprint, the names of Secret and ServiceAccount, and (a label) the resource's uid.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from speccache_api import names
from speccache_api.storage_target import BadStorageTarget, BucketTarget, from_json
from speccache_operator.children import bucket, pods
from speccache_operator.children.answer import Answer, Built
from speccache_operator.children.context import BuildContext, RuntimeImage
from speccache_operator.children.meta import orphan_metadata
from speccache_operator.kinds import CONFIG_MAP, JOB, Object

TARGET_KEY = "target.json"
FINGERPRINT_KEY = "fingerprint"
POD_ATTEMPTS = 4
DEADLINE_SECONDS = 3600
KEPT_SECONDS = 7200
"""How long a failed Job stays to be looked at: longer than the pause after which it would be tried again."""
DEFAULT_ACCOUNT = "default"
"""The account that the operator made for the pods has gone with the resource."""


def build(ctx: BuildContext) -> Built:
    """Wanted with retention Delete and a bucket, before the first pod; unwanted as soon as the pages are to be kept.

    Without a bucket what was recorded of an earlier one stays: it is the resource's end that it waits for.
    """
    storage, target = ctx.resource.spec.kv_cache.storage, ctx.target
    if storage is None or not isinstance(target, BucketTarget):
        return Answer.UNKNOWN
    if storage.retention == "Retain":
        return Answer.ABSENT
    if ctx.fingerprint is None:
        return Answer.UNKNOWN
    meta = orphan_metadata(ctx, _name(ctx, target, ctx.fingerprint), names.COMPONENT_STORAGE_REMOVAL)
    labels = {**meta["labels"], names.LABEL_RESOURCE_UID: ctx.resource.metadata.uid}
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.name,
        "metadata": {**meta, "labels": labels},
        "data": {TARGET_KEY: target.to_json(), FINGERPRINT_KEY: ctx.fingerprint},
    }


def _name(ctx: BuildContext, target: BucketTarget, fingerprint: str) -> str:
    """One record for each place and model: with other credentials the same place is still removed once."""
    place = [target.endpoint, target.bucket, target.prefix]
    subject = [ctx.resource.metadata.uid, *place, fingerprint]
    return names.storage_removal_name(ctx.resource.name, hashlib.sha256(json.dumps(subject).encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Removal:
    """What a record says."""

    target: BucketTarget
    fingerprint: str

    @classmethod
    def of(cls, record: Object) -> "Removal | None":
        """None for a record that somebody else has written."""
        data = record.get("data", {})
        try:
            target = from_json(data.get(TARGET_KEY, ""))
        except BadStorageTarget:
            return None
        if not isinstance(target, BucketTarget) or FINGERPRINT_KEY not in data:
            return None
        return cls(target, data[FINGERPRINT_KEY])


def job(record: Object, removal: Removal, image: RuntimeImage) -> Object:
    """The Job that removes what `record` names. The record owns it, so neither is left when all is removed."""
    meta = record["metadata"]
    owner = {"apiVersion": CONFIG_MAP.api_version, "kind": CONFIG_MAP.name, "name": meta["name"], "uid": meta["uid"]}
    labels = {key: value for key, value in meta["labels"].items() if key != names.LABEL_RESOURCE_UID}
    return {
        "apiVersion": JOB.api_version,
        "kind": JOB.name,
        "metadata": {
            "name": meta["name"],
            "namespace": meta["namespace"],
            "labels": labels,
            "ownerReferences": [owner],
        },
        "spec": {
            "backoffLimit": POD_ATTEMPTS - 1,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": _pod(removal, image)},
        },
    }


def _pod(removal: Removal, image: RuntimeImage) -> dict[str, Any]:
    target = removal.target
    volumes, mounts = bucket.volumes(target)
    account = pods.Account(target.service_account or DEFAULT_ACCOUNT, ours=False)
    command = ["speccache-runtime", "empty-storage", "--target", target.to_json()]
    command += ["--fingerprint", removal.fingerprint, "--termination-message"]
    return {**pods.short_pod(image, account, command, volumes, mounts), "restartPolicy": "Never"}
