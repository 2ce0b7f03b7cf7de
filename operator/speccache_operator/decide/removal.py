"""What becomes of a record of pages to remove (retention Delete of a bucket) once its resource is gone. Pure.

    pods of the resource still end, and write what they hold    wait
    no Job, attempts left                                       make one
    the Job runs                                                wait
    the Job ended well                                          forget the record
    the Job failed                                              count it and tell; after RETRY_SECONDS remove it: it is
                                                                made anew, ATTEMPTS times in all
    no attempt left                                             the record stays, and says what was not removed

The count is in the record, so that another operator goes on where this one ended.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from speccache_operator.children.storage_removal import Removal
from speccache_operator.decide.conditions import tail
from speccache_operator.decide.inquiry import end_of, last_words
from speccache_operator.decide.pod_trouble import worst_trouble
from speccache_operator.kinds import Object

ATTEMPTS = 3
RETRY_SECONDS = 600.0
ATTEMPTS_KEY = "attempts"
"""In the record: Jobs that have failed."""
COUNTED_KEY = "countedJob"
"""In the record: uid of the newest Job that is among them."""
FAILURE_KEY = "failure"
"""In the record: what it said."""


class Do(Enum):
    """What to do with a record."""

    WAIT = "wait"
    START = "start"  # make the Job
    COUNT = "count"  # write `text` and one more failed attempt into the record
    RETRY = "retry"  # delete the failed Job
    FORGET = "forget"  # delete the record: there is nothing left to remove
    LEAVE = "leave"  # given up, or nothing that could be read


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, what to tell, and when to look again by itself."""

    do: Do
    text: str = ""
    again_after: float | None = None


def decide(record: Object, job: Object | None, pods: tuple[Object, ...], *, serving: bool, now: datetime) -> Decision:
    """For a record whose resource is gone. `pods` are the Job's, `serving` says that pods of the resource are left."""
    removal, attempts = Removal.of(record), failed_attempts(record)
    if removal is None:
        return Decision(Do.LEAVE)
    if job is None:
        if attempts >= ATTEMPTS:
            return Decision(Do.LEAVE)
        return Decision(Do.WAIT if serving else Do.START)
    ended = end_of(job)
    if ended is None:
        return Decision(Do.WAIT)
    complete, when = ended
    if complete:
        return Decision(Do.FORGET, f"removed what was stored in {_place(removal)}")
    if record["data"].get(COUNTED_KEY) != job["metadata"]["uid"]:
        return Decision(Do.COUNT, _failure(record, removal, attempts + 1, pods, now))
    age = (now - when).total_seconds()
    if attempts >= ATTEMPTS:
        return Decision(Do.LEAVE)
    return Decision(Do.RETRY) if age >= RETRY_SECONDS else Decision(Do.WAIT, again_after=RETRY_SECONDS - age)


def failed_attempts(record: Object) -> int:
    """How many Jobs have failed; 0 for a number that somebody has made unreadable."""
    text = str(record.get("data", {}).get(ATTEMPTS_KEY, "0"))
    return int(text) if text.isascii() and text.isdigit() else 0


def _failure(record: Object, removal: Removal, attempts: int, pods: tuple[Object, ...], now: datetime) -> str:
    trouble = worst_trouble(pods, now)
    said = tail(last_words(pods) or (trouble.message if trouble else "its pod is gone"), 500)
    text = f"cannot remove what is stored in {_place(removal)} (attempt {attempts} of {ATTEMPTS}): {said}"
    if attempts < ATTEMPTS:
        return f"{text}; it is tried again in {RETRY_SECONDS / 60:.0f} minutes"
    name = record["metadata"]["name"]
    return f"{text}; given up. Remove it with a client of S3, then delete ConfigMap {name}"


def _place(removal: Removal) -> str:
    return f"{removal.target.url} below fingerprint {removal.fingerprint}"
