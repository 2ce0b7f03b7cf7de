"""What a pass does, and what became of it: the values between deciding and acting."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from speccache_operator.children.table import Child, Part
from speccache_operator.decide.reasons import Reason
from speccache_operator.kinds import Object, Ref


class Cause(StrEnum):
    """Why an object is written."""

    CREATED = "Created"  # it was not there
    UPDATED = "Updated"  # the plan has changed
    REPAIRED = "Repaired"  # somebody else changed it
    SCALED = "Scaled"  # another number of replicas is wanted


@dataclass(frozen=True, slots=True)
class Apply:
    """An object to apply. `uid` is the live object's, None when there is none.

    `reset` is a merge patch to send before, for what applying cannot undo.
    """

    child: Child
    obj: Object
    uid: str | None
    cause: Cause
    reset: Object | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """Another number of replicas for the workload that is there, and nothing else of it."""

    ref: Ref
    uid: str
    before: int
    replicas: int

    @property
    def down(self) -> bool:
        """True when pods are taken away."""
        return self.replicas < self.before


@dataclass(frozen=True, slots=True)
class Delete:
    """An object to delete: this very one."""

    child: Child
    ref: Ref
    uid: str


@dataclass(frozen=True, slots=True)
class Hindrance:
    """Why one child is not as planned: somebody's object is in its place (ObjectNotOwned), an earlier one is still
    leaving it (WaitingForDeletion), the API server refuses it (ApplyRefused, of a claim's growth ClaimCannotGrow) or
    does not know its kind (KindNotServed).
    """

    child: Child
    ref: Ref
    reason: Reason
    message: str

    @property
    def stops(self) -> bool:
        """False when pods are as planned without it: an optional child, or a claim that stays as large as it is."""
        return self.child.part is not Part.OPTIONAL and self.reason is not Reason.CLAIM_CANNOT_GROW

    @property
    def lacks_something_needed(self) -> bool:
        """Pods could not be what the plan says."""
        return self.stops and self.child.part is Part.NEEDED


@dataclass(frozen=True, slots=True)
class Write:
    """One object that was really changed, for events and logs. `replicas` is the new number when it was scaled."""

    ref: Ref
    cause: Cause
    replicas: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a plan. `objects` are the states that our own writes made or found."""

    objects: Mapping[Ref, Object] = field(default_factory=dict)
    writes: tuple[Write, ...] = ()
    hindrances: tuple[Hindrance, ...] = ()
    versions: frozenset[tuple[str, str]] = frozenset()
