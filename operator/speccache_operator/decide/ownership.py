"""Whose object is this? Nothing is changed or deleted before that is answered with "ours"."""

from collections.abc import Mapping
from enum import Enum

from speccache_api import names
from speccache_operator.kinds import CLAIM, CONFIG_MAP, Key, Object, kind_of


class Owner(Enum):
    """Answer for an object that has the name of a child."""

    OURS = "ours"
    LEAVING = "leaving"  # being deleted, or of a deleted resource of the same name: wait for the garbage collector
    FOREIGN = "foreign"


def owner_of(obj: Object, key: Key, uid: str) -> Owner:
    """Who owns `obj`, for the resource `key` with this uid.

    Two kinds of objects outlive their resource and have no owner. Claims are ours by label: a retained one is taken up
    again. Records of what is to be removed from a bucket are ours with our uid; a predecessor's are its own.
    """
    meta = obj["metadata"]
    if meta.get("deletionTimestamp"):
        return Owner.LEAVING
    controller = next((ref for ref in meta.get("ownerReferences", ()) if ref.get("controller")), None)
    if controller is None:
        return Owner.OURS if _outlives(obj, key.name, uid) else Owner.FOREIGN
    if controller["uid"] == uid:
        return Owner.OURS
    if controller["kind"] == names.KIND and controller["name"] == key.name:
        return Owner.LEAVING
    return Owner.FOREIGN


def _outlives(obj: Object, name: str, uid: str) -> bool:
    if kind_of(obj) is CLAIM:
        return _labelled(obj, names.object_labels(name, names.COMPONENT_STORAGE))
    wanted = names.object_labels(name, names.COMPONENT_STORAGE_REMOVAL)
    return kind_of(obj) is CONFIG_MAP and _labelled(obj, {**wanted, names.LABEL_RESOURCE_UID: uid})


def _labelled(obj: Object, wanted: Mapping[str, str]) -> bool:
    labels = obj["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in wanted.items())
