"""Metadata that every child carries: who owns it and how it is found."""

from typing import Any

from speccache_api import names
from speccache_operator.children.context import BuildContext


def metadata(ctx: BuildContext, name: str, component: str = names.COMPONENT_SERVER) -> dict[str, Any]:
    """Name, namespace, labels, and the owner reference by which Kubernetes deletes the child with its resource.

    No `blockOwnerDeletion`: nothing needs it, and on some clusters it takes the right to update finalizers.
    """
    return {**orphan_metadata(ctx, name, component), "ownerReferences": [owner_reference(ctx)]}


def orphan_metadata(ctx: BuildContext, name: str, component: str) -> dict[str, Any]:
    """The same without an owner: for what outlives the resource."""
    resource = ctx.resource
    return {
        "name": name,
        "namespace": resource.namespace,
        "labels": names.object_labels(resource.name, component),
    }


def owner_reference(ctx: BuildContext) -> dict[str, Any]:
    """The reference that makes the resource the controller of a child."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": ctx.resource.name,
        "uid": ctx.resource.metadata.uid,
        "controller": True,
    }
