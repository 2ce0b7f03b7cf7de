"""How one operation on half a page ended: the one word for it, from the backend to the metrics."""

from __future__ import annotations

import enum


class Outcome(enum.StrEnum):
    """The value is a metric label."""

    HIT = "hit"
    """Read: the buffers hold the object, whole and checked."""
    WRITTEN = "written"
    EXISTS = "exists"
    """Write: an object was there already and was left alone."""
    DONE = "done"
    """Lookup answered, object touched or deleted."""
    MISS = "miss"
    """Read, touch: no such object."""
    CORRUPT = "corrupt"
    """Read: there was an object, but not this page's."""
    ERROR = "error"
    """The backend failed."""
    FULL = "full"
    """Write: not tried, because the capacity is used up, or nobody has told yet how much of it is left."""
    DROPPED = "dropped"
    """Not tried, because storage keeps failing or does not answer."""
    NOT_ASKED = "not_asked"
    """Half a page that nobody wanted read, or gave to be written, or wanted without its target."""

    @property
    def stored(self) -> bool:
        """Whether storage is known to hold the object."""
        return self in (Outcome.HIT, Outcome.WRITTEN, Outcome.EXISTS)

    @property
    def failed(self) -> bool:
        """Whether it was not possible; asked again later, the answer may be another."""
        return self in (Outcome.ERROR, Outcome.FULL, Outcome.DROPPED)
