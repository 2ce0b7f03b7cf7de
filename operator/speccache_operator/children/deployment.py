"""The Deployment that runs the replicas: restricted pods with exactly the memory that was computed.

Replicas hold no identity: what must outlive one is on the storage tier, under keys that all of them know. So a pod on a
dead node is replaced elsewhere, and with a volume that two pods may mount a new pod serves before an old one goes.
"""

from typing import Any

from speccache_api import names
from speccache_api.quantity import format_bytes
from speccache_api.storage_target import BucketTarget, VolumeTarget
from speccache_operator.children import bucket, pods
from speccache_operator.children.answer import Answer, Built
from speccache_operator.children.context import BuildContext, Sized
from speccache_operator.children.meta import metadata
from speccache_operator.children.mounts import model_mounts
from speccache_operator.kinds import DEPLOYMENT

_WIRE_VOLUME = "wire"
_ADMIN_VOLUME = "admin-token"
_SHARED_MEMORY_VOLUME = "shared-memory"
SHUTDOWN_SECONDS = 15
"""Part of the grace period for everything but draining: being forgotten, noticing the signal, closing files, ending."""
FORGOTTEN_SECONDS = 5
"""A pod that is to end goes on as before for so long, until every node knows that the Service no longer leads to it."""
SURGE = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
RECREATE = {"type": "Recreate"}
"""Old pods end before new ones are made."""
START_SECONDS = 1800
"""How long loading a model may take before the pod is started anew. Large weights come from slow volumes."""


def build(ctx: BuildContext) -> Built:
    """Unknown until the memory is sized. Without `replicas`: how many there are to be is not the template's matter."""
    if ctx.sized is None:
        return Answer.UNKNOWN
    name = ctx.resource.name
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.name,
        "metadata": metadata(ctx, names.workload_name(name)),
        "spec": {
            "selector": {"matchLabels": names.selector_labels(name)},
            "strategy": SURGE if ctx.shared else RECREATE,
            # The resource is the history: an older template would be put back at once.
            "revisionHistoryLimit": 0,
            "progressDeadlineSeconds": START_SECONDS + SHUTDOWN_SECONDS,
            "template": _template(ctx, ctx.sized),
        },
    }


def _template(ctx: BuildContext, sized: Sized) -> dict[str, Any]:
    drain = ctx.resource.spec.drain
    volumes, mounts = _volumes(ctx, sized)
    grace = drain.request_timeout_seconds + drain.flush_timeout_seconds + SHUTDOWN_SECONDS
    return {
        "metadata": {
            "labels": _labels(ctx),
            "annotations": {names.ANNOTATION_WIRE_HASH: sized.wire.digest()},
        },
        "spec": {
            **pods.base_spec(ctx.image, pods.served_account(ctx)),
            "terminationGracePeriodSeconds": grace,
            "containers": [_container(ctx, sized, mounts)],
            "volumes": volumes,
        },
    }


def _labels(ctx: BuildContext) -> dict[str, str]:
    resource = ctx.resource
    return {**names.object_labels(resource.name), names.LABEL_RESOURCE_UID: resource.metadata.uid}


def _container(ctx: BuildContext, sized: Sized, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **pods.base_container(ctx.image),
        "command": ["speccache-runtime", "serve", "--wire", names.WIRE_PATH],
        "env": pods.environment(),
        "ports": _ports(ctx),
        "resources": container_resources(ctx, sized),
        # Until the model is loaded; the others begin at once when it succeeds, so its period is what a restart waits.
        "startupProbe": _probe("/ready", period=2, failures=START_SECONDS // 2),
        "readinessProbe": _probe("/ready", period=5, failures=2),
        "livenessProbe": _probe("/health", period=10, failures=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": FORGOTTEN_SECONDS}}},
        "volumeMounts": mounts,
    }


def _ports(ctx: BuildContext) -> list[dict[str, Any]]:
    ports = {names.HTTP_PORT_NAME: names.HTTP_PORT}
    if ctx.resource.spec.admin is not None:
        ports[names.ADMIN_PORT_NAME] = names.ADMIN_PORT
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def container_resources(ctx: BuildContext, sized: Sized) -> dict[str, Any]:
    """Requests and limits: the user's, and with memory.policy Auto the computed memory as both."""
    given = ctx.resource.spec.resources
    limits = dict((given.limits if given else None) or {})
    requests = dict((given.requests if given else None) or {})
    if ctx.resource.spec.memory.policy == "Auto":
        limits["memory"] = requests["memory"] = format_bytes(sized.memory.limit)
    return {"limits": limits, "requests": requests}


def _probe(path: str, *, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": names.HTTP_PORT_NAME},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _volumes(ctx: BuildContext, sized: Sized) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    spec = ctx.resource.spec
    claims = [pods.ClaimMount.of_model(mount) for mount in model_mounts(spec)]
    if isinstance(ctx.target, VolumeTarget) and ctx.target.claim is not None:
        claims.append(pods.ClaimMount(claim=ctx.target.claim, path=ctx.target.path))
    volumes, mounts = pods.claim_volumes(claims)
    scratch, scratch_mount = pods.scratch_volume()
    wire = {"name": _WIRE_VOLUME, "configMap": {"name": names.config_map_name(ctx.resource.name)}}
    wire_mount = {"name": _WIRE_VOLUME, "mountPath": names.WIRE_PATH.rpartition("/")[0], "readOnly": True}
    volumes, mounts = [wire, scratch, *volumes], [wire_mount, scratch_mount, *mounts]
    for more, more_mounts in (_of_bucket(ctx), _of_admin(ctx)):
        volumes, mounts = [*volumes, *more], [*mounts, *more_mounts]
    if sized.memory.shared_memory > 0:
        size = format_bytes(sized.memory.shared_memory)
        volumes.append({"name": _SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": size}})
        mounts.append({"name": _SHARED_MEMORY_VOLUME, "mountPath": "/dev/shm"})
    return volumes, mounts


Volumes = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""(volumes, volumeMounts)"""


def _of_bucket(ctx: BuildContext) -> Volumes:
    return bucket.volumes(ctx.target) if isinstance(ctx.target, BucketTarget) else ([], [])


def _of_admin(ctx: BuildContext) -> Volumes:
    """The token as a file. Serving does not need it, so a Secret that is missing keeps no pod from starting."""
    if ctx.resource.spec.admin is None:
        return [], []
    token, path = ctx.resource.spec.admin.token_secret, names.ADMIN_TOKEN_PATH
    folder, _, file = path.rpartition("/")
    items = [{"key": token.key, "path": file}]
    source = {"secretName": token.name, "items": items, "defaultMode": bucket.READABLE, "optional": True}
    mount = {"name": _ADMIN_VOLUME, "mountPath": folder, "readOnly": True}
    return [{"name": _ADMIN_VOLUME, "secret": source}], [mount]
