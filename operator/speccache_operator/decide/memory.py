"""The aspect MemorySized: how much memory a pod needs, and whether that can be had before any pod exists."""

from collections.abc import Iterable
from dataclasses import dataclass

from speccache_api.geometry import Inspection
from speccache_api.names import GPU_RESOURCE
from speccache_api.quantity import MIB, format_bytes, parse_bytes, round_up
from speccache_api.sizing import MemoryPlan, SizingError, shortfall, size_memory
from speccache_api.spec import Spec
from speccache_operator.decide.conditions import MEMORY_SIZED, Condition, Reason, Status
from speccache_operator.observe.observed import NodeCapacity

RECHECK_NODES_SECONDS = 60.0
"""Nodes are not watched, so a resource that waits for a larger one looks again after this time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer. `memory` is None when it cannot be computed; `allowed` is False when no pod may be made.

    `limit` is the pods' memory limit in bytes: the computed one, or the user's with memory.policy Manual.
    """

    condition: Condition
    memory: MemoryPlan | None = None
    limit: int | None = None
    allowed: bool = False
    again_after: float | None = None


def look(spec: Spec, inspection: Inspection, nodes: tuple[NodeCapacity, ...] | None) -> Finding:
    """Size the memory and compare it with the user's limit and the nodes. Pure."""
    try:
        memory = size_memory(spec, inspection)
    except SizingError as error:
        return Finding(_condition("False", Reason.TIER_TOO_SMALL, str(error)))
    try:
        limit = pod_limit(spec, memory)
    except ValueError as error:
        return Finding(_condition("False", Reason.INVALID_LIMIT, f"spec.resources.limits.memory: {error}"), memory)
    largest = largest_node(spec, nodes or ())
    if largest is not None and limit > largest.memory:
        text = (
            f"a pod needs {_named(spec, memory, limit)}, and the largest node that fits, {largest.name},"
            f" offers {_rounded(largest.memory)}; {_remedy(spec, memory)}, or add a larger node. No pod is made"
        )
        condition = _condition("False", Reason.EXCEEDS_NODE_ALLOCATABLE, text)
        return Finding(condition, memory, limit, again_after=RECHECK_NODES_SECONDS)
    return Finding(_sized(spec, memory, limit), memory, limit, allowed=True)


def pod_limit(spec: Spec, memory: MemoryPlan) -> int:
    """The memory limit of a pod in bytes: the computed one, or the user's with memory.policy Manual.

    Raises ValueError when the user's is not a size.
    """
    if spec.memory.policy == "Manual" and spec.resources is not None and spec.resources.limits is not None:
        return parse_bytes(spec.resources.limits["memory"])
    return memory.limit


def largest_node(spec: Spec, nodes: Iterable[NodeCapacity]) -> NodeCapacity | None:
    """The node with most memory among those that have the GPU which a pod asks for; None when there is none at all."""
    given = (spec.resources.limits if spec.resources else None) or {}
    gpus = int(given.get(GPU_RESOURCE, "0"))
    return max((node for node in nodes if node.gpus >= gpus), key=lambda node: (node.memory, node.name), default=None)


def terms(memory: MemoryPlan) -> str:
    """The sum in words, without terms that are 0."""
    parts = {
        "host target": memory.host_target,
        "host draft": memory.host_draft,
        "shared memory": memory.shared_memory,
        "weights and device pages": memory.device,
        "overhead": memory.overhead,
    }
    return " + ".join(f"{name} {_rounded(size)}" for name, size in parts.items() if size)


def _named(spec: Spec, memory: MemoryPlan, limit: int) -> str:
    """The limit with where it comes from."""
    if spec.memory.policy == "Manual":
        return f"{format_bytes(limit)} (resources.limits.memory)"
    return f"{format_bytes(limit)} ({terms(memory)})"


def _remedy(spec: Spec, memory: MemoryPlan) -> str:
    """What to lower: the field behind the larger of the tiers."""
    if spec.memory.policy == "Manual":
        return "lower spec.resources.limits.memory"
    if memory.device > memory.host_target + memory.host_draft:
        return "lower spec.kvCache.device, serve a smaller model"
    return "lower spec.kvCache.host"


def _sized(spec: Spec, memory: MemoryPlan, limit: int) -> Condition:
    if spec.memory.policy == "Auto":
        return _condition("True", Reason.SIZED, f"{format_bytes(limit)} = {terms(memory)}")
    short = shortfall(memory, limit)
    if short:
        text = (
            f"resources.limits.memory {format_bytes(limit)} is {_rounded(short)} short of the computed"
            f" {format_bytes(memory.limit)} ({terms(memory)}); raise it, or set spec.memory.policy: Auto. Pods run, and"
            " may be killed for memory"
        )
        return _condition("False", Reason.MANUAL_SHORTFALL, text)
    text = f"resources.limits.memory {format_bytes(limit)} covers the computed {format_bytes(memory.limit)}"
    return _condition("True", Reason.MANUAL, text)


def _rounded(size: int) -> str:
    return format_bytes(size if size < MIB else round_up(size, MIB))


def _condition(status: Status, reason: Reason, message: str) -> Condition:
    return Condition(MEMORY_SIZED, status, reason, message)
