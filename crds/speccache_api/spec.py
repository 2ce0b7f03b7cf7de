"""`spec`: everything a user says, and the rules between its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from speccache_api.drafts import Algorithm
from speccache_api.fields import Amount, Size
from speccache_api.names import GPU_RESOURCE
from speccache_api.quantity import parse_amount
from speccache_api.rules import Rule, SpecModel
from speccache_api.spec_cache import KVCache
from speccache_api.spec_model import DeclaredGeometry, DraftModel, Model, Speculative
from speccache_api.spec_policies import Admin, NetworkPolicy, PodDisruptionBudget
from speccache_api.uris import builtin_name

Device = Literal["cpu", "cuda"]

SERVED_RESOURCES = ("cpu", "memory", "ephemeral-storage", GPU_RESOURCE)
_SERVED_CEL = "[" + ", ".join(f"'{name}'" for name in SERVED_RESOURCES) + "]"
_SERVED_TEXT = ", ".join(SERVED_RESOURCES)

_LEAST_MEMORY = "16Mi"

Amounts = Annotated[dict[str, Amount], Field(max_length=len(SERVED_RESOURCES))]
Seconds = Annotated[int, Field(ge=0, le=3600)]


class Memory(SpecModel):
    """How the pod's memory limit is set."""

    policy: Literal["Auto", "Manual"] = "Auto"
    """`Auto` (default): the operator computes the memory, sets request = limit and shows each term in status.memory.
    `Manual`: resources.limits.memory stands, and the condition MemorySized says by how much it is short.
    """
    overhead: Size | None = None
    """Bytes for all that is not KV or weights: Python, libraries, CUDA context, peaks while loading. Default: 2Gi
    without a GPU, 6Gi with one. Raise it when a pod is OOMKilled although its tiers are not full.
    """


class Drain(SpecModel):
    """How a pod ends. Its termination grace period is the sum of both times and a margin."""

    request_timeout_seconds: Seconds = 30
    """Seconds that running requests get to finish once the pod stops taking new ones. Default 30. Then they are
    aborted.
    """
    flush_timeout_seconds: Seconds = 60
    """Seconds to write host pages that storage lacks, after the last request. Default 60. Pages not written are lost.
    """


class Parallelism(SpecModel):
    """How many processes of a pod share one replica's models."""

    tensor: Literal[1, 2] = 1
    """Tensor-parallel ranks. Default 1. Each holds a share of the heads of both models and of every page, computes on a
    GPU of its own if GPUs are asked for, and keeps its shares under names of their own in storage: another number
    starts a new cache there. Latents (MLA) are shared: one copy on the host and in storage, found again by any number.
    """


class Resources(SpecModel):
    """Compute resources of a replica, as in a container. `nvidia.com/gpu` in limits chooses GPUs, otherwise the CPU
    serves.
    """

    limits: Amounts | None = None
    """Upper bounds: cpu, ephemeral-storage, nvidia.com/gpu; memory only with memory.policy Manual."""
    requests: Amounts | None = None
    """What the scheduler reserves. Default: the limits."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.limits) || self.limits.all(k, k in {_SERVED_CEL})",
            message=f"only {_SERVED_TEXT} can be limited; remove other names",
            check=lambda r: all(k in SERVED_RESOURCES for k in r.limits or ()),
            at=".limits",
        ),
        Rule(
            cel=f"!has(self.requests) || self.requests.all(k, k in {_SERVED_CEL})",
            message=f"only {_SERVED_TEXT} can be requested; remove other names",
            check=lambda r: all(k in SERVED_RESOURCES for k in r.requests or ()),
            at=".requests",
        ),
        Rule(
            cel="!has(self.limits) || !('memory' in self.limits)"
            f" || quantity(string(self.limits['memory'])).compareTo(quantity('{_LEAST_MEMORY}')) >= 0",
            message=f"no container starts with less than {_LEAST_MEMORY} of memory; give a size such as 8Gi",
            check=lambda r: parse_amount((r.limits or {}).get("memory", _LEAST_MEMORY)) >= parse_amount(_LEAST_MEMORY),
            at=".limits",
        ),
        Rule(
            cel=f"!has(self.requests) || !('{GPU_RESOURCE}' in self.requests) || (has(self.limits)"
            f" && '{GPU_RESOURCE}' in self.limits"
            f" && string(self.requests['{GPU_RESOURCE}']) == string(self.limits['{GPU_RESOURCE}']))",
            message=f"a requested GPU must also be in limits, with the same amount; set limits {GPU_RESOURCE}",
            check=lambda r: (
                GPU_RESOURCE not in (r.requests or {}) or r.requests[GPU_RESOURCE] == (r.limits or {}).get(GPU_RESOURCE)
            ),
            at=".requests",
        ),
        Rule(
            cel="!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits)"
            " || quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)",
            message="a request cannot be above its limit; lower it, or raise the limit",
            check=lambda r: all(
                parse_amount(amount) <= parse_amount((r.limits or {}).get(name, amount))
                for name, amount in (r.requests or {}).items()
            ),
            at=".requests",
        ),
    )


_HAS_GPU = f"(has(self.resources) && has(self.resources.limits) && '{GPU_RESOURCE}' in self.resources.limits)"
_LIMITED_GPUS = f"string(self.resources.limits['{GPU_RESOURCE}'])"
_BUCKET = "(has(self.kvCache.storage) && has(self.kvCache.storage.s3))"
_DRAFT = "has(self.speculative) && has(self.speculative.draftModel)"


def _memory_given(spec: Spec) -> bool:
    resources = spec.resources
    return resources is not None and ("memory" in (resources.limits or {}) or "memory" in (resources.requests or {}))


def _memory_limited(spec: Spec) -> bool:
    return spec.resources is not None and "memory" in (spec.resources.limits or {})


def _countable(spec: Spec, geometry: DeclaredGeometry | None) -> bool:
    return spec.device == "cuda" or geometry is None or geometry.parameters is not None


def _gpu_for_each_rank(spec: Spec) -> bool:
    limits = (spec.resources.limits if spec.resources else None) or {}
    return limits.get(GPU_RESOURCE, str(spec.parallelism.tensor)) == str(spec.parallelism.tensor)


def _shared_heads(path: str, geometry: Callable[[Spec], DeclaredGeometry | None]) -> Rule:
    """For the declared geometry at `path`; `geometry` finds it."""

    def check(spec: Spec) -> bool:
        declared = geometry(spec)
        heads, ranks = (declared.kv_heads or 1) if declared else 1, spec.parallelism.tensor
        return heads % ranks == 0 or ranks % heads == 0

    has, above = "", "self"
    for part in path.split("."):
        above += f".{part}"
        has += f"!has({above}) || "
    ranks = "self.parallelism.tensor"
    return Rule(
        cel=f"{has}!has({above}.kvHeads) || {above}.kvHeads % {ranks} == 0 || {ranks} % {above}.kvHeads == 0",
        message="parallelism.tensor ranks share the KV heads evenly; choose a number that divides kvHeads",
        check=check,
        at=f".{path}.kvHeads",
    )


def _fitting_draft(spec: Spec) -> bool:
    draft = spec.draft
    return draft is None or builtin_name(draft.uri) is None or draft.uri == spec.model.uri


def _shareable(spec: Spec) -> bool:
    claim = spec.kv_cache.storage.persistent_volume_claim if spec.kv_cache.storage else None
    return spec.wanted_replicas <= 1 or claim is None or not claim.created or "ReadWriteMany" in claim.modes


def _uses_bucket(spec: Spec) -> bool:
    return spec.kv_cache.storage is not None and spec.kv_cache.storage.s3 is not None


def _erasable(spec: Spec) -> bool:
    storage = spec.kv_cache.storage
    return not _uses_bucket(spec) or storage is None or storage.retention == "Retain" or spec.model.kv_geometry is None


class Spec(SpecModel):
    """What is served, and with which memory."""

    model: Model
    speculative: Speculative | None = None
    kv_cache: KVCache
    memory: Memory = Field(default_factory=Memory, json_schema_extra={"default": {}})
    parallelism: Parallelism = Field(default_factory=Parallelism, json_schema_extra={"default": {}})
    replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Pods that serve, each with its own device and host tier; they share the storage tier. 0 stops serving. Without it
    1 is wanted; give it where an autoscaler is to read it, for which the scale subresource needs a number.
    """
    drain: Drain = Field(default_factory=Drain, json_schema_extra={"default": {}})
    resources: Resources | None = None
    pod_disruption_budget: PodDisruptionBudget | None = None
    """How many pods may be evicted at the same time. Default: no budget."""
    network_policy: NetworkPolicy | None = None
    """Who may reach the pods. Default: no policy, hence everybody who has a way."""
    admin: Admin | None = None
    """A port for changing the storage tier while pods serve. Default: none."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"{_HAS_GPU} || !has(self.kvCache.device.memoryFraction)",
            message="memoryFraction is a share of a GPU's memory; give size or tokens,"
            f" or set resources.limits {GPU_RESOURCE}: 1",
            check=lambda s: s.device == "cuda" or s.kv_cache.device.memory_fraction is None,
            at=".kvCache.device.memoryFraction",
        ),
        Rule(
            cel="!has(self.kvCache.host.ratio) || !has(self.kvCache.device.memoryFraction)",
            message="ratio needs a device tier of known length, and memoryFraction is measured on the GPU at start;"
            " use tokens or size",
            check=lambda s: s.kv_cache.host.ratio is None or s.kv_cache.device.memory_fraction is None,
            at=".kvCache.host.ratio",
        ),
        Rule(
            cel=f"self.kvCache.dtype == 'Auto' || self.kvCache.dtype == ({_HAS_GPU} ? 'BFloat16' : 'Float32')",
            message="a GPU serves BFloat16 and the CPU Float32; set dtype: Auto",
            check=lambda s: s.kv_cache.dtype in ("Auto", "BFloat16" if s.device == "cuda" else "Float32"),
            at=".kvCache.dtype",
        ),
        Rule(
            cel="self.memory.policy != 'Auto' || !has(self.resources)"
            " || !((has(self.resources.limits) && 'memory' in self.resources.limits)"
            " || (has(self.resources.requests) && 'memory' in self.resources.requests))",
            message="memory is computed while memory.policy is Auto; remove it, or set memory.policy: Manual",
            check=lambda s: s.memory.policy != "Auto" or not _memory_given(s),
            at=".resources",
        ),
        Rule(
            cel="self.memory.policy != 'Manual'"
            " || (has(self.resources) && has(self.resources.limits) && 'memory' in self.resources.limits)",
            message="memory.policy Manual needs resources.limits.memory; give it, or set memory.policy: Auto",
            check=lambda s: s.memory.policy != "Manual" or _memory_limited(s),
            at=".memory.policy",
        ),
        Rule(
            cel=f"{_HAS_GPU} || !has(self.model.kvGeometry) || has(self.model.kvGeometry.parameters)",
            message="without a GPU the weights are in the pod's memory; give parameters, or remove kvGeometry",
            check=lambda s: _countable(s, s.model.kv_geometry),
            at=".model.kvGeometry",
        ),
        Rule(
            cel=f"{_HAS_GPU} || !({_DRAFT}) || !has(self.speculative.draftModel.kvGeometry)"
            " || has(self.speculative.draftModel.kvGeometry.parameters)",
            message="without a GPU the weights are in the pod's memory; give parameters, or remove kvGeometry",
            check=lambda s: _countable(s, s.draft.kv_geometry if s.draft else None),
            at=".speculative.draftModel.kvGeometry",
        ),
        Rule(
            cel=f"!{_HAS_GPU} || {_LIMITED_GPUS} == string(self.parallelism.tensor)",
            message=f"a replica uses one GPU for each rank; set {GPU_RESOURCE} to parallelism.tensor, or remove it to"
            " serve on the CPU",
            check=_gpu_for_each_rank,
            at=".resources.limits",
        ),
        _shared_heads("model.kvGeometry", lambda s: s.model.kv_geometry),
        _shared_heads("speculative.draftModel.kvGeometry", lambda s: s.draft.kv_geometry if s.draft else None),
        Rule(
            cel=f"!({_DRAFT}) || !self.speculative.draftModel.uri.startsWith('builtin://')"
            " || self.speculative.draftModel.uri == self.model.uri",
            message="a built-in draft fits only the built-in model of the same name; give the draft of model.uri",
            check=_fitting_draft,
            at=".speculative.draftModel.uri",
        ),
        Rule(
            cel="!has(self.replicas) || self.replicas <= 1 || !has(self.kvCache.storage)"
            " || !has(self.kvCache.storage.persistentVolumeClaim)"
            " || has(self.kvCache.storage.persistentVolumeClaim.claimName)"
            " || (has(self.kvCache.storage.persistentVolumeClaim.accessModes)"
            " && 'ReadWriteMany' in self.kvCache.storage.persistentVolumeClaim.accessModes)",
            message="several replicas share one claim; add accessModes: [ReadWriteMany], or set replicas: 1",
            check=_shareable,
            at=".kvCache.storage.persistentVolumeClaim",
        ),
        Rule(
            cel=f"!has(self.networkPolicy) || self.networkPolicy.egress != 'Deny' || !{_BUCKET}",
            message="egress Deny would cut the pods off from their bucket, whose addresses no policy can know; set"
            " Allow, and bound egress by a NetworkPolicy of your own",
            check=lambda s: s.network_policy is None or s.network_policy.egress != "Deny" or not _uses_bucket(s),
            at=".networkPolicy.egress",
        ),
        Rule(
            cel=f"!{_BUCKET} || self.kvCache.storage.retention != 'Delete' || !has(self.model.kvGeometry)",
            message="retention Delete of a bucket removes what is stored for one model, which only its files tell"
            " apart; remove model.kvGeometry, so that they are read, or set Retain",
            check=_erasable,
            at=".kvCache.storage.retention",
        ),
    )

    @property
    def wanted_replicas(self) -> int:
        """`replicas`, with the default filled in."""
        return 1 if self.replicas is None else self.replicas

    @property
    def device(self) -> Device:
        """Where the models run: `cuda` when a GPU is in the limits, otherwise `cpu`."""
        limits = (self.resources.limits if self.resources else None) or {}
        return "cuda" if GPU_RESOURCE in limits else "cpu"

    @property
    def algorithm(self) -> Algorithm:
        """How tokens are proposed, with the default filled in."""
        return self.speculative.algorithm if self.speculative else "None"

    @property
    def draft(self) -> DraftModel | None:
        """The draft's model; None where none is in use."""
        return self.speculative.draft_model if self.speculative else None
