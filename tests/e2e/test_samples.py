"""Every sample as a user applies it: with strict validation, on a cluster that may not have what it asks for."""

import pytest

from speccache_tools.cluster.settings import REPOSITORY
from speccache_tools.stage.kube import SCD
from speccache_tools.stage.manifests import claim
from speccache_tools.stage.objects import conditions, has_reason

SAMPLES = sorted((REPOSITORY / "samples").glob("*.yaml"))
GEOMETRY = {"layers": 32, "kvHeads": 8, "headDim": 128, "parameters": 8_030_261_248}
DRAFT_GEOMETRY = {"layers": 1, "kvHeads": 8, "headDim": 128, "parameters": 500_000_000}


def _lacks_a_gpu(obj) -> bool:
    """For a moment the pods wait for their claims' volumes instead, which is no node either."""
    return (
        has_reason(obj, "Ready", "False", "Unschedulable") and "nvidia.com/gpu" in conditions(obj)["Ready"]["message"]
    )


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_the_api_server_accepts_the_sample(stage, path):
    command = ("apply", "--dry-run=server", "--validate=strict", f"--filename={path}")
    stage.venue.kubectl(*command, namespace="default")  # where nothing of that name is; a dry run leaves nothing


def test_the_gpu_sample_says_what_is_missing(stage, sample):
    """First its volumes, then a node with a GPU; a pod that no node takes is told in the condition Ready."""
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    if "nvidia.com/gpu" in kubectl("get", "nodes", "--output=jsonpath={.items[*].status.allocatable}"):
        pytest.fail("this test needs a cluster without GPUs")

    def told(kind: str, reason: str) -> str:
        message: str = conditions(stage.refused("llama-8b", kind, reason))[kind]["message"]
        return message

    claims = [claim(name, "ReadWriteMany") for name in ("models", "kv")]
    with stage.applied(sample("llama-8b-gpu.yaml")):
        assert "claim models does not exist" in told("ModelInspected", "ModelClaimNotFound")
        assert "claim kv does not exist" in told("StorageReady", "ClaimNotFound")
        with stage.applied(*claims):
            # The weights are not here either: with their shape declared nobody has to read them.
            draft = {"draftModel": {"kvGeometry": DRAFT_GEOMETRY}}
            declared = {"model": {"kvGeometry": GEOMETRY}, "speculative": draft}
            kubectl.patch(SCD, "llama-8b", namespace, {"spec": declared})
            found = stage.until("llama-8b", _lacks_a_gpu, "told to lack a GPU")
            stage.note(f"GPU sample without a GPU: {conditions(found)['Ready']['message']}")
            kubectl.delete(SCD, "llama-8b", namespace)  # before the claims that its pods name
