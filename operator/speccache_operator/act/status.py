"""The one writer of `status`. Equal means no write, so an unchanged resource has an unchanged resourceVersion."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from speccache_operator.cluster import Cluster
from speccache_operator.decide.conditions import Condition
from speccache_operator.kinds import RESOURCE, Object


def make_status(
    raw: Object, conditions: Sequence[Condition], facts: Mapping[str, Any], now: datetime
) -> dict[str, Any]:
    """The whole new status of the resource `raw`. A condition keeps its transition time with its status."""
    generation = raw["metadata"]["generation"]
    before = previous(raw)
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    entries = []
    for condition in conditions:
        old = before.get(condition.type, {})
        same = old.get("status") == condition.status
        entries.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason.value,
                "message": condition.message,
                "lastTransitionTime": old.get("lastTransitionTime", stamp) if same else stamp,
                # `kubectl wait` goes by it: what serves an earlier configuration is not what was asked for last.
                "observedGeneration": old.get("observedGeneration", generation) if condition.earlier else generation,
            }
        )
    return {"observedGeneration": generation, "conditions": entries, **facts}


def previous(raw: Object) -> dict[str, Mapping[str, Any]]:
    """The conditions that the resource has now, by type."""
    return {condition["type"]: condition for condition in (raw.get("status") or {}).get("conditions", ())}


async def write(cluster: Cluster, raw: Object, status: Mapping[str, Any]) -> Object | None:
    """Write the status unless it is there already; answers the resource after the write, None when there was none.

    The uid keeps it from a resource that was deleted and made anew meanwhile: that is a Conflict.
    """
    if raw.get("status") == status:
        return None
    meta = {key: raw["metadata"][key] for key in ("name", "namespace", "uid")}
    body = {"apiVersion": RESOURCE.api_version, "kind": RESOURCE.name, "metadata": meta, "status": status}
    return await cluster.apply(body, subresource="status")
