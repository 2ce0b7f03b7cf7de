"""The PersistentVolumeClaim of the storage tier, when the operator is to create it."""

from typing import Any

from speccache_api import names
from speccache_api.quantity import format_bytes, parse_amount
from speccache_operator.children.answer import Answer, Built
from speccache_operator.children.context import BuildContext
from speccache_operator.children.meta import metadata, orphan_metadata
from speccache_operator.kinds import CLAIM, Object


def build(ctx: BuildContext) -> Built:
    """Wanted when `storage` gives a size instead of a claim's name. Never absent: it holds data.

    With retention Retain it has no owner, so nothing deletes it with the resource: neither a finalizer nor a running
    operator is needed to keep the data. With Delete it is owned like every other child.
    """
    storage = ctx.resource.spec.kv_cache.storage
    wanted = storage.persistent_volume_claim if storage is not None else None
    if storage is None or wanted is None:
        return Answer.UNKNOWN
    name = names.claim_name(ctx.resource.name)
    live = ctx.storage.claims.get(name)
    if live is not None and not ctx.storage.usable:
        return Answer.UNKNOWN  # what is wrong with it is the storage aspect's to tell
    if not wanted.created:
        return _released(ctx, live) if live is not None and wanted.claim_name == name else Answer.UNKNOWN
    make = orphan_metadata if storage.retention == "Retain" else metadata
    spec: dict[str, Any] = {
        "accessModes": list(wanted.modes),
        "resources": {"requests": {"storage": _size(wanted.size or 0, live)}},
    }
    if wanted.storage_class_name is not None:
        spec["storageClassName"] = wanted.storage_class_name
    return _claim(make(ctx, name, names.COMPONENT_STORAGE), spec)


def _released(ctx: BuildContext, live: Object) -> Built:
    """The claim that was made for this resource, without its owner, once the resource names it like any other.

    It belonged to the resource when `storage` gave a size and retention Delete. A claim that is named is never deleted.
    """
    if all(owner["uid"] != ctx.resource.metadata.uid for owner in live["metadata"].get("ownerReferences", ())):
        return Answer.UNKNOWN
    kept = {"accessModes", "storageClassName"} & live["spec"].keys()
    spec = {
        **{key: live["spec"][key] for key in sorted(kept)},
        "resources": {"requests": {"storage": requested(live)}},
    }
    return _claim(orphan_metadata(ctx, live["metadata"]["name"], names.COMPONENT_STORAGE), spec)


def _size(wanted: int, live: Object | None) -> str:
    """The size to ask for: that of `live` when somebody has enlarged it, as a claim can grow and never shrink."""
    planned = format_bytes(wanted)
    if live is None or parse_amount(requested(live)) <= parse_amount(planned):
        return planned
    return requested(live)


def grows(live: Object, planned: Object) -> bool:
    """True when `planned` asks for more than the claim `live` does."""
    return parse_amount(requested(planned)) > parse_amount(requested(live))


def requested(claim: Object) -> str:
    """The size that the claim asks for."""
    return str(claim["spec"]["resources"]["requests"]["storage"])


def _claim(meta: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": CLAIM.api_version, "kind": CLAIM.name, "metadata": meta, "spec": spec}
