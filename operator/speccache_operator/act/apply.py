"""Carrying out a plan. Decides nothing: order, ownership and reasons are the plan's.

The plan has seen whose each object is. Between that look and the write lie milliseconds, which the uid in an update
closes: an object that was replaced meanwhile is a conflict. A creation has no such guard in server-side apply: an
object of the same name that somebody makes in that very moment is taken over.
"""

from dataclasses import dataclass

from speccache_operator.cluster import Cluster
from speccache_operator.decide.plan import Apply, Cause, Plan
from speccache_operator.errors import Refused
from speccache_operator.kinds import SERVICE, STATEFUL_SET, Object, Ref
from speccache_operator.metrics import Metrics
from speccache_operator.observe.observed import version


@dataclass(frozen=True, slots=True)
class Write:
    """One object that was really changed, for events and logs."""

    ref: Ref
    cause: Cause


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server does not take this object."""

    ref: Ref
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a plan. `versions` are the states that our own writes made."""

    writes: tuple[Write, ...]
    versions: frozenset[tuple[str, str]]
    refusal: Refusal | None = None


async def carry_out(cluster: Cluster, plan: Plan, live: frozenset[tuple[str, str]], metrics: Metrics) -> Outcome:
    """Apply, then delete. Raises other ClusterErrors than Refused.

    Of several refused objects the first is told. Without an object that its pods mount, the StatefulSet waits; nothing
    else waits for anything, and nothing is deleted while something is refused. `live` are the versions before: a write
    that made no other one has changed nothing.
    """
    writes: list[Write] = []
    versions: set[tuple[str, str]] = set()
    refusals: list[Refusal] = []
    for step in plan.apply:
        ref = Ref.of(step.obj)
        if ref.kind is STATEFUL_SET and any(refusal.ref.kind is not SERVICE for refusal in refusals):
            continue
        try:
            if step.reset is not None:
                versions.add(version(await cluster.merge(ref, {**step.reset, "metadata": {"uid": step.uid}})))
                metrics.writes.labels(ref.kind.name, "merge").inc()
            result = await cluster.apply(_body(step))
        except Refused as error:
            refusals.append(Refusal(ref, error.message))
            continue
        metrics.writes.labels(ref.kind.name, "apply").inc()
        versions.add(version(result))
        if version(result) not in live:
            writes.append(Write(ref, step.cause))
    if refusals:
        return Outcome(tuple(writes), frozenset(versions), refusals[0])
    for gone in plan.delete:
        await cluster.delete(gone.ref, gone.uid)
        metrics.writes.labels(gone.ref.kind.name, "delete").inc()
    return Outcome(tuple(writes), frozenset(versions))


def _body(step: Apply) -> Object:
    if step.uid is None:
        return step.obj
    return {**step.obj, "metadata": {**step.obj["metadata"], "uid": step.uid}}
