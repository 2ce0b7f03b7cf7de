"""What a builder may know: one value instead of a row of arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import MemoryPlan
from speccache_api.storage_target import StorageTarget
from speccache_api.wire import WireDocument
from speccache_operator.kinds import Object


@dataclass(frozen=True, slots=True)
class RuntimeImage:
    """The image of served pods and of the Jobs beside them, and how to get it. `pull_secrets` are names of Secrets."""

    name: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sized:
    """What is known once the models are: the memory, and the document for the pods."""

    memory: MemoryPlan
    wire: WireDocument


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A Job that is asked one thing. `name` is the Job's and its record's; it changes with what is asked.

    `result` is the JSON to record, None until there is one. `running` says that the Job must exist.
    """

    name: str
    result: str | None = None
    running: bool = True


@dataclass(frozen=True, slots=True)
class Storage:
    """The claim of the storage tier. `usable`: pods may be made with it, or without one. `claims` are all claims of the
    resource that exist, by name.
    """

    usable: bool = True
    claims: Mapping[str, Object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The argument of every builder. A part that is None is not known yet, or not wanted.

    `target` is where pages are stored, `check` the Job that tries it, `fingerprint` what the pages of the model lie
    below there; None while nobody has read the model. `shared`: two pods may run at the same time, wherever they are
    put. `serving`: every wanted pod of the workload that is there now is ready.
    """

    resource: SpecCacheDeployment
    image: RuntimeImage
    sized: Sized | None = None
    inspection: Inquiry | None = None
    target: StorageTarget | None = None
    check: Inquiry | None = None
    fingerprint: str | None = None
    storage: Storage = field(default_factory=Storage)
    shared: bool = True
    serving: bool = False
