"""A Job that is asked one thing, and the record of its answer: what inspections and storage checks have in common.

The Job's pod leaves its answer as its termination message. The answer is kept in a ConfigMap under the Job's name, so
that the Job can go. What is asked is part of the name: another question has another Job and another record, and the old
ones are deleted. Deleting a record by hand asks anew.
"""

from collections.abc import Callable
from typing import Any

from speccache_api import names
from speccache_operator.children.answer import Answer, Built
from speccache_operator.children.context import BuildContext, Inquiry
from speccache_operator.children.meta import metadata
from speccache_operator.kinds import CONFIG_MAP, JOB

ATTEMPTS = 4
DEADLINE_SECONDS = 3600
"""Covers slow volumes and image pulls; the Job is tried again later anyway."""


def job(ctx: BuildContext, inquiry: Inquiry | None, component: str, pod: Callable[[], dict[str, Any]]) -> Built:
    """Wanted until the answer is recorded. `pod` makes the pod's spec."""
    if inquiry is None or not inquiry.running:
        return Answer.ABSENT
    labels = names.object_labels(ctx.resource.name, component)
    return {
        "apiVersion": JOB.api_version,
        "kind": JOB.name,
        "metadata": metadata(ctx, inquiry.name, component),
        "spec": {
            "backoffLimit": ATTEMPTS - 1,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": {**pod(), "restartPolicy": "Never"}},
        },
    }


def record(ctx: BuildContext, inquiry: Inquiry | None, component: str, key: str) -> Built:
    """Wanted once there is an answer, which it keeps under `key`."""
    if inquiry is None or inquiry.result is None:
        return Answer.ABSENT
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.name,
        "metadata": metadata(ctx, inquiry.name, component),
        "data": {key: inquiry.result},
    }
