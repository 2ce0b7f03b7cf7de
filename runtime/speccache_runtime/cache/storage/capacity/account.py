"""What is used of a capacity, and who may write how much more: arithmetic only.

A listing is exact but takes long; between two of them what the writers say they have written is added, and what the
sweeper removed is taken off. What is written while a listing runs may count twice until the next one, never less than
once.

    0 ................ LOW ........ capacity ..... HIGH
                        ▲ removed down to here     ▲ the sum of all that may be written ends here
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LOW, HIGH = 0.95, 1.04


@dataclass(slots=True)
class Account:
    """`listed` bytes and `objects` were there when the writers had written `marks`; `removed` are bytes since."""

    listed: int
    marks: Mapping[str, int]
    removed: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    def used(self, written: Mapping[str, int]) -> int:
        """Bytes in the store, if the writers have written so many since their start. One that is not among them any
        more has ended; what it wrote last counts on."""
        self.seen.update(written)
        grown = sum(max(0, count - self.marks.get(writer, 0)) for writer, count in self.seen.items())
        return max(0, self.listed + grown - self.removed)


def excess(used: int, capacity: int, writers: int, largest: int) -> int:
    """How many bytes to remove; 0 unless more than `capacity` is used, or writers cannot write anything any more.

    Down to LOW, or lower where that would leave the writers no room for a page each.
    """
    low = max(0, min(int(capacity * LOW), int(capacity * HIGH) - writers * 2 * largest))
    crowded = used + writers * largest > int(capacity * HIGH)
    return used - low if used > capacity or (crowded and used > low) else 0


def limits(used: int, capacity: int, written: Mapping[str, int], held: Mapping[str, int]) -> dict[str, int]:
    """Up to how many bytes, counted from its start, each writer may write: equal shares of what is left to HIGH.

    `held` are the limits that they may go by until they hear of these: what one may still write by them nobody else
    gets, whether or not it is more than a share.
    """
    room = max(0, int(capacity * HIGH) - used)
    share = room // max(1, len(written))
    left = {writer: max(0, held[writer] - count) for writer, count in written.items()}
    short = sum(each < share for each in left.values())
    more = max(0, room - sum(left.values())) // max(1, short)
    return {writer: count + min(share, left[writer] + more) for writer, count in written.items()}
