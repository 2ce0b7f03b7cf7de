"""Removing from buckets what deleted resources left there with retention Delete: what decide/removal says, done."""

import logging
from datetime import datetime

from speccache_api import names
from speccache_operator.act.events import EventNote, event_object
from speccache_operator.children import storage_removal
from speccache_operator.children.context import RuntimeImage
from speccache_operator.cluster import Cluster
from speccache_operator.decide.removal import (
    ATTEMPTS_KEY,
    COUNTED_KEY,
    FAILURE_KEY,
    Decision,
    Do,
    decide,
    failed_attempts,
)
from speccache_operator.errors import ApiError, ClusterError
from speccache_operator.kinds import CONFIG_MAP, JOB, POD, Key, Object, Ref
from speccache_operator.logs import fields

logger = logging.getLogger(__name__)

REFUSED_SECONDS = 120.0
"""Pause after the API server refused a step."""


async def remove_left_behind(
    cluster: Cluster, key: Key, uid: str | None, image: RuntimeImage, instance: str, now: datetime
) -> float | None:
    """One step for each record of a resource `key` that is gone; `uid` is that of the one which has its name now.

    Answers the seconds until the next step, None when an event will tell. Raises Unavailable as the cluster does.
    """
    labels = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_INSTANCE: key.name}
    ours = {**labels, names.LABEL_COMPONENT: names.COMPONENT_STORAGE_REMOVAL}
    records = await cluster.list(CONFIG_MAP, key.namespace, ours)
    left = [record for record in records if record["metadata"]["labels"].get(names.LABEL_RESOURCE_UID) != uid]
    if not left:
        return None
    jobs = {Ref.of(job).name: job for job in await cluster.list(JOB, key.namespace, ours)}
    pods = await cluster.list(POD, key.namespace, labels)  # after their owners, as in observe/look
    wishes: list[float | None] = []
    for record in left:
        job = jobs.get(record["metadata"]["name"])
        owned = tuple(pod for pod in pods if job is not None and _owner(pod) == job["metadata"]["uid"])
        uids = [pod["metadata"]["labels"].get(names.LABEL_RESOURCE_UID) for pod in pods]
        serving = record["metadata"]["labels"].get(names.LABEL_RESOURCE_UID) in uids
        decision = decide(record, job, owned, serving=serving, now=now)
        try:
            await _carry_out(cluster, decision, record, job, image)
        except ApiError as error:  # a quota, a namespace that ends: no reason to leave the successor alone
            logger.warning("cannot go on removing", extra=fields(key=str(key), error=str(error)))
            wishes.append(REFUSED_SECONDS)
            continue
        if decision.text:
            await _tell(cluster, decision, record, instance, now)
        wishes.append(decision.again_after)
    return min((wish for wish in wishes if wish is not None), default=None)


async def _carry_out(
    cluster: Cluster, decision: Decision, record: Object, job: Object | None, image: RuntimeImage
) -> None:
    ref, uid = Ref.of(record), record["metadata"]["uid"]
    removal = storage_removal.Removal.of(record)
    if decision.do is Do.START and removal is not None:
        await cluster.apply(storage_removal.job(record, removal, image))
    elif decision.do is Do.COUNT and job is not None:
        counted = {
            ATTEMPTS_KEY: str(failed_attempts(record) + 1),
            COUNTED_KEY: job["metadata"]["uid"],
            FAILURE_KEY: decision.text,
        }
        await cluster.merge(ref, {"metadata": {"uid": uid}, "data": counted})
    elif decision.do is Do.RETRY and job is not None:
        await cluster.delete(Ref.of(job), job["metadata"]["uid"])
    elif decision.do is Do.FORGET:
        await cluster.delete(ref, uid)


async def _tell(cluster: Cluster, decision: Decision, record: Object, instance: str, now: datetime) -> None:
    """In the log, and as an event of the record. One that cannot be posted is not worth a second pass."""
    failed = decision.do is Do.COUNT
    note = EventNote(failed, "StorageNotRemoved" if failed else "StorageRemoved", decision.text[:1000])
    level = logging.WARNING if failed else logging.INFO
    name, namespace = record["metadata"]["name"], record["metadata"]["namespace"]
    logger.log(level, "event", extra=fields(key=f"{namespace}/{name}", reason=note.reason, text=note.message))
    try:
        await cluster.create(event_object(record, note, instance, now))
    except ClusterError as error:
        logger.warning("cannot post an event", extra=fields(key=f"{namespace}/{name}", error=str(error)))


def _owner(pod: Object) -> str | None:
    owners = pod["metadata"].get("ownerReferences", ())
    return next((str(ref["uid"]) for ref in owners if ref.get("controller")), None)
