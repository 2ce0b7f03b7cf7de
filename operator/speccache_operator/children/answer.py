"""What a builder may answer besides an object."""

from enum import Enum

from speccache_operator.kinds import Object


class Answer(Enum):
    """Two different things that an object's absence could mean; to mix them up deletes what serves, or keeps what was
    switched off.
    """

    ABSENT = "absent"  # must not exist: what is ours is deleted
    UNKNOWN = "unknown"  # cannot be said now: what is there stays as it is


Built = Object | Answer
