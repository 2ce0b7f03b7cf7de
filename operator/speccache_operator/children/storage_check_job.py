"""The Job that tries a bucket before any pod serves from it: it lists, writes, reads and deletes.

Its pod has the served pods' image, identity, Secret and certificates, so what it cannot do they could not do either.
"""

from typing import Any

from speccache_api import names
from speccache_api.storage_target import BucketTarget
from speccache_operator.children import bucket, inquiry, pods
from speccache_operator.children.answer import Answer, Built
from speccache_operator.children.context import BuildContext


def build(ctx: BuildContext) -> Built:
    """Wanted until its result is recorded; never for a volume, which tells by itself what is wrong."""
    target = ctx.target
    if not isinstance(target, BucketTarget):
        return Answer.ABSENT
    return inquiry.job(ctx, ctx.check, names.COMPONENT_STORAGE_CHECK, lambda: _pod(ctx, target))


def _pod(ctx: BuildContext, target: BucketTarget) -> dict[str, Any]:
    volumes, mounts = bucket.volumes(target)
    command = ["speccache-runtime", "check-storage", "--target", target.to_json(), "--termination-message"]
    return pods.short_pod(ctx.image, pods.served_account(ctx), command, volumes, mounts)
