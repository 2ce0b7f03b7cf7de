"""Parts of pod specs that the served pods and those of Jobs share: identity, restricted security, volumes of claims."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from speccache_api import names
from speccache_api.storage_target import BucketTarget
from speccache_operator.children.context import BuildContext, RuntimeImage
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


@dataclass(frozen=True, slots=True)
class Account:
    """The ServiceAccount that a pod runs as. `ours`: the operator made it, and put the pull secrets on it."""

    name: str
    ours: bool


def own_account(ctx: BuildContext) -> Account:
    """The one that the operator makes for the resource."""
    return Account(names.service_account_name(ctx.resource.name), ours=True)


def served_account(ctx: BuildContext) -> Account:
    """The one that the served pods run as: that of the bucket, if it names one."""
    named = ctx.target.service_account if isinstance(ctx.target, BucketTarget) else None
    return own_account(ctx) if named is None else Account(named, ours=False)


def base_spec(image: RuntimeImage, account: Account) -> dict[str, Any]:
    """Fields of a pod spec that do not depend on what the pod does. The token of a web identity is not mounted by
    `automountServiceAccountToken`: it is a volume of its own, which the cluster's webhook adds.
    """
    pull = {} if account.ours or not image.pull_secrets else {"imagePullSecrets": image_pull_secrets(image)}
    return {
        "serviceAccountName": account.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        **pull,
    }


def image_pull_secrets(image: RuntimeImage) -> list[dict[str, Any]]:
    """References to the Secrets with which the image is pulled."""
    return [{"name": name} for name in image.pull_secrets]


def base_container(image: RuntimeImage) -> dict[str, Any]:
    """Fields of the runtime container that do not depend on what it does."""
    return {
        "name": names.CONTAINER_NAME,
        "image": image.name,
        "imagePullPolicy": image.pull_policy,
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def short_pod(
    image: RuntimeImage,
    account: Account,
    command: list[str],
    volumes: list[dict[str, Any]],
    mounts: list[dict[str, Any]],
) -> dict[str, Any]:
    """The spec of a pod that does one thing and ends. What it takes is importing the libraries."""
    scratch, scratch_mount = scratch_volume()
    container = {
        **base_container(image),
        "command": command,
        "env": environment(),
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"cpu": "1", "memory": "2Gi"}},
        "volumeMounts": [scratch_mount, *mounts],
    }
    return {**base_spec(image, account), "containers": [container], "volumes": [scratch, *volumes]}
