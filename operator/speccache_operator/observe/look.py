"""One look at the cluster: everything that planning needs, from the API server and not from a cache.

Live reads are consistent with what was just written, so no pass acts on a state that it has itself already changed.
They are no snapshot of many objects, though: what follows from something else is read before it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from speccache_api import names
from speccache_api.quantity import parse_bytes
from speccache_api.resource import SpecCacheDeployment
from speccache_operator.children.mounts import model_mounts
from speccache_operator.cluster import Cluster
from speccache_operator.errors import Refused
from speccache_operator.kinds import (
    CLAIM,
    CONFIG_MAP,
    JOB,
    NODE,
    POD,
    SERVICE,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    Key,
    Object,
    Ref,
)
from speccache_operator.logs import fields
from speccache_operator.observe.observed import NodeCapacity, Observed

NODES_SECONDS = 30.0
logger = logging.getLogger(__name__)


class Nodes:
    """The nodes' capacities, read at most every NODES_SECONDS: they change slowly and there may be thousands."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._read_at = float("-inf")
        self._known: tuple[NodeCapacity, ...] | None = None
        self._lock = asyncio.Lock()

    async def capacities(self) -> tuple[NodeCapacity, ...] | None:
        """What each node offers to pods; None without the right to see nodes, which is no reason to serve nothing.

        Raises Unavailable as the cluster does.
        """
        async with self._lock:
            if self._clock() - self._read_at >= NODES_SECONDS:
                self._known = await self._read()
                self._read_at = self._clock()
            return self._known

    async def _read(self) -> tuple[NodeCapacity, ...] | None:
        try:
            return tuple(node_capacity(node) for node in await self._cluster.list(NODE, None))
        except Refused as error:
            logger.warning("memory is not compared with nodes; set checkNodes to false", extra=fields(error=str(error)))
            return None


def node_capacity(node: Object) -> NodeCapacity:
    """Capacity of one node; what cannot be read counts as 0."""
    allocatable = node.get("status", {}).get("allocatable", {})
    return NodeCapacity(
        name=node["metadata"]["name"],
        memory=_number(allocatable.get("memory", "0"), parse_bytes),
        gpus=_number(allocatable.get(names.GPU_RESOURCE, "0"), int),
    )


async def observe(cluster: Cluster, key: Key, resource: SpecCacheDeployment | None, nodes: Nodes | None) -> Observed:
    """Read what belongs to the resource `key`; of an invalid one (None) only the StatefulSet and its pods.

    Raises ClusterError as the cluster does: planning on half a view would be guessing.
    """
    labels = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_INSTANCE: key.name}
    inspection_labels = {**labels, names.LABEL_COMPONENT: names.COMPONENT_INSPECTION}
    refs = child_refs(key)
    claims = () if resource is None else claim_names(resource)
    children, jobs, records, capacities = await _together(
        _existing(cluster, [*refs, *(Ref(CLAIM, key.namespace, name) for name in claims)]),
        cluster.list(JOB, key.namespace, inspection_labels),
        cluster.list(CONFIG_MAP, key.namespace, inspection_labels),
        nodes.capacities() if nodes is not None else _nothing(),
    )
    # After their owners: a Job is complete only when its pod is, so its pod's message is there to be read.
    pods = await cluster.list(POD, key.namespace, labels)
    return Observed(
        children=children,
        inspections=(*jobs, *records),
        pods=tuple(pods),
        claims={ref.name: obj for ref, obj in children.items() if ref.kind is CLAIM},
        nodes=capacities,
    )


async def _existing(cluster: Cluster, refs: Sequence[Ref]) -> dict[Ref, Object]:
    found = await _together(*(cluster.get(ref) for ref in refs))
    return {ref: obj for ref, obj in zip(refs, found, strict=True) if obj is not None}


async def _nothing() -> None:
    return None


async def _together(*reads: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results of reads that run at the same time. The first error ends the others and is raised as it is."""
    tasks = [asyncio.ensure_future(read) for read in reads]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def child_refs(key: Key) -> tuple[Ref, ...]:
    """Where the children with fixed names are, the created claim excepted (it is among `claim_names`)."""
    return tuple(
        Ref(kind, key.namespace, name)
        for kind, name in (
            (STATEFUL_SET, names.statefulset_name(key.name)),
            (SERVICE, names.service_name(key.name)),
            (SERVICE, names.headless_service_name(key.name)),
            (CONFIG_MAP, names.config_map_name(key.name)),
            (SERVICE_ACCOUNT, names.service_account_name(key.name)),
        )
    )


def claim_names(resource: SpecCacheDeployment) -> tuple[str, ...]:
    """Claims that the resource names or gets: models' and storage's, each once."""
    found = [mount.claim for mount in model_mounts(resource.spec)]
    storage = resource.spec.kv_cache.storage
    if storage is not None:
        found.append(storage.persistent_volume_claim.claim_name or names.claim_name(resource.name))
    return tuple(dict.fromkeys(found))


def _number(value: Any, parse: Callable[[str], int]) -> int:
    try:
        return parse(str(value))
    except ValueError:
        return 0
