"""What a builder may know: one value instead of a row of arguments."""

from dataclasses import dataclass

from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import MemoryPlan
from speccache_api.wire import WireDocument


@dataclass(frozen=True, slots=True)
class RuntimeImage:
    """The image of served pods and inspection Jobs, and how to get it. `pull_secrets` are names of Secrets."""

    name: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sized:
    """What is known once the models are: the memory, and the document for the pods."""

    memory: MemoryPlan
    wire: WireDocument


@dataclass(frozen=True, slots=True)
class InspectionJob:
    """An inspection to run or to keep. `name` is the Job's and its record's; it changes with what is inspected.

    `result` is the JSON to record, None until there is one.
    """

    name: str
    result: str | None


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The argument of every builder. A part that is None is not known yet, or not wanted."""

    resource: SpecCacheDeployment
    image: RuntimeImage
    sized: Sized | None = None
    inspection: InspectionJob | None = None
