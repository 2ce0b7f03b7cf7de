"""One look at the cluster: everything that planning needs, from the API server and not from a cache.

Live reads are consistent with what was just written, so no pass acts on a state that it has itself already changed.
They are no snapshot of many objects, though: what follows from something else is read before it.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from speccache_api import names
from speccache_api.resource import SpecCacheDeployment
from speccache_api.storage_target import VolumeTarget, resolve
from speccache_operator.children.mounts import model_mounts
from speccache_operator.children.table import CHILDREN, Part
from speccache_operator.cluster import Cluster
from speccache_operator.errors import Refused
from speccache_operator.kinds import CLAIM, POD, Key, Object, Ref
from speccache_operator.observe.cluster_wide import Nodes, Volumes
from speccache_operator.observe.observed import Observed

_OPTIONAL = {child.kind for child in CHILDREN if child.part is Part.OPTIONAL}


async def observe(
    cluster: Cluster,
    key: Key,
    resource: SpecCacheDeployment | None,
    nodes: Nodes | None,
    volumes: Volumes | None,
) -> Observed:
    """Read what belongs to the resource `key`; of an invalid one (None) no claims.

    Raises ClusterError as the cluster does: planning on half a view would be guessing.
    """
    labels = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_INSTANCE: key.name}
    claims = () if resource is None else claim_names(resource)
    refs = [*child_refs(key), *(Ref(CLAIM, key.namespace, name) for name in claims)]
    children, capacities, *labelled = await _together(
        _existing(cluster, refs),
        nodes.capacities() if nodes is not None else _nothing(),
        *(
            cluster.list(child.kind, key.namespace, {**labels, names.LABEL_COMPONENT: child.component})
            for child in CHILDREN
            if child.name is None
        ),
    )
    found = {ref.name: obj for ref, obj in children.items() if ref.kind is CLAIM}
    return Observed(
        children=children,
        labelled=tuple(obj for objects in labelled for obj in objects),
        # After their owners: a Job is complete only when its pod is, so its pod's message is there to be read.
        pods=tuple(await cluster.list(POD, key.namespace, labels)),
        claims=found,
        volumes=await volumes.of(found) if volumes is not None else {},
        nodes=capacities,
    )


async def _existing(cluster: Cluster, refs: Sequence[Ref]) -> dict[Ref, Object]:
    found = await _together(*(_read(cluster, ref) for ref in refs))
    return {ref: obj for ref, obj in zip(refs, found, strict=True) if obj is not None}


async def _read(cluster: Cluster, ref: Ref) -> Object | None:
    """The object. None as well when its kind is optional and may not be read: if it is wanted, applying it says so."""
    try:
        return await cluster.get(ref)
    except Refused:
        if ref.kind in _OPTIONAL:
            return None
        raise


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
        Ref(child.kind, key.namespace, child.name(key.name))
        for child in CHILDREN
        if child.name is not None and child.kind is not CLAIM
    )


def claim_names(resource: SpecCacheDeployment) -> tuple[str, ...]:
    """Claims that the resource names or gets: models' and storage's, each once."""
    target = resolve(resource)
    stored = target.claim if isinstance(target, VolumeTarget) else None
    found = [*(mount.claim for mount in model_mounts(resource.spec)), stored]
    return tuple(dict.fromkeys(name for name in found if name is not None))
