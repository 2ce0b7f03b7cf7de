"""The closed set of reasons, each with what it weighs: whether it is told as a warning, and what is told first."""

from enum import IntEnum, StrEnum

from speccache_api import names


class Weight(IntEnum):
    """How much a person has to care."""

    GOOD = 0  # as it should be
    STEP = 1  # on its way, or told by another condition: waiting is right
    TROUBLE = 2  # somebody has to do something


class Reason(StrEnum):
    """Every reason a condition can have; the comment says what must be true. Among troubles the earlier is worse."""

    _value_: str
    weight: Weight

    def __new__(cls, value: str, weight: Weight = Weight.TROUBLE) -> "Reason":
        """A text that knows its weight."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.weight = weight
        return member

    @property
    def quiet(self) -> bool:
        """True when a condition that turns False for this reason is no warning."""
        return self.weight is not Weight.TROUBLE

    @property
    def rank(self) -> int:
        """Place in the order of telling: lower first."""
        return list(type(self)).index(self)

    # ConfigValid
    VALID = "Valid", Weight.GOOD  # the resource was parsed and all its rules hold
    INVALID_RESOURCE = "InvalidResource"  # a field or rule is broken: stored under an older CRD, or past its checks
    NOT_CHECKED = "NotChecked", Weight.STEP  # an earlier aspect stopped the work before this one

    # ModelInspected
    BUILT_IN = "BuiltIn", Weight.GOOD  # facts come from the table of built-in models
    GEOMETRY_DECLARED = "GeometryDeclared", Weight.GOOD  # facts come from kvGeometry
    INSPECTED = "Inspected", Weight.GOOD  # an inspection Job read them
    INSPECTION_RUNNING = "InspectionRunning", Weight.STEP  # the Job is made, or its pod has not ended
    INSPECTION_FAILED = "InspectionFailed"  # the Job's pod ended without a result
    MODEL_CLAIM_NOT_FOUND = "ModelClaimNotFound"  # a pvc:// model names a claim that does not exist

    # MemorySized
    SIZED = "Sized", Weight.GOOD  # limit computed and (when nodes can be seen) at least one node can hold it
    MANUAL = "Manual", Weight.GOOD  # policy Manual and the user's limit is enough
    MANUAL_SHORTFALL = "ManualShortfall"  # policy Manual and the user's limit is below the computed sum; pods still run
    INVALID_LIMIT = "InvalidLimit"  # policy Manual and the user's limit is not a size
    TIER_TOO_SMALL = "TierTooSmall"  # a tier holds less than one page pair
    EXCEEDS_NODE_ALLOCATABLE = "ExceedsNodeAllocatable"  # no node can hold the limit; no pod is made

    # StorageReady
    NO_STORAGE_TIER = "NoStorageTier", Weight.GOOD  # kvCache.storage is not given
    CLAIM_BOUND = "ClaimBound", Weight.GOOD  # the claim has its volume
    CLAIM_PENDING = "ClaimPending", Weight.STEP  # the claim has no volume yet; it may be waiting for its first pod
    CLAIM_NOT_FOUND = "ClaimNotFound"  # the named claim does not exist
    CLAIM_LOST = "ClaimLost"  # its volume is gone
    CLAIM_DELETING = "ClaimDeleting"  # somebody deleted it
    CLAIM_NOT_OWNED = "ClaimNotOwned"  # a foreign claim has the name of the one to create
    CLAIM_REFUSED = "ClaimRefused"  # the API server refuses to create or change it
    CLAIM_CANNOT_GROW = names.CLAIM_CANNOT_GROW  # the API server refuses a larger size; pods go on with the old one
    ACCESS_MODE_NOT_SHARED = "AccessModeNotShared"  # several replicas, and the claim cannot be shared
    ACCESS_MODE_READ_ONLY = "AccessModeReadOnly"  # the claim cannot be written
    BUCKET_READY = "BucketReady", Weight.GOOD  # a Job has used the bucket as pods do
    STORAGE_CHECK_RUNNING = "StorageCheckRunning", Weight.STEP  # the Job is made, or its pod has not ended
    NO_CREDENTIALS = "NoCredentials"  # no Secret, no keys in it, and no identity of the pod
    CREDENTIALS_EXPIRED = "CredentialsExpired"  # they were good once
    ACCESS_DENIED = "AccessDenied"  # the server knows the identity, or not, and says no
    BUCKET_NOT_FOUND = "BucketNotFound"  # there is a server, and it has no such bucket
    WRONG_REGION = "WrongRegion"  # the bucket is in another region
    ENDPOINT_UNREACHABLE = "EndpointUnreachable"  # no such host, or nobody answers there
    TLS_FAILED = "TlsFailed"  # its certificate is not to be trusted, or it does not speak TLS
    CLOCK_SKEW = "ClockSkew"  # the clocks of node and server are too far apart for signed requests
    STORAGE_TIMEOUT = "Timeout"  # it takes requests and does not answer them
    CONDITIONAL_PUT_UNSUPPORTED = "ConditionalPutUnsupported"  # If-None-Match is not honoured: writers would overwrite
    STORAGE_CHECK_FAILED = "StorageCheckFailed"  # anything else; the message has the server's words

    # ChildrenApplied, and Progressing and Ready when it is the cause
    APPLIED = "Applied", Weight.GOOD  # every child is as planned
    OBJECT_NOT_OWNED = "ObjectNotOwned"  # a foreign object has the name of a child
    APPLY_REFUSED = "ApplyRefused"  # the API server refuses a child
    KIND_NOT_SERVED = "KindNotServed"  # the cluster does not serve the kind of an optional child
    WAITING_FOR_DELETION = (
        "WaitingForDeletion",
        Weight.STEP,
    )  # a deleted resource's child is still there

    # Progressing
    COMPLETE = "Complete", Weight.GOOD  # children and pods are as planned
    ROLLING_OUT = "RollingOut", Weight.STEP  # pods of the newest template are being made
    SCALING = "Scaling", Weight.STEP  # the number of pods is not the wanted one
    STOPPED = "Stopped", Weight.STEP  # an aspect says no; nothing will happen until it changes
    WAITING = "Waiting", Weight.STEP  # an aspect has no answer yet

    # Ready: trouble of pods, the worst first (what is least likely to go away by waiting)
    OOM_KILLED = "OOMKilled"  # a container was killed for memory and is not ready
    CRASH_LOOPING = "CrashLooping"  # the runtime ends with an error again and again
    IMAGE_PULL_FAILED = "ImagePullFailed"  # the runtime image cannot be had
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"  # the kubelet cannot make the container
    POD_FAILED = "PodFailed"  # a pod was evicted or has failed as a whole
    UNSCHEDULABLE = "Unschedulable"  # no node takes a pod

    # Ready
    SERVING = "Serving", Weight.GOOD  # every wanted replica is ready
    STARTING = "Starting", Weight.STEP  # pods exist and are on their way
    PODS_MISSING = "PodsMissing", Weight.STEP  # the pods have not been made
    SCALED_TO_ZERO = "ScaledToZero", Weight.STEP  # replicas is 0
