"""What is looked at outside of namespaces: nodes, and the volumes of claims.

It takes rights that an operator may not have (the chart's checkNodes). Without them nothing is compared with nodes, and
a ReadWriteOnce claim counts as one that two pods cannot mount.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from speccache_api import names
from speccache_api.quantity import parse_bytes
from speccache_operator.cluster import Cluster
from speccache_operator.errors import Refused
from speccache_operator.kinds import NODE, VOLUME, Object, Ref
from speccache_operator.logs import fields
from speccache_operator.observe.observed import NodeCapacity

NODES_SECONDS = 30.0
_MANY = {"ReadWriteMany", "ReadOnlyMany"}
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


class Volumes:
    """The volumes of claims whose access modes do not say who can mount them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._warned = False

    async def of(self, claims: Mapping[str, Object]) -> dict[str, Object]:
        """Volumes of the bound claims with ReadWriteOnce, by the claim's name; none when volumes may not be read.

        Raises Unavailable as the cluster does.
        """
        found = {}
        for name, claim in claims.items():
            spec = claim["spec"]
            if not spec.get("volumeName") or _MANY & set(spec.get("accessModes", ())):
                continue
            volume = await self._read(spec["volumeName"])
            if volume is not None:
                found[name] = volume
        return found

    async def _read(self, name: str) -> Object | None:
        try:
            return await self._cluster.get(Ref(VOLUME, None, name))
        except Refused as error:
            if not self._warned:
                text = "volumes may not be read: a change interrupts serving with a ReadWriteOnce claim"
                logger.warning(text, extra=fields(error=str(error)))
            self._warned = True
            return None


def _number(value: Any, parse: Callable[[str], int]) -> int:
    try:
        return parse(str(value))
    except ValueError:
        return 0
