"""Parts of pod specs that the served pods and the inspection pod share: restricted security, and volumes of claims."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from speccache_api import names
from speccache_operator.children.context import BuildContext
from speccache_operator.children.mounts import ModelMount

USER = 65532
"""User and group of the runtime image; claims are made writable for the group."""

_TMP_VOLUME = "tmp"


@dataclass(frozen=True, slots=True)
class ClaimMount:
    """A claim inside the container."""

    claim: str
    path: str
    read_only: bool = False

    @classmethod
    def of_model(cls, mount: ModelMount) -> "ClaimMount":
        """A model's claim; models are never written."""
        return cls(claim=mount.claim, path=mount.mount_path, read_only=True)


def claim_volumes(mounts: Iterable[ClaimMount]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes, volumeMounts). One volume for each claim however often it is mounted: kubelets have hung on pods that
    name one claim in two volumes. It is read-only unless a mount of it is written.
    """
    mounts = tuple(mounts)
    names_of = {claim: f"claim-{number}" for number, claim in enumerate(dict.fromkeys(m.claim for m in mounts))}
    written = {mount.claim for mount in mounts if not mount.read_only}
    volumes = [_volume(volume, claim, read_only=claim not in written) for claim, volume in names_of.items()]
    return volumes, [_volume_mount(names_of[mount.claim], mount) for mount in mounts]


def _volume(name: str, claim: str, *, read_only: bool) -> dict[str, Any]:
    source: dict[str, Any] = {"claimName": claim}
    if read_only:
        source["readOnly"] = True
    return {"name": name, "persistentVolumeClaim": source}


def _volume_mount(volume: str, mount: ClaimMount) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": volume, "mountPath": mount.path}
    if mount.read_only:
        entry["readOnly"] = True
    return entry


def scratch_volume() -> tuple[dict[str, Any], dict[str, Any]]:
    """(volume, volumeMount) of the only writable folder of a container whose root is read-only."""
    return {"name": _TMP_VOLUME, "emptyDir": {}}, {"name": _TMP_VOLUME, "mountPath": names.SCRATCH_PATH}


def environment(extra: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Variables of every runtime container: a home that can be written, and no downloads."""
    values = {"HOME": names.SCRATCH_PATH, "HF_HUB_OFFLINE": "1", **(extra or {})}
    return [{"name": key, "value": value} for key, value in values.items()]


def pod_security() -> dict[str, Any]:
    """Security context of a pod under the *restricted* Pod Security Standard."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """Security context of a container under the *restricted* Pod Security Standard, with a read-only root."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }


def base_spec(ctx: BuildContext) -> dict[str, Any]:
    """Fields of a pod spec that do not depend on what the pod does."""
    return {
        "serviceAccountName": names.service_account_name(ctx.resource.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
    }


def base_container(ctx: BuildContext) -> dict[str, Any]:
    """Fields of the runtime container that do not depend on what it does."""
    return {
        "name": names.CONTAINER_NAME,
        "image": ctx.image.name,
        "imagePullPolicy": ctx.image.pull_policy,
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
