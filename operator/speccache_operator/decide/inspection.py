"""The aspect ModelInspected: are the facts of both models known, from where, and what is to be done to learn them.

a model's claim does not exist                              say so; pods could not start, whatever else is known
facts in the resource or in the table of built-in models    known, nothing to do
else                                                        an inquiry (inquiry.py)
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
from speccache_operator.children.context import Inquiry, RuntimeImage
from speccache_operator.children.inspection_record import RECORD_KEY
from speccache_operator.children.mounts import ModelMount, model_mounts
from speccache_operator.decide import inquiry
from speccache_operator.decide.conditions import MODEL_INSPECTED, Condition, Reason, Status
from speccache_operator.observe.observed import Observed

RETRY_SECONDS = 600.0
"""Pause before a failed inspection is tried again: the files may have been put in place meanwhile."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer: facts or None, the condition, the inspection to run or keep, and when to look again by itself."""

    condition: Condition
    inspection: Inspection | None = None
    wanted: Inquiry | None = None
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
    question = inquiry.Question(resource.namespace, name, names.COMPONENT_INSPECTION, RECORD_KEY, _parse, RETRY_SECONDS)
    recorded = inquiry.recorded(question, observed)
    missing = [mount for mount in model_mounts(resource.spec) if mount.claim not in observed.claims]
    if missing:
        text = _told(missing, resource.namespace)
        kept = recorded.wanted if recorded is not None else None
        return Finding(_condition("False", Reason.MODEL_CLAIM_NOT_FOUND, text), wanted=kept)
    known = known_inspection(resource.spec)
    if known is not None:
        declared = known.target.declared or (known.draft is not None and known.draft.declared)
        if declared:
            return Finding(_true(Reason.GEOMETRY_DECLARED, "sizes follow kvGeometry as declared"), known)
        return Finding(_true(Reason.BUILT_IN, "the built-in model is known"), known)
    found = inquiry.look(question, observed, now)
    return Finding(_of_inquiry(found, name), found.answer, found.wanted, found.again_after)


def _told(missing: Sequence[ModelMount], namespace: str) -> str:
    return "; ".join(
        f"{mount.field}: claim {mount.claim} does not exist in namespace {namespace}; create it, or name another one"
        for mount in missing
    )


def _of_inquiry(found: inquiry.Found[Inspection], name: str) -> Condition:
    if found.answer is not None:
        return _true(Reason.INSPECTED, "model files were read")
    if found.unreadable:
        return _condition("False", Reason.INSPECTION_FAILED, f"Job {name} left no readable result: {found.failed}")
    if found.failed is not None:
        text = (
            f"the models cannot be read: {found.failed}; put it right (spec.model.uri,"
            f" spec.speculative.draftModel.uri), then delete Job {name} to try at once"
        )
        return _condition("False", Reason.INSPECTION_FAILED, text)
    if found.trouble is not None:
        return _condition("False", found.trouble.reason, f"inspection: {found.trouble.message}")
    text = f"Job {name} is reading the model files" if found.begun else f"Job {name} will read the model files"
    return _condition("Unknown", Reason.INSPECTION_RUNNING, text)


def _parse(text: str) -> Inspection | None:
    try:
        return Inspection.from_json(text)
    except BadInspection:
        return None


def _condition(status: Status, reason: Reason, message: str) -> Condition:
    return Condition(MODEL_INSPECTED, status, reason, message)


def _true(reason: Reason, message: str) -> Condition:
    return _condition("True", reason, message)
