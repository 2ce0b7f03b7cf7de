"""From what is wanted and what is there to what to do: pure, and the only place that decides.

    parse → inspect → size → storage → ask each child's builder → whose are the objects in their places? → what to write

Each aspect answers with a condition; the first that cannot go on stops what depends on it, and nothing else. A
running workload's template is left as it is while an aspect says no: a wrong edit must not take down what serves. Its
number of replicas is apart from that, and can always be lowered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from speccache_api.resource import SpecCacheDeployment
from speccache_api.storage_target import resolve
from speccache_api.wire import build_wire
from speccache_operator.children import workload
from speccache_operator.children.answer import Answer
from speccache_operator.children.context import BuildContext, RuntimeImage, Sized, Storage
from speccache_operator.children.table import CHILDREN, Child, Part
from speccache_operator.decide import inspection, memory, sharing, status_fields, storage
from speccache_operator.decide.conditions import (
    CONFIG_VALID,
    MEMORY_SIZED,
    MODEL_INSPECTED,
    STORAGE_READY,
    Condition,
    Reason,
    head,
)
from speccache_operator.decide.drift import drifted, replanned, reset, stamped
from speccache_operator.decide.judge import Judged
from speccache_operator.decide.ownership import Owner, owner_of
from speccache_operator.decide.pod_trouble import recheck_after
from speccache_operator.decide.steps import Apply, Cause, Delete, Hindrance, Scale
from speccache_operator.kinds import CLAIM, Object, Ref
from speccache_operator.observe.observed import Observed

WAIT_FOR_DELETION_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in this order: `scale` when it goes down, `apply`, `scale` when it goes up, `delete`.

    `aspects` are the conditions that are decided before anything is written, `blockers` those of them without which no
    pod may be made or changed; the others follow from what becomes of the steps (verdict.py). `facts` are the other
    fields of the status.
    """

    aspects: tuple[Condition, ...]
    facts: Mapping[str, Any]
    blockers: tuple[Condition, ...] = ()
    scale: Scale | None = None
    apply: tuple[Apply, ...] = ()
    delete: tuple[Delete, ...] = ()
    hindrances: tuple[Hindrance, ...] = ()
    again_after: float | None = None


def make_plan(judged: Judged, observed: Observed, image: RuntimeImage, now: datetime) -> Plan:
    """The plan for a resource. Pure."""
    if judged.resource is None:
        return _invalid(judged, observed)
    return _Planner(judged, judged.resource, observed, image, now).plan()


def _invalid(judged: Judged, observed: Observed) -> Plan:
    config = Condition(CONFIG_VALID, "False", Reason.INVALID_RESOURCE, head(judged.problem))
    text = "the resource is not valid"
    others = (MODEL_INSPECTED, MEMORY_SIZED, STORAGE_READY)
    aspects = (config, *(Condition(kind, "Unknown", Reason.NOT_CHECKED, text) for kind in others))
    facts = status_fields.counts(observed.at(workload.ref(judged.key)))
    return Plan(aspects, facts, blockers=(config,), scale=_scale(judged, observed, may_grow=False))


def _scale(judged: Judged, observed: Observed, *, may_grow: bool) -> Scale | None:
    """The replicas that are wanted, when the workload that is there has another number of them."""
    ref = workload.ref(judged.key)
    live = observed.at(ref)
    if live is None or judged.replicas is None or owner_of(live, judged.key, judged.uid) is not Owner.OURS:
        return None
    step = Scale(ref, live["metadata"]["uid"], workload.replicas(live), judged.replicas)
    return step if step.down or (may_grow and step.replicas > step.before) else None


@dataclass(slots=True)
class _Steps:
    """Steps as they are found, child after child."""

    apply: list[Apply] = field(default_factory=list)
    delete: list[Delete] = field(default_factory=list)
    hindrances: list[Hindrance] = field(default_factory=list)


class _Planner:
    """One planning of one valid resource: its fields are the inputs and the aspects' answers."""

    def __init__(
        self,
        judged: Judged,
        resource: SpecCacheDeployment,
        observed: Observed,
        image: RuntimeImage,
        now: datetime,
    ) -> None:
        self.judged = judged
        self.resource = resource
        self.observed = observed
        self.now = now
        self.live = observed.at(workload.ref(judged.key))
        self.inspection = inspection.look(resource, observed, image, now)
        self.memory: memory.Finding | None = None
        if self.inspection.inspection is not None:
            self.memory = memory.look(resource.spec, self.inspection.inspection, observed.nodes)
        self.target = resolve(resource)
        self.storage = storage.look(resource, self.target, observed, image, now)
        self.blockers = self._blockers()
        counts = workload.count(self.live)
        self.context = BuildContext(
            resource,
            image,
            self._sized(),
            self.inspection.wanted,
            self.target,
            self.storage.check,
            status_fields.fingerprint_of(resource, self.inspection.inspection),
            Storage(self.storage.usable, observed.claims),
            shared=sharing.look(resource, observed),
            serving=counts.current and counts.ready >= resource.spec.wanted_replicas,
        )

    def plan(self) -> Plan:
        steps = _Steps()
        for child in CHILDREN:
            self._add(steps, child)
        may_grow = not self.blockers and not any(found.lacks_something_needed for found in steps.hindrances)
        scale = _scale(self.judged, self.observed, may_grow=may_grow)
        return Plan(
            aspects=self._aspects(),
            facts=status_fields.of(self.resource, self.inspection.inspection, self.memory, self.live),
            blockers=tuple(self.blockers),
            scale=scale,
            apply=tuple(self._counted(step, scale) for step in steps.apply),
            delete=tuple(steps.delete),
            hindrances=tuple(steps.hindrances),
            again_after=self._again_after(steps.hindrances),
        )

    def _sized(self) -> Sized | None:
        """What the pods are made from; None while they must not be made or changed."""
        found = self.inspection.inspection
        if self.blockers or found is None or self.memory is None or self.memory.memory is None:
            return None
        return Sized(self.memory.memory, build_wire(self.resource, found, self.memory.memory))

    def _add(self, steps: _Steps, child: Child) -> None:
        """The steps of one child. What stands in the way of one stops no other, but for pods that need it."""
        built = child.build(self.context)
        if built is Answer.UNKNOWN:
            return
        wanted = stamped(built) if not isinstance(built, Answer) else None
        steps.delete += self._deletions(child, wanted)
        if wanted is None:
            return
        ref = Ref.of(wanted)
        live = self.observed.at(ref)
        hindrance = self._hindrance(child, ref, live)
        if hindrance is not None:
            steps.hindrances.append(hindrance)
        elif child.part is not Part.RUNS or not any(found.lacks_something_needed for found in steps.hindrances):
            steps.apply += self._write(child, wanted, live)

    def _hindrance(self, child: Child, ref: Ref, live: Object | None) -> Hindrance | None:
        """An object in the child's place that is not ours. Of claims the storage aspect tells."""
        if live is None or child.kind is CLAIM:
            return None
        owner = owner_of(live, self.judged.key, self.judged.uid)
        if owner is Owner.LEAVING:
            text = f"{ref} of an earlier resource of this name is still being deleted"
            return Hindrance(child, ref, Reason.WAITING_FOR_DELETION, text)
        if owner is Owner.FOREIGN:
            text = f"{ref} exists and is not of this resource; delete or rename it, or rename this resource"
            return Hindrance(child, ref, Reason.OBJECT_NOT_OWNED, text)
        return None

    def _write(self, child: Child, wanted: Object, live: Object | None) -> list[Apply]:
        if live is None:
            return [Apply(child, wanted, None, Cause.CREATED)]
        if child.fixed:
            return []
        if replanned(live, wanted):
            return [Apply(child, wanted, live["metadata"]["uid"], Cause.UPDATED)]
        if drifted(live, wanted):
            return [Apply(child, wanted, live["metadata"]["uid"], Cause.REPAIRED, reset(live, wanted))]
        return []

    def _deletions(self, child: Child, wanted: Object | None) -> list[Delete]:
        """What is ours of this child and is not `wanted`, or would have to change and cannot."""
        if not child.deleted:
            return []
        keep = Ref.of(wanted) if wanted is not None else None
        gone = []
        for live in self._there(child):
            ref = Ref.of(live)
            stale = (ref != keep and not (child.collected and wanted is not None)) or (
                child.fixed and wanted is not None and replanned(live, wanted)
            )
            if stale and owner_of(live, self.judged.key, self.judged.uid) is Owner.OURS:
                gone.append(Delete(child, ref, live["metadata"]["uid"]))
        return gone

    def _there(self, child: Child) -> Sequence[Object]:
        if child.name is None:
            return self.observed.named_by_label(child.kind, child.component)
        live = self.observed.at(Ref(child.kind, self.judged.key.namespace, child.name(self.judged.key.name)))
        return [] if live is None else [live]

    def _counted(self, step: Apply, scale: Scale | None) -> Apply:
        """The workload with its number of replicas: the one it has then, or the wanted one when it is new."""
        if step.child.kind is not workload.KIND:
            return step
        count = self.resource.spec.wanted_replicas
        if self.live is not None and not (scale is not None and scale.down):
            count = workload.replicas(self.live)
        return Apply(step.child, workload.with_replicas(step.obj, count), step.uid, step.cause, step.reset)

    def _aspects(self) -> tuple[Condition, ...]:
        sized = Condition(MEMORY_SIZED, "Unknown", Reason.NOT_CHECKED, "the models are not known yet")
        return (
            Condition(CONFIG_VALID, "True", Reason.VALID, "the resource is valid"),
            self.inspection.condition,
            self.memory.condition if self.memory is not None else sized,
            self.storage.condition,
        )

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

    def _again_after(self, hindrances: Sequence[Hindrance]) -> float | None:
        wishes = [
            self.inspection.again_after,
            self.storage.again_after,
            self.memory.again_after if self.memory else None,
        ]
        wishes.append(recheck_after(workload.pods(self.judged.uid, self.observed.pods), self.now))
        if any(found.reason is Reason.WAITING_FOR_DELETION for found in hindrances):
            wishes.append(WAIT_FOR_DELETION_SECONDS)
        return min((wish for wish in wishes if wish is not None), default=None)
