"""From what is wanted and what is there to what to do: pure, and the only place that decides.

    parse → inspect → size → storage → build the children → whose are the objects in their places? → what to write

Each aspect answers with a condition; the first that cannot go on stops what depends on it, and nothing else. A
running StatefulSet is left as it is while an aspect says no: a wrong edit must not take down what serves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from speccache_api import names
from speccache_api.resource import InvalidResource, SpecCacheDeployment
from speccache_api.wire import build_wire
from speccache_operator.children import (
    claim,
    config_map,
    headless_service,
    inspection_job,
    inspection_record,
    service,
    service_account,
    stateful_set,
)
from speccache_operator.children.context import BuildContext, RuntimeImage, Sized
from speccache_operator.decide import inspection, memory, rollout, status_fields, storage
from speccache_operator.decide.conditions import (
    CONDITION_TYPES,
    CONFIG_VALID,
    MEMORY_SIZED,
    MODEL_INSPECTED,
    PROGRESSING,
    STORAGE_READY,
    Condition,
    Reason,
    head,
)
from speccache_operator.decide.drift import drifted, replanned, reset, spec_drifted, stamped
from speccache_operator.decide.ownership import Owner, owner_of
from speccache_operator.decide.pod_trouble import recheck_after
from speccache_operator.kinds import CLAIM, JOB, STATEFUL_SET, Key, Object, Ref
from speccache_operator.observe.observed import Observed

WAIT_FOR_DELETION_SECONDS = 5.0


class Cause(StrEnum):
    """Why an object is written."""

    CREATED = "Created"  # it was not there
    UPDATED = "Updated"  # the plan has changed
    REPAIRED = "Repaired"  # somebody else changed it


@dataclass(frozen=True, slots=True)
class Apply:
    """An object to apply. `uid` is the live object's, None when there is none.

    `reset` is a merge patch to send before, for what applying cannot undo.
    """

    obj: Object
    uid: str | None
    cause: Cause
    reset: Object | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """An object to delete: this very one."""

    ref: Ref
    uid: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in this order: `apply`, `delete`, then write `conditions` and `facts` into the status.

    `conditions` has one entry for each type, in their fixed order. `facts` are the other fields of the status.
    """

    conditions: tuple[Condition, ...]
    facts: Mapping[str, Any]
    apply: tuple[Apply, ...] = ()
    delete: tuple[Delete, ...] = ()
    again_after: float | None = None


Judged = SpecCacheDeployment | InvalidResource
"""A resource, or why it is none."""


def judge(raw: Object) -> Judged:
    """Parse the resource as the API server stores it; what is wrong with it is an answer, not an exception."""
    try:
        return SpecCacheDeployment.parse(dict(raw))
    except InvalidResource as error:
        return error


def make_plan(key: Key, judged: Judged, observed: Observed, image: RuntimeImage, now: datetime) -> Plan:
    """The plan for the resource `key`. Pure."""
    if isinstance(judged, InvalidResource):
        return _invalid(judged, observed.at(stateful_set_ref(key)))
    return _Planner(judged, observed, image, now).plan()


def stateful_set_ref(key: Key) -> Ref:
    """Where the StatefulSet of a resource is; needs no valid spec."""
    return Ref(STATEFUL_SET, key.namespace, names.statefulset_name(key.name))


def _invalid(error: InvalidResource, live: Object | None) -> Plan:
    config = Condition(CONFIG_VALID, "False", Reason.INVALID_RESOURCE, head(str(error).replace("\n", "; ")))
    conditions = [config]
    for kind in (MODEL_INSPECTED, MEMORY_SIZED, STORAGE_READY):
        conditions.append(Condition(kind, "Unknown", Reason.NOT_CHECKED, "the resource is not valid"))
    conditions.append(Condition(PROGRESSING, "False", Reason.STOPPED, f"ConfigValid is False: {config.message}"))
    count = (live or {}).get("status", {}).get("readyReplicas", 0)
    still = f" ({count} pods of the earlier configuration still serve)" if count else ""
    conditions.append(Condition("Ready", "False", Reason.INVALID_RESOURCE, config.message + still))
    return Plan(_ordered(conditions), status_fields.counts(live))


class _Planner:
    """One planning of one valid resource: its fields are the inputs and the aspects' answers."""

    def __init__(self, resource: SpecCacheDeployment, observed: Observed, image: RuntimeImage, now: datetime) -> None:
        self.resource = resource
        self.observed = observed
        self.now = now
        self.inspection = inspection.look(resource, observed, image, now)
        self.memory: memory.Finding | None = None
        if self.inspection.inspection is not None:
            self.memory = memory.look(resource.spec, self.inspection.inspection, observed.nodes)
        self.storage = storage.look(resource, observed)
        self.context = BuildContext(resource, image, self._sized(), self.inspection.wanted)

    def plan(self) -> Plan:
        wanted = [stamped(obj) for obj in self._children()]
        obstacle, in_the_way = self._obstacle(wanted)
        writes = [] if in_the_way else self._writes(wanted)
        live = self.observed.at(stateful_set_ref(self._key))
        changing = any(_changes_pods(write, live) for write in writes)
        pods = rollout.count(self.resource, live, changing=changing)
        served = self.observed.pods_of(live, names.COMPONENT_SERVER)
        aspects = self._aspects()
        blockers = [*self._blockers(), *([obstacle] if obstacle else [])]
        conditions = [
            *aspects,
            obstacle or rollout.progressing(pods, blockers),
            rollout.ready(self.resource, pods, served, blockers, self.now),
        ]
        return Plan(
            _ordered(conditions),
            status_fields.of(self.resource, self.inspection.inspection, self.memory, live),
            apply=tuple(writes),
            delete=tuple(self._deletions(wanted)),
            again_after=self._again_after(obstacle, served),
        )

    @property
    def _key(self) -> Key:
        return Key(self.resource.namespace, self.resource.name)

    def _sized(self) -> Sized | None:
        """What the pods are made from; None while they must not be made or changed."""
        found = self.inspection.inspection
        if found is None or self.memory is None or self.memory.memory is None or not self.memory.allowed:
            return None
        if not self.storage.usable:
            return None
        return Sized(self.memory.memory, build_wire(self.resource, found, self.memory.memory))

    def _children(self) -> list[Object]:
        """Children to have, in the order in which they are needed, not yet stamped."""
        ctx = self.context
        built = [
            service_account.build(ctx),
            service.build(ctx),
            headless_service.build(ctx),
            claim.build(ctx) or claim.released(ctx, self.observed.claims),
            inspection_record.build(ctx),
            config_map.build(ctx),
            stateful_set.build(ctx),
        ]
        if inspection.job_is_wanted(self.inspection, self.observed, self.resource):
            built.insert(3, inspection_job.build(ctx))
        return [obj for obj in built if obj is not None]

    def _obstacle(self, wanted: Sequence[Object]) -> tuple[Condition | None, bool]:
        """(condition, stop the writes) for objects in the places of children that are not ours.

        A claim in the way is the storage aspect's matter: it stops only the pods.
        """
        for obj in wanted:
            ref, live = Ref.of(obj), self.observed.at(Ref.of(obj))
            if live is None or ref.kind is CLAIM:
                continue
            owner = owner_of(live, self.resource)
            if owner is Owner.LEAVING:
                text = f"{ref} of an earlier resource of this name is still being deleted"
                return Condition(PROGRESSING, "True", Reason.WAITING_FOR_DELETION, text), True
            if owner is Owner.FOREIGN:
                text = f"{ref} exists and is not of this resource; delete or rename it, or rename this resource"
                return Condition(PROGRESSING, "False", Reason.OBJECT_NOT_OWNED, text), True
        return None, False

    def _writes(self, wanted: Sequence[Object]) -> list[Apply]:
        writes = []
        for obj in wanted:
            ref = Ref.of(obj)
            live = self.observed.at(ref)
            if live is None:
                writes.append(Apply(obj, None, Cause.CREATED))
                continue
            if ref.kind is JOB or (ref.kind is CLAIM and not self.storage.usable):
                continue  # a Job cannot change; a claim that will not do is the storage aspect's to tell
            if ref.kind is CLAIM:
                obj = stamped(claim.at_least(obj, live))
            if replanned(live, obj):
                writes.append(Apply(obj, live["metadata"]["uid"], Cause.UPDATED))
            elif drifted(live, obj):
                writes.append(Apply(obj, live["metadata"]["uid"], Cause.REPAIRED, reset(live, obj)))
        return writes

    def _deletions(self, wanted: Sequence[Object]) -> list[Delete]:
        """Inspection Jobs and records that are not wanted any more, and Jobs that would have to change.

        Nothing else is ever deleted here: the other children go with the resource, and a claim holds data.
        """
        keep = {Ref.of(obj): obj for obj in wanted}
        gone = []
        for live in self.observed.inspections:
            ref = Ref.of(live)
            stale = ref not in keep or (ref.kind is JOB and replanned(live, keep[ref]))
            if stale and owner_of(live, self.resource) is Owner.OURS:
                gone.append(Delete(ref, live["metadata"]["uid"]))
        return gone

    def _aspects(self) -> list[Condition]:
        sized = Condition(MEMORY_SIZED, "Unknown", Reason.NOT_CHECKED, "the models are not known yet")
        return [
            Condition(CONFIG_VALID, "True", Reason.VALID, "the resource is valid"),
            self.inspection.condition,
            self.memory.condition if self.memory is not None else sized,
            self.storage.condition,
        ]

    def _blockers(self) -> list[Condition]:
        """Aspects without which no pod may be made or changed."""
        found = []
        if self.inspection.inspection is None:
            found.append(self.inspection.condition)
        elif self.memory is not None and not self.memory.allowed:
            found.append(self.memory.condition)
        if not self.storage.usable:
            found.append(self.storage.condition)
        return found

    def _again_after(self, obstacle: Condition | None, served: Sequence[Object]) -> float | None:
        wishes = [self.inspection.again_after, self.memory.again_after if self.memory else None]
        wishes.append(recheck_after(served, self.now))
        if obstacle is not None and obstacle.reason is Reason.WAITING_FOR_DELETION:
            wishes.append(WAIT_FOR_DELETION_SECONDS)
        return min((wish for wish in wishes if wish is not None), default=None)


def _changes_pods(write: Apply, live: Object | None) -> bool:
    """True when the write is of the StatefulSet's spec."""
    if Ref.of(write.obj).kind is not STATEFUL_SET:
        return False
    return live is None or write.cause is Cause.UPDATED or spec_drifted(live, write.obj)


def _ordered(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    return tuple(sorted(conditions, key=lambda condition: CONDITION_TYPES.index(condition.type)))
