"""The Job that reads the model directories before anything can be sized.

Its pod has the served pods' image, models and security, and leaves an `Inspection` as its answer (inquiry.py).
"""

from typing import Any

from speccache_api import names
from speccache_operator.children import inquiry, pods
from speccache_operator.children.answer import Built
from speccache_operator.children.context import BuildContext
from speccache_operator.children.mounts import model_mounts


def build(ctx: BuildContext) -> Built:
    """Wanted until its result is recorded."""
    return inquiry.job(ctx, ctx.inspection, names.COMPONENT_INSPECTION, lambda: _pod(ctx))


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
    return pods.short_pod(ctx.image, pods.own_account(ctx), command(ctx), volumes, mounts)
