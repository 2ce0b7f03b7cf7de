"""How much memory a pod needs, in whole bytes.

::

    hostPages    = from size, tokens or ratio           (one count: the draft pool has the target's slots)
    hostTarget   = hostPages * target bytes per page    (of all ranks; what they share counts once)
    hostDraft    = hostPages * draft bytes per page     (what others call "doubled"; exact here)
    sharedMemory = SHARED_MEMORY_PER_RANK * ranks at /dev/shm, by which GPU ranks talk; 0 for one rank and on the CPU
    overhead     = runtime, CUDA context, peak while loading weights, and RANK_OVERHEAD for each further rank
    device       = weights and device pages, only when the device is the CPU
    limit        = request = the sum, rounded up to MiB (pinned pages cannot be reclaimed)

    bytes per page  = page size * bytes per token
    bytes per token = layers * kvHeads * headDim * 2 * dtype size         (K and V)
                    = layers * (kvLoraRank + qkRopeHeadDim) * dtype size  (MLA)

This is the only place that knows these sums: the operator sets the pod's limit from them and the runtime allocates
exactly these pages. What a token keeps is the models' `KVGeometry`; nothing here asks what kind of attention that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from speccache_api.drafts import DRAFTS
from speccache_api.geometry import Inspection, KVDtype, KVGeometry, ModelFacts, builtin_facts
from speccache_api.quantity import GIB, MIB, format_bytes, round_up
from speccache_api.spec import Device, Spec
from speccache_api.spec_model import DeclaredGeometry
from speccache_api.uris import builtin_name

WEIGHT_BYTES_CPU = 4
"""The CPU computes in float32, whatever the files hold."""
RANK_OVERHEAD: dict[Device, int] = {"cpu": 1 * GIB, "cuda": 3 * GIB}
"""A further rank's own process: interpreter, libraries' private memory, CUDA context, its peak while loading, and the
weights that every rank has whole (norms, and with MLA what makes latents: some thousandths of a model)."""
SHARED_MEMORY_PER_RANK = 256 * MIB
"""NCCL's buffers where GPUs cannot reach each other directly; mounted at /dev/shm with this size."""
DEFAULT_OVERHEAD: dict[Device, int] = {"cpu": 2 * GIB, "cuda": 6 * GIB}


class SizingError(ValueError):
    """The tiers cannot be sized as written. `field` is the path to change; the text says how."""

    def __init__(self, field: str, text: str) -> None:
        self.field = field
        super().__init__(f"{field}: {text}")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every term of a pod's memory, in bytes unless the name says tokens or pages.

    `target` and `draft` are the descriptions that were sized; `draft` is None without one. Bytes per token and per page
    are those of the host tier, all ranks together. `device_pages` is None when the GPU's free memory decides
    (`memoryFraction`). `device` is 0 with a GPU, whose memory is not the pod's.
    """

    target: KVGeometry
    draft: KVGeometry | None
    page_size: int
    target_bytes_per_token: int
    draft_bytes_per_token: int
    host_pages: int
    device_pages: int | None
    host_target: int
    host_draft: int
    shared_memory: int
    overhead: int
    device: int

    @property
    def target_bytes_per_page(self) -> int:
        """Bytes of the target's half of a page."""
        return self.target_bytes_per_token * self.page_size

    @property
    def draft_bytes_per_page(self) -> int:
        """Bytes of the draft's half of a page; 0 without a draft."""
        return self.draft_bytes_per_token * self.page_size

    @property
    def limit(self) -> int:
        """The pod's memory limit and request: the sum of all terms, rounded up to MiB."""
        terms = (self.host_target, self.host_draft, self.shared_memory, self.overhead, self.device)
        return round_up(sum(terms), MIB)

    def to_status(self) -> dict[str, Any]:
        """The terms as they stand in `status.memory`: sizes as quantities, counts as numbers."""
        status: dict[str, Any] = {
            "limit": format_bytes(self.limit),
            "hostTarget": format_bytes(self.host_target),
            "hostDraft": format_bytes(self.host_draft),
            "sharedMemory": format_bytes(self.shared_memory),
            "overhead": format_bytes(self.overhead),
            "device": format_bytes(self.device),
            "hostPages": self.host_pages,
            "targetBytesPerToken": self.target_bytes_per_token,
            "draftBytesPerToken": self.draft_bytes_per_token,
        }
        if self.device_pages is not None:
            status["devicePages"] = self.device_pages
        return status


def kv_dtype(spec: Spec) -> KVDtype:
    """The number format of KV with `Auto` resolved."""
    if spec.kv_cache.dtype == "Auto":
        return "bfloat16" if spec.device == "cuda" else "float32"
    return "bfloat16" if spec.kv_cache.dtype == "BFloat16" else "float32"


def known_inspection(spec: Spec) -> Inspection | None:
    """What is known of both models without reading their files; None when an inspection Job must be run."""
    target = _known(spec.model.uri, spec.model.kv_geometry, "target")
    if target is None:
        return None
    if spec.draft is None:
        return Inspection(target=target)
    draft = _known(spec.draft.uri, spec.draft.kv_geometry, DRAFTS[spec.algorithm].builtin)
    return None if draft is None else Inspection(target=target, draft=draft)


def size_memory(spec: Spec, inspection: Inspection) -> MemoryPlan:
    """The memory of one replica, all its ranks together. A geometry declared in `spec` stands above the inspected one.

    Raises SizingError when a tier (of storage: its capacity) is smaller than one page pair, when the inspection lacks
    the draft, or when a model cannot be shared by so many ranks.
    """
    ranks = spec.parallelism.tensor
    target = _facts(inspection.target, spec.model.kv_geometry)
    draft = _draft_facts(spec, inspection)
    page_size, dtype = spec.kv_cache.page_size, kv_dtype(spec)
    target_token = _host_bytes(target, dtype, ranks, "spec.model")
    draft_token = _host_bytes(draft, dtype, ranks, "spec.speculative.draftModel") if draft else 0
    models = [target, draft] if draft else [target]
    for model in models:
        _check_shares(model, ranks)
    device_pair = page_size * sum(ranks * m.geometry.for_rank(ranks).bytes_per_token(dtype) for m in models)
    device_pages = _device_pages(spec, device_pair)
    host_pages = _host_pages(spec, page_size * (target_token + draft_token), device_pages)
    _check_capacity(spec, page_size * (target_token + draft_token))
    weights = WEIGHT_BYTES_CPU * sum(m.parameters for m in models)
    return MemoryPlan(
        target=target.geometry,
        draft=draft.geometry if draft else None,
        page_size=page_size,
        target_bytes_per_token=target_token,
        draft_bytes_per_token=draft_token,
        host_pages=host_pages,
        device_pages=device_pages,
        host_target=host_pages * page_size * target_token,
        host_draft=host_pages * page_size * draft_token,
        shared_memory=SHARED_MEMORY_PER_RANK * ranks if ranks > 1 and spec.device == "cuda" else 0,
        overhead=_overhead(spec.device, ranks) if spec.memory.overhead is None else spec.memory.overhead,
        device=weights + (device_pages or 0) * device_pair if spec.device == "cpu" else 0,
    )


def shortfall(plan: MemoryPlan, user_limit: int) -> int:
    """Bytes by which a limit of `user_limit` bytes is below the plan; 0 when it is enough."""
    return max(0, plan.limit - user_limit)


def _known(uri: str, declared: DeclaredGeometry | None, part: Literal["target", "draft"]) -> ModelFacts | None:
    name = builtin_name(uri)
    if name is not None:
        builtin = builtin_facts(name)
        return builtin.target if part == "target" else builtin.draft
    if declared is None:
        return None
    return ModelFacts(geometry=declared.to_geometry(), parameters=declared.parameters or 0)


def _facts(inspected: ModelFacts, declared: DeclaredGeometry | None) -> ModelFacts:
    if declared is None:
        return inspected
    return ModelFacts(
        geometry=declared.to_geometry(),
        parameters=inspected.parameters if declared.parameters is None else declared.parameters,
    )


def _draft_facts(spec: Spec, inspection: Inspection) -> ModelFacts | None:
    if spec.draft is None:
        return None
    if inspection.draft is None:
        raise SizingError("spec.speculative.draftModel", "the inspection did not read the draft; inspect again")
    return _facts(inspection.draft, spec.draft.kv_geometry)


def _overhead(device: Device, ranks: int) -> int:
    return DEFAULT_OVERHEAD[device] + (ranks - 1) * RANK_OVERHEAD[device]


def _check_shares(facts: ModelFacts, ranks: int) -> None:
    if facts.shares and facts.shares % ranks:
        raise SizingError(
            "spec.parallelism.tensor",
            f"{ranks} ranks cannot share a {facts.model_type} model whose heads and MLP divide into {facts.shares}; "
            "choose a divisor of that",
        )


def _host_bytes(facts: ModelFacts, dtype: KVDtype, ranks: int, field: str) -> int:
    try:
        return facts.geometry.pod_bytes_per_token(dtype, ranks)
    except ValueError as error:
        raise SizingError(field, f"{error}; choose a number of ranks that divides the heads") from error


def _device_pages(spec: Spec, pair: int) -> int | None:
    tier = spec.kv_cache.device
    if tier.memory_fraction is not None:
        return None
    if tier.tokens is not None:
        return _whole_pages(tier.tokens, spec.kv_cache.page_size)
    return _pages_of_size(tier.size or 0, pair, "spec.kvCache.device.size")


def _host_pages(spec: Spec, pair: int, device_pages: int | None) -> int:
    tier, page_size = spec.kv_cache.host, spec.kv_cache.page_size
    if tier.tokens is not None:
        return _whole_pages(tier.tokens, page_size)
    if tier.ratio is not None:
        if device_pages is None:
            raise SizingError("spec.kvCache.host.ratio", "the device tier's length is not known; use tokens or size")
        ratio = Fraction(tier.ratio)
        return -(-device_pages * ratio.numerator // ratio.denominator)
    return _pages_of_size(tier.size or 0, pair, "spec.kvCache.host.size")


def _check_capacity(spec: Spec, pair: int) -> None:
    storage = spec.kv_cache.storage
    if storage is not None and storage.capacity is not None:
        _pages_of_size(storage.capacity, pair, "spec.kvCache.storage.capacity")


def _whole_pages(tokens: int, page_size: int) -> int:
    return round_up(tokens, page_size) // page_size


def _pages_of_size(size: int, pair: int, field: str) -> int:
    pages = size // pair
    if pages < 1:
        raise SizingError(
            field, f"one page pair takes {format_bytes(pair)}; give at least that, found {format_bytes(size)}"
        )
    return pages
