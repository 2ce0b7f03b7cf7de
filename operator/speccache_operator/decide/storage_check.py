"""The aspect StorageReady of a bucket: has a Job with the pods' identity used it, and if not, what is in its way?

The Job's answer is one line of JSON: `{"ok": true}`, or `{"ok": false, "code": CODE, "message": TEXT}` with a code of
the storage backend's and a text that names the remedy. Only a good answer is recorded; a bad one is asked again, by the
Job's own attempts and then by another Job, for as long as it takes.
"""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from speccache_api import names
from speccache_api.resource import SpecCacheDeployment
from speccache_api.storage_target import BucketTarget
from speccache_operator.children.context import Inquiry, RuntimeImage
from speccache_operator.children.storage_check_record import RECORD_KEY
from speccache_operator.decide import inquiry
from speccache_operator.decide.conditions import STORAGE_READY, Condition, Reason, head
from speccache_operator.observe.observed import Observed

RETRY_SECONDS = 60.0
"""Pause before a Job whose attempts are used up is made anew. The attempts themselves come after 10, 20 and 40 s."""

_REASONS = {
    "BucketNotFound": Reason.BUCKET_NOT_FOUND,
    "AccessDenied": Reason.ACCESS_DENIED,
    "NoCredentials": Reason.NO_CREDENTIALS,
    "CredentialsExpired": Reason.CREDENTIALS_EXPIRED,
    "EndpointUnreachable": Reason.ENDPOINT_UNREACHABLE,
    "TlsFailed": Reason.TLS_FAILED,
    "WrongRegion": Reason.WRONG_REGION,
    "ClockSkew": Reason.CLOCK_SKEW,
    "Timeout": Reason.STORAGE_TIMEOUT,
    "Unsupported": Reason.CONDITIONAL_PUT_UNSUPPORTED,
}
"""Of the backend's codes; every other one is StorageCheckFailed."""
_MOST_SAID = 700


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer: the condition, the check to run or keep, and when to look again by itself."""

    condition: Condition
    wanted: Inquiry | None
    again_after: float | None = None


def job_name(resource: SpecCacheDeployment, target: BucketTarget, image: RuntimeImage) -> str:
    """The name of Job and record: it covers the bucket, by which names it is reached, and the image that does."""
    digest = hashlib.sha256(json.dumps([target.to_json(), image.name]).encode()).hexdigest()
    return names.storage_check_name(resource.name, digest)


def look(
    resource: SpecCacheDeployment, target: BucketTarget, observed: Observed, image: RuntimeImage, now: datetime
) -> Finding:
    """The state of the check. Pure."""
    name = job_name(resource, target, image)
    question = inquiry.Question(
        resource.namespace, name, names.COMPONENT_STORAGE_CHECK, RECORD_KEY, _good, RETRY_SECONDS
    )
    found = inquiry.look(question, observed, now)
    return Finding(_condition(found, target, name), found.wanted, found.again_after)


def _condition(found: inquiry.Found[Literal[True]], target: BucketTarget, name: str) -> Condition:
    if found.answer:
        text = f"{target.url} could be listed, written, read and deleted from when it was checked"
        return Condition(STORAGE_READY, "True", Reason.BUCKET_READY, text)
    if found.failed is not None:
        reason, said = _told(found.failed)
        text = f"{target.url} cannot be used: {said}. It is tried again by itself; at once when Job {name} is deleted"
        return Condition(STORAGE_READY, "False", reason, text)
    if found.trouble is not None:
        return Condition(STORAGE_READY, "False", found.trouble.reason, f"storage check: {found.trouble.message}")
    text = f"Job {name} is trying {target.url}" if found.begun else f"Job {name} will try {target.url}"
    return Condition(STORAGE_READY, "Unknown", Reason.STORAGE_CHECK_RUNNING, text)


def _good(text: str) -> Literal[True] | None:
    return True if _fields(text).get("ok") is True else None


def _told(text: str) -> tuple[Reason, str]:
    """What a bad answer says; whatever else a pod leaves behind is told as it is."""
    fields = _fields(text)
    code, message = fields.get("code"), fields.get("message")
    if not isinstance(code, str) or not isinstance(message, str):
        return Reason.STORAGE_CHECK_FAILED, head(text, _MOST_SAID)
    return _REASONS.get(code, Reason.STORAGE_CHECK_FAILED), head(message, _MOST_SAID).rstrip(".")


def _fields(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
