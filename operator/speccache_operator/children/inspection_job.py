"""The Job that reads the model directories before anything can be sized.

Its pod has the served pods' image, claims and security, and leaves an `Inspection` as its termination message. It is
deleted once that is recorded (inspection_record.py).
"""

from typing import Any

from speccache_api import names
from speccache_operator.children import pods
from speccache_operator.children.answer import Answer, Built
from speccache_operator.children.context import BuildContext
from speccache_operator.children.meta import metadata
from speccache_operator.children.mounts import model_mounts
from speccache_operator.kinds import JOB

ATTEMPTS = 4
DEADLINE_SECONDS = 3600
"""Covers slow volumes and image pulls; the Job is tried again later anyway."""


def build(ctx: BuildContext) -> Built:
    """Wanted until its result is recorded."""
    if ctx.inspection is None or not ctx.inspection.running:
        return Answer.ABSENT
    name = ctx.resource.name
    labels = names.object_labels(name, names.COMPONENT_INSPECTION)
    return {
        "apiVersion": JOB.api_version,
        "kind": JOB.name,
        "metadata": metadata(ctx, ctx.inspection.name, names.COMPONENT_INSPECTION),
        "spec": {
            "backoffLimit": ATTEMPTS - 1,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": _pod(ctx)},
        },
    }


def command(ctx: BuildContext) -> list[str]:
    """What the inspection pod runs. A built-in model is named by its URI: it is inside the image."""
    spec = ctx.resource.spec
    paths = {mount.field: mount.path for mount in model_mounts(spec)}
    words = ["speccache-runtime", "inspect", "--target", paths.get("spec.model.uri", spec.model.uri)]
    if spec.draft is not None:
        words += ["--draft", paths.get("spec.speculative.draftModel.uri", spec.draft.uri)]
        words += ["--algorithm", spec.algorithm]
    return [*words, "--termination-message"]


def _pod(ctx: BuildContext) -> dict[str, Any]:
    volumes, mounts = pods.claim_volumes(pods.ClaimMount.of_model(m) for m in model_mounts(ctx.resource.spec))
    scratch, scratch_mount = pods.scratch_volume()
    container = {
        **pods.base_container(ctx),
        "command": command(ctx),
        "env": pods.environment(),
        # Only headers are read; what it takes is importing the libraries.
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"cpu": "1", "memory": "2Gi"}},
        "volumeMounts": [scratch_mount, *mounts],
    }
    return {
        **pods.base_spec(ctx),
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [scratch, *volumes],
    }
