"""States that no retry mends: told in one condition with the field and the remedy, before any pod exists."""

from stage.kube import SCD, Object
from stage.objects import conditions, has_reason, holds

from speccache_api import names


def _resource(name: str, kv_cache: dict) -> dict:
    spec = {"model": {"uri": "builtin://tiny"}, "kvCache": {"device": {"tokens": 1024}, **kv_cache}}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}


def _until(stage, name: str, kind: str, reason: str) -> Object:
    return stage.venue.kubectl.until(
        SCD,
        name,
        lambda obj: has_reason(obj, kind, "False", reason),
        namespace=stage.namespace,
        seconds=30,
        what=f"{kind}=False {reason}",
    )


def test_more_memory_than_any_node_has(stage):
    stage.venue.kubectl.apply(_resource("huge", {"host": {"size": "100Ti"}}), stage.namespace)
    huge = _until(stage, "huge", "MemorySized", "ExceedsNodeAllocatable")
    message = conditions(huge)["MemorySized"]["message"]
    stage.note(f"more than any node has: {message}")
    assert "spec.kvCache.host" in message
    assert conditions(huge)["Ready"]["reason"] == "ExceedsNodeAllocatable"
    assert stage.venue.kubectl.get("statefulset", "huge", stage.namespace) is None
    selector = ",".join(f"{key}={value}" for key, value in names.selector_labels("huge").items())
    assert stage.venue.kubectl.list("pods", stage.namespace, selector) == []
    stage.venue.kubectl.delete(SCD, "huge", stage.namespace)


def test_a_claim_that_is_missing_and_then_made(stage):
    storage = {"persistentVolumeClaim": {"claimName": "late-claim"}}
    resource = _resource("late", {"host": {"tokens": 1024}, "storage": storage})
    resource["spec"]["replicas"] = 0
    stage.venue.kubectl.apply(resource, stage.namespace)
    late = _until(stage, "late", "StorageReady", "ClaimNotFound")
    assert "claimName" in conditions(late)["StorageReady"]["message"]
    assert stage.venue.kubectl.get("statefulset", "late", stage.namespace) is None
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "late-claim"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Mi"}}},
    }
    stage.venue.kubectl.apply(claim, stage.namespace)
    stage.venue.kubectl.until(
        SCD,
        "late",
        lambda obj: holds(obj, "StorageReady") and has_reason(obj, "Ready", "False", "ScaledToZero"),
        namespace=stage.namespace,
        seconds=30,
        what="mended by the claim",
    )
    stage.venue.kubectl.delete(SCD, "late", stage.namespace)
    stage.venue.kubectl.delete("pvc", "late-claim", stage.namespace)
