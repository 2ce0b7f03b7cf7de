"""What a pod needs to use a bucket: credentials and certificates as files. The operator knows their names only."""

from typing import Any

from speccache_api import names
from speccache_api.storage_target import BucketTarget

_CREDENTIALS_VOLUME = "s3-credentials"
_CERTIFICATES_VOLUME = "s3-certificates"
READABLE = 0o440
"""For the user of the image and its group: what is in a Secret is nobody else's."""


def volumes(target: BucketTarget) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes, volumeMounts). Files follow a changed Secret, which variables of the environment would not.

    Both are optional for the kubelet: a pod that waits for one says nothing, while the runtime that misses it says
    which one.
    """
    found: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if target.credentials_secret is not None:
        secret = {"secretName": target.credentials_secret, "defaultMode": READABLE, "optional": True}
        found.append({"name": _CREDENTIALS_VOLUME, "secret": secret})
        mounts.append(_mount(_CREDENTIALS_VOLUME, names.S3_CREDENTIALS_PATH))
    if target.ca_bundle_config_map is not None:
        certificates = {"name": target.ca_bundle_config_map, "optional": True}
        found.append({"name": _CERTIFICATES_VOLUME, "configMap": certificates})
        mounts.append(_mount(_CERTIFICATES_VOLUME, names.S3_CA_BUNDLE_PATH))
    return found, mounts


def _mount(volume: str, path: str) -> dict[str, Any]:
    return {"name": volume, "mountPath": path, "readOnly": True}
