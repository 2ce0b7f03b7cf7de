"""The ServiceAccount of the pods. It has no rights and no token; it exists to be named in policies and pull secrets."""

from typing import Any

from speccache_api import names
from speccache_operator.children import pods
from speccache_operator.children.answer import Built
from speccache_operator.children.context import BuildContext
from speccache_operator.children.meta import metadata
from speccache_operator.kinds import SERVICE_ACCOUNT


def build(ctx: BuildContext) -> Built:
    """Always wanted."""
    account: dict[str, Any] = {
        "apiVersion": SERVICE_ACCOUNT.api_version,
        "kind": SERVICE_ACCOUNT.name,
        "metadata": metadata(ctx, names.service_account_name(ctx.resource.name)),
        "automountServiceAccountToken": False,
    }
    if ctx.image.pull_secrets:
        account["imagePullSecrets"] = pods.image_pull_secrets(ctx.image)
    return account
