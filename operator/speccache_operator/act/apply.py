"""Carrying out a plan. Decides nothing: order, ownership and reasons are the plan's.

The plan has seen whose each object is. Between that look and the write lie milliseconds, which the uid in an update
closes: an object that was replaced meanwhile is a conflict. A creation has no such guard in server-side apply: an
object of the same name that somebody makes in that very moment is taken over.
"""

from speccache_operator.children import claim, workload
from speccache_operator.children.table import CHILDREN, Child, Part
from speccache_operator.cluster import Cluster
from speccache_operator.decide.conditions import head
from speccache_operator.decide.drift import stamp
from speccache_operator.decide.plan import Plan
from speccache_operator.decide.reasons import Reason
from speccache_operator.decide.steps import Apply, Cause, Delete, Hindrance, Outcome, Scale, Write
from speccache_operator.errors import NotFound, Refused
from speccache_operator.kinds import CLAIM, Object, Ref
from speccache_operator.metrics import Metrics
from speccache_operator.observe.observed import Observed, version


async def carry_out(cluster: Cluster, plan: Plan, observed: Observed, metrics: Metrics) -> Outcome:
    """Scale down, apply, scale up, delete. Raises other ClusterErrors than Refused.

    A refused object stops nothing else, but for what makes pods that need it.
    """
    hands = _Hands(cluster, observed, metrics)
    if plan.scale is not None and plan.scale.down:
        await hands.scale(plan.scale)
    for step in plan.apply:
        if step.child.part is not Part.RUNS or not hands.lack_something_needed:
            await hands.apply(step)
    if plan.scale is not None and not plan.scale.down and not hands.lack_pods:
        await hands.scale(plan.scale)
    for gone in plan.delete:
        await hands.delete(gone)
    return Outcome(hands.objects, tuple(hands.writes), tuple(hands.hindrances), frozenset(hands.versions))


class _Hands:
    """One carrying out: what was written, what was refused."""

    def __init__(self, cluster: Cluster, observed: Observed, metrics: Metrics) -> None:
        self._cluster = cluster
        self._observed = observed
        self._metrics = metrics
        self.objects: dict[Ref, Object] = {}
        self.writes: list[Write] = []
        self.hindrances: list[Hindrance] = []
        self.versions: set[tuple[str, str]] = set()

    @property
    def lack_something_needed(self) -> bool:
        """Pods could not be what the plan says."""
        return any(found.lacks_something_needed for found in self.hindrances)

    @property
    def lack_pods(self) -> bool:
        """Pods are not what the plan says, so there should not be more of them."""
        return any(found.stops and found.child.part in (Part.NEEDED, Part.RUNS) for found in self.hindrances)

    async def apply(self, step: Apply) -> None:
        ref = Ref.of(step.obj)
        try:
            if step.reset is not None:
                await self._merge(ref, {**step.reset, "metadata": {"uid": step.uid}})
            result = await self._cluster.apply(_body(step))
        except Refused as error:
            self._refused(step.child, ref, error, step.obj)
        except NotFound:
            if step.child.part is not Part.OPTIONAL:
                raise  # the namespace is going
            self._not_served(step.child, ref)
        else:
            self._metrics.writes.labels(ref.kind.name, "apply").inc()
            self._wrote(result, Write(ref, step.cause))

    async def scale(self, step: Scale) -> None:
        """A write of the replicas alone."""
        try:
            patch = {"metadata": {"uid": step.uid}, "spec": {"replicas": step.replicas}}
            result = await self._merge(step.ref, patch)
        except Refused as error:
            child = next(child for child in CHILDREN if child.kind is workload.KIND)
            self._refused(child, step.ref, error)
        else:
            self._wrote(result, Write(step.ref, Cause.SCALED, step.replicas))

    async def delete(self, step: Delete) -> None:
        try:
            await self._cluster.delete(step.ref, step.uid)
        except Refused as error:
            self._refused(step.child, step.ref, error)
        else:
            self._metrics.writes.labels(step.ref.kind.name, "delete").inc()

    async def _merge(self, ref: Ref, patch: Object) -> Object:
        result = await self._cluster.merge(ref, patch)
        self.versions.add(version(result))
        self._metrics.writes.labels(ref.kind.name, "merge").inc()
        return result

    def _wrote(self, result: Object, write: Write) -> None:
        self.objects[write.ref] = result
        self.versions.add(version(result))
        if _content(result) != _content(self._observed.at(write.ref)):
            self.writes.append(write)

    def _refused(self, child: Child, ref: Ref, error: Refused, wanted: Object | None = None) -> None:
        live = self._observed.claims.get(ref.name) if child.kind is CLAIM else None
        if live is not None and wanted is not None and claim.grows(live, wanted):
            self.hindrances.append(Hindrance(child, ref, Reason.CLAIM_CANNOT_GROW, _cannot_grow(live, wanted, error)))
            return
        text = f"the API server refuses {ref}: {head(error.message)}"
        if child.kind is not CLAIM:
            text += f"; if somebody changed {ref}, delete it: it is made anew"
        self.hindrances.append(Hindrance(child, ref, Reason.APPLY_REFUSED, text))

    def _not_served(self, child: Child, ref: Ref) -> None:
        kind = child.kind
        text = f"this cluster does not serve {kind.name} of {kind.api_version}; {ref} is made once it does"
        self.hindrances.append(Hindrance(child, ref, Reason.KIND_NOT_SERVED, text))


def _cannot_grow(live: Object, wanted: Object, error: Refused) -> str:
    return (
        f"claim {live['metadata']['name']} cannot grow from {claim.requested(live)} to {claim.requested(wanted)}:"
        f" {head(error.message)}; set allowVolumeExpansion: true in its StorageClass, or set"
        f" spec.kvCache.storage.persistentVolumeClaim.size back to {claim.requested(live)}. Pods go on with it as it is"
    )


def _content(obj: Object | None) -> Object | None:
    """What a write of ours may change of an object. Its controller may have written the status in the meantime."""
    if obj is None:
        return None
    meta = obj["metadata"]
    kept = {key: meta.get(key) for key in ("uid", "labels", "ownerReferences")}
    return {**obj, "metadata": {**kept, "stamp": stamp(obj)}, "status": None}


def _body(step: Apply) -> Object:
    if step.uid is None:
        return step.obj
    return {**step.obj, "metadata": {**step.obj["metadata"], "uid": step.uid}}
