"""`status`: what the operator reports, described for the schema and for `kubectl explain`.

Nothing here changes from second to second (rates and lengths are metrics), so an unchanged resource has an unchanged
status.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from speccache_api.resource import SpecCacheDeployment
from speccache_api.storage_target import VolumeTarget, resolve

READY = "Ready"
CONFIG_VALID = "ConfigValid"
MODEL_INSPECTED = "ModelInspected"
MEMORY_SIZED = "MemorySized"
STORAGE_READY = "StorageReady"
CHILDREN_APPLIED = "ChildrenApplied"
PROGRESSING = "Progressing"
CONDITION_TYPES = (
    READY,
    CONFIG_VALID,
    MODEL_INSPECTED,
    MEMORY_SIZED,
    STORAGE_READY,
    CHILDREN_APPLIED,
    PROGRESSING,
)
"""In the order in which they are shown; between Ready and Progressing, also in which they are to be mended."""

Text = Annotated[str, Field(max_length=253)]
QuantityText = Annotated[str, Field(max_length=32)]
Count = Annotated[int, Field(ge=0)]


class StatusModel(BaseModel):
    """Base of the parts of `status`: camelCase names. The operator writes plain dictionaries; these describe them."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True)


class Condition(StatusModel):
    """One aspect of the resource, in the form of all Kubernetes conditions."""

    type: Annotated[str, Field(max_length=316)]
    """Ready, ConfigValid, ModelInspected, MemorySized, StorageReady, ChildrenApplied or Progressing."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """The cause in one CamelCase word, for programs."""
    message: Annotated[str, Field(max_length=32768)]
    """The cause in a sentence, with the field and the remedy."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When `status` last changed."""
    observed_generation: Count | None = None
    """The metadata.generation that this condition is about."""


class MemoryStatus(StatusModel):
    """The memory of one replica, term by term. The sum, rounded up to Mi, is the limit and the request of its pod."""

    limit: QuantityText | None = None
    """Memory limit and request."""
    host_target: QuantityText | None = None
    """Target halves of the host tier."""
    host_draft: QuantityText | None = None
    """Draft halves of the host tier: what a draft model adds, exactly."""
    shared_memory: QuantityText | None = None
    """Use of /dev/shm."""
    overhead: QuantityText | None = None
    """Everything else: spec.memory.overhead or its default."""
    device: QuantityText | None = None
    """Weights and device tier, when there is no GPU; otherwise 0."""
    host_pages: Count | None = None
    """Page pairs of the host tier."""
    device_pages: Count | None = None
    """Page pairs of the device tier; absent with memoryFraction, where the pod measures them."""
    target_bytes_per_token: Count | None = None
    """KV bytes of one token in the target."""
    draft_bytes_per_token: Count | None = None
    """KV bytes of one token in the draft; 0 without one."""


class Status(StatusModel):
    """What the operator observed."""

    observed_generation: Count | None = None
    """The metadata.generation that this status is about."""
    conditions: (
        Annotated[
            list[Condition],
            Field(
                max_length=16,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
            ),
        ]
        | None
    ) = None
    """Conditions, one per type. Ready sums up the others."""
    replicas: Count | None = None
    """Pods that exist."""
    ready_replicas: Count | None = None
    """Pods that serve."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the pods, as text; read by autoscalers."""
    model: Text | None = None
    """Short name of the target model."""
    draft: Text | None = None
    """Short name of the draft; the algorithm where it has no model."""
    storage: Text | None = None
    """Where the storage tier is: the name of its PersistentVolumeClaim, or s3://BUCKET/PREFIX."""
    fingerprint: Annotated[str, Field(max_length=128)] | None = None
    """Digest under which storage keeps this model's pages. It changes with model, KV dtype and page size."""
    memory: MemoryStatus | None = None
    """The memory of one replica, term by term."""


def summary(resource: SpecCacheDeployment) -> dict[str, str]:
    """The short names for `status` (`model`, and `draft` and `storage` when in use), which the printed columns show."""
    spec = resource.spec
    result = {"model": _last_part(spec.model.uri)}
    if spec.draft is not None:
        result["draft"] = _last_part(spec.draft.uri)
    elif spec.algorithm != "None":
        result["draft"] = spec.algorithm
    target = resolve(resource)
    if target is not None:
        result["storage"] = (target.claim or target.path) if isinstance(target, VolumeTarget) else target.url
    return result


def _last_part(uri: str) -> str:
    return uri.rsplit("/", 1)[-1][:253]
