"""The PersistentVolumeClaim of the storage tier, when the operator is to create it."""

from collections.abc import Mapping
from typing import Any

from speccache_api import names
from speccache_api.quantity import format_bytes, parse_amount
from speccache_operator.children.context import BuildContext
from speccache_operator.children.meta import metadata, orphan_metadata
from speccache_operator.kinds import CLAIM, Object


def build(ctx: BuildContext) -> dict[str, Any] | None:
    """Wanted when `storage` gives a size instead of a claim's name.

    With retention Retain it has no owner, so nothing deletes it with the resource: neither a finalizer nor a running
    operator is needed to keep the data. With Delete it is owned like every other child.
    """
    storage = ctx.resource.spec.kv_cache.storage
    if storage is None or not storage.persistent_volume_claim.created:
        return None
    wanted = storage.persistent_volume_claim
    make = orphan_metadata if storage.retention == "Retain" else metadata
    spec: dict[str, Any] = {
        "accessModes": list(wanted.modes),
        "resources": {"requests": {"storage": format_bytes(wanted.size or 0)}},
    }
    if wanted.storage_class_name is not None:
        spec["storageClassName"] = wanted.storage_class_name
    return {
        "apiVersion": CLAIM.api_version,
        "kind": CLAIM.name,
        "metadata": make(ctx, names.claim_name(ctx.resource.name), names.COMPONENT_STORAGE),
        "spec": spec,
    }


def released(ctx: BuildContext, claims: Mapping[str, Object | None]) -> Object | None:
    """The claim that was made for this resource, without its owner, once the resource names it like any other.

    It belonged to the resource when `storage` gave a size and retention Delete. A claim that is named is never deleted.
    """
    storage = ctx.resource.spec.kv_cache.storage
    name = storage.persistent_volume_claim.claim_name if storage is not None else None
    live = claims.get(name) if name == names.claim_name(ctx.resource.name) else None
    if name is None or live is None:
        return None
    if all(owner["uid"] != ctx.resource.metadata.uid for owner in live["metadata"].get("ownerReferences", ())):
        return None
    kept = {"accessModes", "storageClassName"} & live["spec"].keys()
    return {
        "apiVersion": CLAIM.api_version,
        "kind": CLAIM.name,
        "metadata": orphan_metadata(ctx, name, names.COMPONENT_STORAGE),
        "spec": {
            **{key: live["spec"][key] for key in sorted(kept)},
            "resources": {"requests": {"storage": live["spec"]["resources"]["requests"]["storage"]}},
        },
    }


def at_least(planned: Object, live: Object) -> Object:
    """`planned`, or with the size of `live` when somebody has enlarged it: a claim can grow and never shrink."""
    sizes = [obj["spec"]["resources"]["requests"]["storage"] for obj in (planned, live)]
    if parse_amount(str(sizes[1])) <= parse_amount(str(sizes[0])):
        return planned
    return {**planned, "spec": {**planned["spec"], "resources": {"requests": {"storage": sizes[1]}}}}
