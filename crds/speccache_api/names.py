"""Every name that more than one part of SpecCache must spell the same way.

The operator writes these into objects, the runtime and the tests read them back. A name that is typed twice will differ
one day, so it is typed here. All functions take the resource's `metadata.name`; `MAX_NAME_LENGTH` leaves room for the
longest of the names made from it (pods of Jobs) inside the 63 characters of a label value.
"""

from __future__ import annotations

API_GROUP = "speccache.io"
VERSION = "v1alpha1"
API_VERSION = f"{API_GROUP}/{VERSION}"
KIND = "SpecCacheDeployment"
LIST_KIND = "SpecCacheDeploymentList"
PLURAL = "speccachedeployments"
SINGULAR = "speccachedeployment"
SHORT_NAME = "scd"
CRD_NAME = f"{PLURAL}.{API_GROUP}"

FIELD_MANAGER = "speccache-operator"

LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_COMPONENT = "app.kubernetes.io/component"
APP_NAME = "speccache"
MANAGED_BY = "speccache"
COMPONENT_SERVER = "server"
COMPONENT_INSPECTION = "inspection"
COMPONENT_STORAGE = "storage"
COMPONENT_STORAGE_CHECK = "storage-check"
COMPONENT_STORAGE_REMOVAL = "storage-removal"

LABEL_RESOURCE_UID = f"{API_GROUP}/resource-uid"
"""On served pods, and on records of what is to be removed from a bucket: the uid of their resource. What a deleted
resource leaves behind shares every other label with what its successor has.
"""

ANNOTATION_WIRE_HASH = f"{API_GROUP}/wire-hash"

CLAIM_CANNOT_GROW = "ClaimCannotGrow"
"""The reason of StorageReady with which the API server lets a claim's size be taken back."""

CONTAINER_NAME = "runtime"
HTTP_PORT = 8000
HTTP_PORT_NAME = "http"
ADMIN_PORT = 8081
ADMIN_PORT_NAME = "admin"
GPU_RESOURCE = "nvidia.com/gpu"

WIRE_KEY = "wire.json"
WIRE_PATH = f"/etc/speccache/{WIRE_KEY}"
TARGET_MODEL_PATH = "/models/target"
DRAFT_MODEL_PATH = "/models/draft"
STORAGE_PATH = "/var/lib/speccache/storage"
S3_CREDENTIALS_PATH = "/var/run/speccache/s3"
"""Folder whose files are the keys of the credentials' Secret: AWS_ACCESS_KEY_ID and so on."""
S3_CA_BUNDLE_PATH = "/var/run/speccache/s3-ca"
CA_BUNDLE_KEY = "ca.crt"
ADMIN_TOKEN_PATH = "/var/run/speccache/admin/token"
SCRATCH_PATH = "/tmp"

MAX_NAME_LENGTH = 40
HEADLESS_SUFFIX = "-pods"
"""No resource's name ends so: its Service would be the headless one of another resource."""


def workload_name(name: str) -> str:
    """The Deployment that runs the replicas; its pods have names of Kubernetes' making and are found by labels."""
    return name


def service_name(name: str) -> str:
    """The Service that clients call on `HTTP_PORT`."""
    return name


def headless_service_name(name: str) -> str:
    """The headless Service whose DNS name has the address of each pod, ready or not."""
    return f"{name}{HEADLESS_SUFFIX}"


def config_map_name(name: str) -> str:
    """The ConfigMap that holds the wire document under `WIRE_KEY`."""
    return f"{name}-wire"


def service_account_name(name: str) -> str:
    """The ServiceAccount of the served pods and of the Jobs beside them; it is given no rights.

    Not the bare name: every namespace has an account `default`, some have others, and a resource may be called so.
    """
    return f"{name}-runtime"


def claim_name(name: str) -> str:
    """The PersistentVolumeClaim of the storage tier, when the operator creates it."""
    return f"{name}-kv"


def pod_disruption_budget_name(name: str) -> str:
    """The PodDisruptionBudget of the served pods."""
    return name


def network_policy_name(name: str) -> str:
    """The NetworkPolicy of the served pods."""
    return name


def inspection_job_name(name: str, digest: str) -> str:
    """The Job that reads the model directories. `digest` (hex, 8 or more digits) covers everything the answer depends
    on: other models or another image make another Job, and the same ones find the finished one.
    """
    return f"{name}-inspect-{digest[:8]}"


def storage_check_name(name: str, digest: str) -> str:
    """The Job that tries the bucket, and the record of its answer. `digest` as for an inspection."""
    return f"{name}-storage-{digest[:8]}"


def storage_removal_name(name: str, digest: str) -> str:
    """The record of what is to be removed from a bucket once the resource is gone, and the Job that does it. `digest`
    covers the resource's uid: its successor of the same name has another record.
    """
    return f"{name}-remove-{digest[:8]}"


def selector_labels(name: str, component: str = COMPONENT_SERVER) -> dict[str, str]:
    """The labels that select the pods of one resource. They never change during its life."""
    return {LABEL_NAME: APP_NAME, LABEL_INSTANCE: name, LABEL_COMPONENT: component}


def object_labels(name: str, component: str = COMPONENT_SERVER) -> dict[str, str]:
    """The labels of every child object: the selector's and who manages it."""
    return {**selector_labels(name, component), LABEL_MANAGED_BY: MANAGED_BY}
