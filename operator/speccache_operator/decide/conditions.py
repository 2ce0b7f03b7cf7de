"""Conditions as values, and the closed set of their reasons.

A condition type says which aspect, its status whether it holds, its reason which of the known cases it is (for
programs), its message what to do about it (for people). Aspects decide conditions, `plan` collects them, `status`
writes them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from speccache_api.status import (
    CONDITION_TYPES,
    CONFIG_VALID,
    MEMORY_SIZED,
    MODEL_INSPECTED,
    PROGRESSING,
    READY,
    STORAGE_READY,
)

__all__ = [
    "CONDITION_TYPES",
    "CONFIG_VALID",
    "MEMORY_SIZED",
    "MODEL_INSPECTED",
    "PROGRESSING",
    "READY",
    "STORAGE_READY",
    "Condition",
    "Reason",
    "Status",
    "head",
    "tail",
]

Status = Literal["True", "False", "Unknown"]
_MOST = 1024


class Reason(StrEnum):
    """Every reason a condition can have; the comment says what must be true."""

    # ConfigValid
    VALID = "Valid"  # the resource was parsed and all its rules hold
    INVALID_RESOURCE = "InvalidResource"  # a field or rule is broken: stored under an older CRD, or past its checks
    NOT_CHECKED = "NotChecked"  # an earlier aspect stopped the work before this one

    # ModelInspected
    BUILT_IN = "BuiltIn"  # facts come from the table of built-in models
    GEOMETRY_DECLARED = "GeometryDeclared"  # facts come from kvGeometry
    INSPECTED = "Inspected"  # an inspection Job read them
    INSPECTION_RUNNING = "InspectionRunning"  # the Job is made, or its pod has not ended
    INSPECTION_FAILED = "InspectionFailed"  # the Job's pod ended without a result
    MODEL_CLAIM_NOT_FOUND = "ModelClaimNotFound"  # a pvc:// model names a claim that does not exist

    # MemorySized
    SIZED = "Sized"  # limit computed and (when nodes can be seen) at least one node can hold it
    MANUAL = "Manual"  # policy Manual and the user's limit is enough
    MANUAL_SHORTFALL = "ManualShortfall"  # policy Manual and the user's limit is below the computed sum; pods still run
    INVALID_LIMIT = "InvalidLimit"  # policy Manual and the user's limit is not a size
    TIER_TOO_SMALL = "TierTooSmall"  # a tier holds less than one page pair
    EXCEEDS_NODE_ALLOCATABLE = "ExceedsNodeAllocatable"  # no node can hold the limit; no pod is made

    # StorageReady
    NO_STORAGE_TIER = "NoStorageTier"  # kvCache.storage is not given
    CLAIM_BOUND = "ClaimBound"  # the claim has its volume
    CLAIM_PENDING = "ClaimPending"  # the claim has no volume yet; it may be waiting for its first pod
    CLAIM_NOT_FOUND = "ClaimNotFound"  # the named claim does not exist
    CLAIM_LOST = "ClaimLost"  # its volume is gone
    CLAIM_DELETING = "ClaimDeleting"  # somebody deleted it
    CLAIM_NOT_OWNED = "ClaimNotOwned"  # a foreign claim has the name of the one to create
    CLAIM_REFUSED = "ClaimRefused"  # the API server refuses to create or change it
    ACCESS_MODE_NOT_SHARED = "AccessModeNotShared"  # several replicas, and the claim cannot be shared
    ACCESS_MODE_READ_ONLY = "AccessModeReadOnly"  # the claim cannot be written

    # Progressing, and Ready when it is the cause
    COMPLETE = "Complete"  # children and pods are as planned
    ROLLING_OUT = "RollingOut"  # pods of the newest template are being made
    SCALING = "Scaling"  # the number of pods is not the wanted one
    STOPPED = "Stopped"  # an aspect says no; nothing will happen until it changes
    WAITING = "Waiting"  # an aspect has no answer yet
    WAITING_FOR_DELETION = "WaitingForDeletion"  # a child of a deleted resource of this name is still there
    OBJECT_NOT_OWNED = "ObjectNotOwned"  # a foreign object has the name of a child
    APPLY_REFUSED = "ApplyRefused"  # the API server refuses a child

    # Ready
    SERVING = "Serving"  # every wanted replica is ready
    STARTING = "Starting"  # pods exist and are on their way
    PODS_MISSING = "PodsMissing"  # the StatefulSet has not made its pods
    SCALED_TO_ZERO = "ScaledToZero"  # replicas is 0
    UNSCHEDULABLE = "Unschedulable"  # no node takes a pod
    IMAGE_PULL_FAILED = "ImagePullFailed"  # the runtime image cannot be had
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"  # the kubelet cannot make the container
    OOM_KILLED = "OOMKilled"  # a container was killed for memory and is not ready
    CRASH_LOOPING = "CrashLooping"  # the runtime ends with an error again and again
    POD_FAILED = "PodFailed"  # a pod was evicted or has failed as a whole


@dataclass(frozen=True, slots=True)
class Condition:
    """One aspect's answer. `earlier` says that it is about the configuration before the newest one."""

    type: str
    status: Status
    reason: Reason
    message: str
    earlier: bool = False

    @property
    def holds(self) -> bool:
        """True when the status is True."""
        return self.status == "True"


def head(text: str, most: int = _MOST) -> str:
    """`text` without surrounding blanks, and without its end when it is longer than `most` characters."""
    text = text.strip()
    return text if len(text) <= most else text[: most - 1] + "…"


def tail(text: str, most: int = _MOST) -> str:
    """`text` without surrounding blanks, and without its beginning when it is too long: ends of logs say more."""
    text = text.strip()
    return text if len(text) <= most else "…" + text[1 - most :]
