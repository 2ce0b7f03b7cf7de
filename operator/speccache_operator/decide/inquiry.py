"""How far an inquiry is: is its answer known, and if not, what is to be done and told.

Level-based: every state of record, Job and its pods has one answer, however it came about.

    a readable record                                           known; the Job is no longer wanted
    the Job ended well and its message is readable              known; record it, keep the Job until the record is seen
    no Job                                                      make one
    the Job runs                                                wait, and say what troubles its pod
    the Job failed                                              say why; after `retry_seconds` remove it: made anew
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from speccache_operator.children.context import Inquiry
from speccache_operator.decide.conditions import Reason
from speccache_operator.decide.pod_trouble import Trouble, recheck_after, termination_message, worst_trouble
from speccache_operator.kinds import CONFIG_MAP, JOB, Object, Ref
from speccache_operator.observe.observed import Observed

Answer = TypeVar("Answer")

PATIENCE_SECONDS = 15.0
"""A Job that has no pod after this time is being refused one."""


@dataclass(frozen=True, slots=True)
class Question(Generic[Answer]):
    """What is asked. `name` is the Job's and the record's, `key` the record's; `parse` answers None for a text that is
    no good answer.
    """

    namespace: str
    name: str
    component: str
    key: str
    parse: Callable[[str], Answer | None]
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class Found(Generic[Answer]):
    """The state. Of `answer`, `failed` and `trouble` at most one is there; none means that it is on its way.

    `failed` is what the pod that ended last has said, `unreadable` that it ended well all the same. `wanted` is the
    Job and record to have, `again_after` when to look again by itself.
    """

    wanted: Inquiry | None
    answer: Answer | None = None
    failed: str | None = None
    unreadable: bool = False
    trouble: Trouble | None = None
    begun: bool = True
    again_after: float | None = None


def look(question: Question[Answer], observed: Observed, now: datetime) -> Found[Answer]:
    """The state of the inquiry. Pure."""
    known = recorded(question, observed)
    if known is not None:
        return known
    wanted = Inquiry(question.name)
    job = observed.at(Ref(JOB, question.namespace, question.name))
    if job is None:
        return Found(wanted, begun=False)
    pods = observed.pods_of(job, question.component)
    ended = end_of(job)
    if ended is None:
        return _running(question, job, pods, wanted, now)
    complete, when = ended
    if complete:
        for pod in pods:
            text = termination_message(pod)
            answer = question.parse(text)
            if answer is not None:
                return Found(Inquiry(question.name, text.strip()), answer)
    said = last_words(pods) or (not complete and _trouble_of(pods, now)) or "its pod is gone"
    age = (now - when).total_seconds()
    if age >= question.retry_seconds:
        return Found(None, failed=said, unreadable=complete, again_after=1.0)
    return Found(wanted, failed=said, unreadable=complete, again_after=question.retry_seconds - age)


def recorded(question: Question[Answer], observed: Observed) -> Found[Answer] | None:
    """The state when a readable record is there, whatever else is."""
    record = observed.at(Ref(CONFIG_MAP, question.namespace, question.name))
    text = (record or {}).get("data", {}).get(question.key, "")
    answer = question.parse(text)
    return None if answer is None else Found(Inquiry(question.name, text, running=False), answer)


def end_of(job: Object) -> tuple[bool, datetime] | None:
    """(it succeeded, when) for a Job that will do nothing more; None for one that will."""
    for condition in job.get("status", {}).get("conditions", ()):
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            when = datetime.fromisoformat(condition["lastTransitionTime"])
            return condition["type"] == "Complete", when
    return None


def last_words(pods: tuple[Object, ...]) -> str:
    """What the newest pod that ended said."""
    newest = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True)
    return next((text for pod in newest if (text := termination_message(pod).strip())), "")


def _running(
    question: Question[Answer], job: Object, pods: tuple[Object, ...], wanted: Inquiry, now: datetime
) -> Found[Answer]:
    """While attempts are left: what went wrong so far is told, and nothing else is done. Job, pod and container do not
    end at the same moment, so the container's end is what counts.
    """
    words = last_words(pods)
    if words and question.parse(words) is None:
        return Found(wanted, failed=words)
    if words:
        return Found(wanted)
    trouble = worst_trouble(pods, now)
    if trouble is not None or pods:
        return Found(wanted, trouble=trouble, again_after=None if trouble else recheck_after(pods, now))
    age = (now - datetime.fromisoformat(job["metadata"]["creationTimestamp"])).total_seconds()
    if age < PATIENCE_SECONDS:
        return Found(wanted, again_after=PATIENCE_SECONDS - age)
    text = f"Job {wanted.name} gets no pod; its events say why (quota, limit range, policies, no such ServiceAccount)"
    return Found(wanted, trouble=Trouble(Reason.PODS_MISSING, text))


def _trouble_of(pods: tuple[Object, ...], now: datetime) -> str:
    trouble = worst_trouble(pods, now)
    return trouble.message if trouble else ""
