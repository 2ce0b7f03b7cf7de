"""States that no retry mends: told in one condition with the field and the remedy, before any pod exists."""

from speccache_tools.stage.manifests import claim, resource
from speccache_tools.stage.objects import conditions, has_reason, holds


def test_more_memory_than_any_node_has(stage):
    with stage.applied(resource("huge", kvCache={"host": {"size": "100Ti"}})):
        huge = stage.refused("huge", "MemorySized", "ExceedsNodeAllocatable")
        message = conditions(huge)["MemorySized"]["message"]
        stage.note(f"more than any node has: {message}")
        assert "spec.kvCache.host" in message
        assert conditions(huge)["Ready"]["reason"] == "ExceedsNodeAllocatable"
        assert stage.venue.kubectl.get("deployment", "huge", stage.namespace) is None
        assert stage.pods("huge") == []


def test_a_claim_that_is_missing_and_then_made(stage):
    storage = {"persistentVolumeClaim": {"claimName": "late-claim"}}
    with stage.applied(resource("late", kvCache={"storage": storage}, replicas=0)):
        late = stage.refused("late", "StorageReady", "ClaimNotFound")
        assert "claimName" in conditions(late)["StorageReady"]["message"]
        assert stage.venue.kubectl.get("deployment", "late", stage.namespace) is None

        def is_mended(obj) -> bool:
            return holds(obj, "StorageReady") and has_reason(obj, "Ready", "False", "ScaledToZero")

        with stage.applied(claim("late-claim")):
            stage.until("late", is_mended, "mended by the claim")
