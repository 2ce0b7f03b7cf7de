"""The aspect StorageReady: is there a claim that every replica can write to, or a bucket that answers?"""

from dataclasses import dataclass
from datetime import datetime

from speccache_api.resource import SpecCacheDeployment
from speccache_api.spec_storage import StorageClaim
from speccache_api.storage_target import BucketTarget, StorageTarget
from speccache_operator.children.context import Inquiry, RuntimeImage
from speccache_operator.decide import storage_check
from speccache_operator.decide.conditions import STORAGE_READY, Condition, Reason, Status
from speccache_operator.decide.ownership import Owner, owner_of
from speccache_operator.kinds import Key, Object
from speccache_operator.observe.observed import Observed

_FIELD = "spec.kvCache.storage.persistentVolumeClaim"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer. `usable` is False when pods with this storage must not be made. `check` is the Job that tries a
    bucket, `again_after` when to look again by itself.
    """

    condition: Condition
    usable: bool
    check: Inquiry | None = None
    again_after: float | None = None


def look(
    resource: SpecCacheDeployment, target: StorageTarget | None, observed: Observed, image: RuntimeImage, now: datetime
) -> Finding:
    """The state of what `target` names. Pure."""
    if target is None:
        return _usable("True", Reason.NO_STORAGE_TIER, "no storage tier; cached pages end with their pod")
    if isinstance(target, BucketTarget):
        found = storage_check.look(resource, target, observed, image, now)
        return Finding(found.condition, found.condition.holds, found.wanted, found.again_after)
    storage = resource.spec.kv_cache.storage
    assert storage is not None
    assert storage.persistent_volume_claim is not None
    return _look_at_claim(resource, storage.persistent_volume_claim, str(target.claim), observed)


def _look_at_claim(resource: SpecCacheDeployment, wanted: StorageClaim, name: str, observed: Observed) -> Finding:
    claim = observed.claims.get(name)
    if claim is None:
        if wanted.created:
            return _usable("Unknown", Reason.CLAIM_PENDING, f"claim {name} is being created")
        text = f"{_FIELD}.claimName: claim {name} does not exist in namespace {resource.namespace}; create it"
        return _unusable(Reason.CLAIM_NOT_FOUND, text)
    if claim["metadata"].get("deletionTimestamp"):
        return _unusable(Reason.CLAIM_DELETING, f"claim {name} is being deleted; wait for its end or name another one")
    key = Key(resource.namespace, resource.name)
    if wanted.created and owner_of(claim, key, resource.metadata.uid) is not Owner.OURS:
        text = f"claim {name} exists and is not of this resource; name it in {_FIELD}.claimName, or delete it"
        return _unusable(Reason.CLAIM_NOT_OWNED, text)
    return _other_claim(wanted, name, claim) or _sharing(resource, name, claim) or _binding(name, claim)


def _other_claim(wanted: StorageClaim, name: str, claim: Object) -> Finding | None:
    """A claim that was kept keeps its modes and its class; nobody can change them."""
    if not wanted.created:
        return None
    modes = list(claim["spec"].get("accessModes", ()))
    kind = claim["spec"].get("storageClassName", "")
    if set(modes) != set(wanted.modes):
        field, found = "accessModes", f"[{', '.join(modes)}]"
    elif wanted.storage_class_name not in (None, kind):
        field, found = "storageClassName", repr(kind)
    else:
        return None
    text = (
        f"claim {name} exists with {field} {found}, which cannot change;"
        f" set {_FIELD}.{field} to that, or delete the claim"
    )
    return _unusable(Reason.CLAIM_REFUSED, text)


def _sharing(resource: SpecCacheDeployment, name: str, claim: Object) -> Finding | None:
    modes = set(claim["spec"].get("accessModes", ()))
    replicas = resource.spec.wanted_replicas
    if modes and modes <= {"ReadOnlyMany"}:
        text = (
            f"claim {name} is ReadOnlyMany and the storage tier writes; use a claim with ReadWriteOnce or ReadWriteMany"
        )
        return _unusable(Reason.ACCESS_MODE_READ_ONLY, text)
    if replicas > 1 and "ReadWriteMany" not in modes:
        text = (
            f"{replicas} replicas share claim {name}, which allows {', '.join(sorted(modes)) or 'nothing'}; use a claim"
            " with ReadWriteMany, or set spec.replicas: 1"
        )
        return _unusable(Reason.ACCESS_MODE_NOT_SHARED, text)
    return None


def _binding(name: str, claim: Object) -> Finding:
    phase = claim.get("status", {}).get("phase")
    if phase == "Bound":
        return _usable("True", Reason.CLAIM_BOUND, f"claim {name} is bound")
    if phase == "Lost":
        return _unusable(
            Reason.CLAIM_LOST, f"the volume of claim {name} is gone; delete the claim, or name another one"
        )
    # Not an obstacle: many storage classes bind only once a pod that uses the claim is scheduled.
    return _usable("Unknown", Reason.CLAIM_PENDING, f"claim {name} has no volume yet")


def _usable(status: Status, reason: Reason, message: str) -> Finding:
    return Finding(Condition(STORAGE_READY, status, reason, message), usable=True)


def _unusable(reason: Reason, message: str) -> Finding:
    return Finding(Condition(STORAGE_READY, "False", reason, message), usable=False)
