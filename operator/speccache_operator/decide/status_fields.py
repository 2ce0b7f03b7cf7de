"""The fields of `status` beside its conditions: what is served, how many pods there are, what a pod's memory is."""

from typing import Any

from speccache_api import names
from speccache_api.fingerprint import fingerprint
from speccache_api.geometry import Inspection
from speccache_api.quantity import format_bytes
from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import kv_dtype
from speccache_api.status import summary
from speccache_operator.children import workload
from speccache_operator.decide import memory
from speccache_operator.kinds import Object


def of(
    resource: SpecCacheDeployment, found: Inspection | None, sized: memory.Finding | None, live: Object | None
) -> dict[str, Any]:
    """All facts that are known. `live` is the workload. Pure."""
    selector = ",".join(f"{key}={value}" for key, value in names.selector_labels(resource.name).items())
    facts: dict[str, Any] = {**counts(live), **summary(resource), "selector": selector}
    if sized is not None and sized.memory is not None:
        facts["memory"] = sized.memory.to_status()
        if sized.limit is not None:
            facts["memory"]["limit"] = format_bytes(sized.limit)
    stored_under = fingerprint_of(resource, found)
    if stored_under is not None:
        facts["fingerprint"] = stored_under
    return facts


def fingerprint_of(resource: SpecCacheDeployment, found: Inspection | None) -> str | None:
    """What the model's pages lie below in storage; None while nobody has read the model."""
    if found is None or found.target.declared:
        return None
    return fingerprint(found.target.identity, kv_dtype(resource.spec), resource.spec.kv_cache.page_size)


def counts(live: Object | None) -> dict[str, int]:
    """Pods of the workload `live`, as its controller says; 0 without one."""
    pods = workload.count(live)
    return {"replicas": pods.exist, "readyReplicas": pods.ready}
