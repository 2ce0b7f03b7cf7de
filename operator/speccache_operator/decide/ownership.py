"""Whose object is this? Nothing is changed or deleted before that is answered with "ours"."""

from enum import Enum

from speccache_api import names
from speccache_operator.kinds import CLAIM, Key, Object, kind_of


class Owner(Enum):
    """Answer for an object that has the name of a child."""

    OURS = "ours"
    LEAVING = "leaving"  # being deleted, or of a deleted resource of the same name: wait for the garbage collector
    FOREIGN = "foreign"


def owner_of(obj: Object, key: Key, uid: str) -> Owner:
    """Who owns `obj`, for the resource `key` with this uid.

    Claims are ours by label as well: a retained one outlives its resource and is taken up again.
    """
    meta = obj["metadata"]
    if meta.get("deletionTimestamp"):
        return Owner.LEAVING
    controller = next((ref for ref in meta.get("ownerReferences", ()) if ref.get("controller")), None)
    if controller is None:
        return Owner.OURS if kind_of(obj) is CLAIM and _labelled(obj, key.name) else Owner.FOREIGN
    if controller["uid"] == uid:
        return Owner.OURS
    if controller["kind"] == names.KIND and controller["name"] == key.name:
        return Owner.LEAVING
    return Owner.FOREIGN


def _labelled(obj: Object, name: str) -> bool:
    labels = obj["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in names.object_labels(name, names.COMPONENT_STORAGE).items())
