"""The aspect ModelInspected: are the facts of both models known, from where, and what is to be done to learn them.

Level-based: every state of record, Job and its pods has one answer, however it came about.

    a model's claim does not exist                              say so; pods could not start, whatever else is known
    facts in the resource or in the table of built-in models    known, nothing to do
    a readable record                                           known; the Job is no longer wanted
    the Job ended well and its message is readable              known; record it, keep the Job until the record is seen
    no Job                                                      make one
    the Job runs                                                wait, and say what troubles its pod
    the Job failed                                              say why; after RETRY_SECONDS it is removed, so made anew
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from speccache_api import names
from speccache_api.geometry import BadInspection, Inspection
from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import known_inspection
from speccache_operator.children.context import InspectionJob, RuntimeImage
from speccache_operator.children.inspection_record import RECORD_KEY
from speccache_operator.children.mounts import ModelMount, model_mounts
from speccache_operator.decide.conditions import MODEL_INSPECTED, Condition, Reason, Status
from speccache_operator.decide.pod_trouble import recheck_after, termination_message, worst_trouble
from speccache_operator.kinds import CONFIG_MAP, JOB, Object, Ref
from speccache_operator.observe.observed import Observed

PATIENCE_SECONDS = 15.0
"""A Job that has no pod after this time is being refused one."""

RETRY_SECONDS = 600.0
"""Pause before a failed inspection is tried again: the files may have been put in place meanwhile."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer: facts or None, the condition, the inspection to run or keep, and when to look again by itself."""

    condition: Condition
    inspection: Inspection | None = None
    wanted: InspectionJob | None = None
    again_after: float | None = None


def job_name(resource: SpecCacheDeployment, image: RuntimeImage) -> str:
    """The name of Job and record: it covers both models and the image that reads them."""
    spec = resource.spec
    subject = [spec.model.uri, [spec.algorithm, spec.draft.uri] if spec.draft else None, image.name]
    digest = hashlib.sha256(json.dumps(subject).encode()).hexdigest()
    return names.inspection_job_name(resource.name, digest)


def look(resource: SpecCacheDeployment, observed: Observed, image: RuntimeImage, now: datetime) -> Finding:
    """The state of the inspection. Pure."""
    name = job_name(resource, image)
    recorded = _recorded(observed.at(Ref(CONFIG_MAP, resource.namespace, name)))
    kept = InspectionJob(name, recorded.to_json(), running=False) if recorded is not None else None
    missing = [mount for mount in model_mounts(resource.spec) if mount.claim not in observed.claims]
    if missing:
        text = _told(missing, resource.namespace)
        return Finding(_condition("False", Reason.MODEL_CLAIM_NOT_FOUND, text), wanted=kept)
    known = known_inspection(resource.spec)
    if known is not None:
        declared = known.target.declared or (known.draft is not None and known.draft.declared)
        if declared:
            return Finding(_true(Reason.GEOMETRY_DECLARED, "sizes follow kvGeometry as declared"), known)
        return Finding(_true(Reason.BUILT_IN, "the built-in model is known"), known)
    if recorded is not None:
        return Finding(_true(Reason.INSPECTED, "model files were read"), recorded, kept)
    return _look_at_job(resource, observed, name, now)


def _told(missing: Sequence[ModelMount], namespace: str) -> str:
    return "; ".join(
        f"{mount.field}: claim {mount.claim} does not exist in namespace {namespace}; create it, or name another one"
        for mount in missing
    )


def _look_at_job(resource: SpecCacheDeployment, observed: Observed, name: str, now: datetime) -> Finding:
    wanted = InspectionJob(name)
    job = observed.at(Ref(JOB, resource.namespace, name))
    if job is None:
        return Finding(_unknown(f"Job {name} will read the model files"), wanted=wanted)
    pods = observed.pods_of(job, names.COMPONENT_INSPECTION)
    ended = _ended(job)
    if ended is None:
        return _running(job, pods, wanted, now)
    complete, when = ended
    if complete:
        for pod in pods:
            inspection = _parse(termination_message(pod))
            if inspection is not None:
                recording = InspectionJob(name, inspection.to_json())
                return Finding(_true(Reason.INSPECTED, "model files were read"), inspection, recording)
        text = f"Job {name} left no readable result: {_last_words(pods) or 'its pod is gone'}"
    else:
        text = _failure(name, pods, now)
    age = (now - when).total_seconds()
    if age >= RETRY_SECONDS:
        return Finding(_condition("False", Reason.INSPECTION_FAILED, text), again_after=1.0)
    return Finding(_condition("False", Reason.INSPECTION_FAILED, text), wanted=wanted, again_after=RETRY_SECONDS - age)


def _running(job: Object, pods: tuple[Object, ...], wanted: InspectionJob, now: datetime) -> Finding:
    """While attempts are left: what went wrong so far is told, and nothing else is done."""
    trouble = worst_trouble(pods, now)
    failed = job.get("status", {}).get("failed") or any(pod.get("status", {}).get("phase") == "Failed" for pod in pods)
    if failed and _last_words(pods):
        text = _failure(wanted.name, pods, now)
        return Finding(_condition("False", Reason.INSPECTION_FAILED, text), wanted=wanted)
    if trouble is not None:
        return Finding(_condition("False", trouble.reason, f"inspection: {trouble.message}"), wanted=wanted)
    text = f"Job {wanted.name} is reading the model files"
    if pods:
        return Finding(_unknown(text), wanted=wanted, again_after=recheck_after(pods, now))
    age = (now - datetime.fromisoformat(job["metadata"]["creationTimestamp"])).total_seconds()
    if age < PATIENCE_SECONDS:
        return Finding(_unknown(text), wanted=wanted, again_after=PATIENCE_SECONDS - age)
    text = f"Job {wanted.name} gets no pod; its events say why (quota, limit range, policies)"
    return Finding(_condition("False", Reason.PODS_MISSING, text), wanted=wanted)


def _failure(name: str, pods: tuple[Object, ...], now: datetime) -> str:
    trouble = worst_trouble(pods, now)
    said = _last_words(pods) or (trouble.message if trouble else "its pod is gone")
    return (
        f"the models cannot be read: {said}; put it right (spec.model.uri, spec.speculative.draftModel.uri), then"
        f" delete Job {name} to try at once"
    )


def _last_words(pods: tuple[Object, ...]) -> str:
    """What the newest pod that ended said."""
    newest = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True)
    return next((text for pod in newest if (text := termination_message(pod).strip())), "")


def _ended(job: Object) -> tuple[bool, datetime] | None:
    """(it succeeded, when) for a Job that will do nothing more; None for one that will."""
    for condition in job.get("status", {}).get("conditions", ()):
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            when = datetime.fromisoformat(condition["lastTransitionTime"])
            return condition["type"] == "Complete", when
    return None


def _recorded(record: Object | None) -> Inspection | None:
    """The result in a record. One that cannot be read counts as none: it is replaced by a new inspection's."""
    return _parse(record.get("data", {}).get(RECORD_KEY, "")) if record else None


def _parse(text: str) -> Inspection | None:
    try:
        return Inspection.from_json(text)
    except BadInspection:
        return None


def _condition(status: Status, reason: Reason, message: str) -> Condition:
    return Condition(MODEL_INSPECTED, status, reason, message)


def _true(reason: Reason, message: str) -> Condition:
    return _condition("True", reason, message)


def _unknown(message: str) -> Condition:
    return _condition("Unknown", Reason.INSPECTION_RUNNING, message)
