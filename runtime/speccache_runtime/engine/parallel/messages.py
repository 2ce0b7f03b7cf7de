"""What the ranks of a replica tell each other: values that become JSON, and nothing that can run code.

The rank that decides (0) sends; the others do what they are told, in the order of the messages, and answer those that
carry a `number`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.errors import RankError
from speccache_runtime.steps import StepPlan, StepResult

Moves = tuple[tuple[int, int, bool], ...]
"""(device page, host page, whether the draft half moves too) of each page."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: who this rank is, where the ranks meet, the time limit of what they do together, in seconds,
    the engine's settings as JSON, and the open file with the host halves that ranks share, if they share any."""

    rank: int
    size: int
    meet: str
    timeout: float
    config: str
    memory: int | None
    kind: Literal["start"] = "start"


@dataclass(frozen=True, slots=True)
class Pages:
    """Make pools of so many device pages."""

    count: int
    kind: Literal["pages"] = "pages"


@dataclass(frozen=True, slots=True)
class Step:
    """Run the target's part of a step."""

    plan: StepPlan
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class Propose:
    """Run the draft's part of the step before: this is what was chosen, and which rows have ended."""

    result: StepResult
    ended: tuple[int, ...]
    kind: Literal["propose"] = "propose"


@dataclass(frozen=True, slots=True)
class Load:
    """Bring pages from the host to the device, as the load of this number."""

    number: int
    moves: Moves
    kind: Literal["load"] = "load"


@dataclass(frozen=True, slots=True)
class Backup:
    """Copy pages from the device to the host: the halves that this rank does not share."""

    number: int
    moves: Moves
    kind: Literal["backup"] = "backup"


@dataclass(frozen=True, slots=True)
class Lookup:
    """How many of these pages are stored in a row, how many with draft half? Keys in hex; `parent` is the one before
    the first. About halves that ranks share rank 0 asks itself."""

    number: int
    keys: tuple[str, ...]
    parent: str
    kind: Literal["lookup"] = "lookup"


@dataclass(frozen=True, slots=True)
class Read:
    """Read a page from storage into a host page: the halves that this rank does not share."""

    number: int
    key: str
    parent: str
    host: int
    draft: bool
    kind: Literal["read"] = "read"


@dataclass(frozen=True, slots=True)
class Write:
    """Write a host page to storage: the halves that this rank does not share."""

    number: int
    key: str
    parent: str
    host: int
    draft: bool
    successors: tuple[int, ...]
    kind: Literal["write"] = "write"


@dataclass(frozen=True, slots=True)
class Touch:
    """Mark a stored page as used now: the halves that this rank does not share."""

    number: int
    key: str
    parent: str
    draft: bool
    kind: Literal["touch"] = "touch"


@dataclass(frozen=True, slots=True)
class Cancel:
    """The read of this number is not wanted any more; it is answered all the same."""

    number: int
    kind: Literal["cancel"] = "cancel"


@dataclass(frozen=True, slots=True)
class Hurry:
    """Try writes again soon after each failure: not much time is left."""

    kind: Literal["hurry"] = "hurry"


@dataclass(frozen=True, slots=True)
class Stop:
    """End: nothing comes after this."""

    kind: Literal["stop"] = "stop"


@dataclass(frozen=True, slots=True)
class Ready:
    """This rank has come as far: its program is there, or its part of the models is loaded, and there is room for so
    many device pages."""

    stage: Literal["here", "loaded"]
    most_pages: int = 0
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True)
class Failed:
    """This rank cannot go on; the text is one line."""

    text: str
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class Moved:
    """A load or backup has ended."""

    number: int
    kind: Literal["moved"] = "moved"


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a lookup: how many pages are stored in a row, and how many with draft half."""

    number: int
    target: int
    draft: int
    kind: Literal["found"] = "found"


@dataclass(frozen=True, slots=True)
class WasRead:
    """Answer to a read."""

    number: int
    target: Outcome
    draft: Outcome
    kind: Literal["was_read"] = "was_read"


@dataclass(frozen=True, slots=True)
class WasWritten:
    """Answer to a write."""

    number: int
    target: Outcome
    draft: Outcome
    kind: Literal["was_written"] = "was_written"


@dataclass(frozen=True, slots=True)
class Touched:
    """Answer to a touch."""

    number: int
    outcome: Outcome
    kind: Literal["touched"] = "touched"


Order = Start | Pages | Step | Propose | Load | Backup | Lookup | Read | Write | Touch | Cancel | Hurry | Stop
Answer = Moved | Found | WasRead | WasWritten | Touched
Message = Order | Answer | Ready | Failed

_ADAPTER: TypeAdapter[Message] = TypeAdapter(
    Annotated[Message, Field(discriminator="kind")], config=ConfigDict(extra="forbid")
)


def encode(message: Message) -> bytes:
    """The message as JSON."""
    return _ADAPTER.dump_json(message)


def decode(data: bytes) -> Message:
    """The message that `encode` wrote. Raises RankError for anything else."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        raise RankError(f"a rank sent something that is no message: {error.errors()[0]['msg']}") from error
