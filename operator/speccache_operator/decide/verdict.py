"""The conditions of a pass: a function of the plan and of what became of it.

What the API server made of an object is asked and not guessed: an apply that changes nothing (a webhook writes another
image, an amount is rounded) leaves the workload's generation, so nothing is rolled out by it, and a change shows as a
generation that its controller has not seen yet.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime

from speccache_operator.children import workload
from speccache_operator.decide import rollout
from speccache_operator.decide.conditions import (
    CHILDREN_APPLIED,
    CONDITION_TYPES,
    PROGRESSING,
    READY,
    STORAGE_READY,
    Condition,
    Reason,
    Status,
    head,
)
from speccache_operator.decide.judge import Judged
from speccache_operator.decide.plan import Plan
from speccache_operator.decide.steps import Hindrance, Outcome
from speccache_operator.kinds import CLAIM, Object
from speccache_operator.observe.observed import Observed

KIND_RECHECK_SECONDS = 300.0
"""A kind that is not served comes with an installation, which nothing here can see: it is asked for this often."""


def conditions(
    judged: Judged, plan: Plan, outcome: Outcome, observed: Observed, now: datetime
) -> tuple[Condition, ...]:
    """One condition for each type, in their fixed order."""
    aspects = [_refused_claim(outcome.hindrances) or c if c.type == STORAGE_READY else c for c in plan.aspects]
    hindrances = [*plan.hindrances, *outcome.hindrances]
    if judged.resource is None:
        return _ordered([*aspects, *_of_invalid(plan.blockers[0], hindrances, observed.at(workload.ref(judged.key)))])
    applied = _applied(hindrances)
    blockers = [c for c in aspects if c.type in {blocker.type for blocker in plan.blockers}]
    blockers += [c for c in aspects if c.reason is Reason.CLAIM_REFUSED and c not in blockers]
    if any(found.stops for found in hindrances):
        blockers.append(applied)
    live = outcome.objects.get(workload.ref(judged.key), observed.at(workload.ref(judged.key)))
    state = rollout.State(
        judged.resource, live, workload.pods(judged.uid, observed.pods), tuple(blockers), workload.count(live), now
    )
    return _ordered([*aspects, applied, rollout.progressing(state), rollout.ready(state)])


def again_after(plan: Plan, outcome: Outcome) -> float | None:
    """Seconds until the next pass by itself; None leaves it to the resync."""
    missing = any(found.reason is Reason.KIND_NOT_SERVED for found in outcome.hindrances)
    wishes = [plan.again_after, KIND_RECHECK_SECONDS if missing else None]
    return min((wish for wish in wishes if wish is not None), default=None)


def failed(outcome: Outcome) -> bool:
    """True when the API server refused something: stated, and to be tried again with growing pauses."""
    return any(found.reason in (Reason.APPLY_REFUSED, Reason.CLAIM_CANNOT_GROW) for found in outcome.hindrances)


def _of_invalid(config: Condition, hindrances: Sequence[Hindrance], live: Object | None) -> tuple[Condition, ...]:
    applied = Condition(CHILDREN_APPLIED, "Unknown", Reason.NOT_CHECKED, "the resource is not valid")
    text = f"{config.type} is False: {config.message}"
    return (
        _applied(hindrances) if hindrances else applied,
        Condition(PROGRESSING, "False", Reason.STOPPED, text),
        rollout.stopped(config, workload.count(live)),
    )


def _refused_claim(hindrances: Iterable[Hindrance]) -> Condition | None:
    """The refusal of the claim is the storage aspect's."""
    refused = next((found for found in hindrances if found.child.kind is CLAIM), None)
    if refused is None:
        return None
    reason = Reason.CLAIM_REFUSED if refused.stops else refused.reason
    return Condition(STORAGE_READY, "False", reason, refused.message)


def _applied(hindrances: Sequence[Hindrance]) -> Condition:
    """All hindrances in one condition; its reason is that of the one that matters most."""
    if not hindrances:
        return Condition(CHILDREN_APPLIED, "True", Reason.APPLIED, "every object that can be planned is as planned")
    worst = min(hindrances, key=lambda found: (not found.stops, -found.reason.weight))
    others = [found.message for found in hindrances if found is not worst]
    status: Status = "Unknown" if worst.reason is Reason.WAITING_FOR_DELETION else "False"
    return Condition(CHILDREN_APPLIED, status, worst.reason, head("; ".join([worst.message, *others])))


def _ordered(found: Sequence[Condition]) -> tuple[Condition, ...]:
    assert {condition.type for condition in found} == {READY, *CONDITION_TYPES}
    return tuple(sorted(found, key=lambda condition: CONDITION_TYPES.index(condition.type)))
