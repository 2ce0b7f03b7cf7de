"""Every sample as a user applies it: with strict validation, on a cluster that may not have what it asks for."""

import pytest
from stage.kube import SCD
from stage.objects import conditions, has_reason
from stage.venue import REPOSITORY

SAMPLES = sorted((REPOSITORY / "samples").glob("*.yaml"))
GPU_SAMPLE = "llama-8b-gpu.yaml"
GEOMETRY = {"layers": 32, "kvHeads": 8, "headDim": 128, "parameters": 8_030_261_248}
DRAFT_GEOMETRY = {"layers": 1, "kvHeads": 8, "headDim": 128, "parameters": 500_000_000}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_the_api_server_accepts_the_sample(stage, path):
    stage.venue.kubectl(
        "apply", "--dry-run=server", "--validate=strict", f"--filename={path}", namespace=stage.namespace
    )


def test_the_gpu_sample_says_what_is_missing(stage):
    """First its volumes, then a node with a GPU; a pod that no node takes is told in the condition Ready."""
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    if "nvidia.com/gpu" in kubectl("get", "nodes", "--output=jsonpath={.items[*].status.allocatable}"):
        pytest.fail("this test needs a cluster without GPUs")
    stage.apply_sample(GPU_SAMPLE)

    def tells(kind: str, reason: str) -> str:
        found = kubectl.until(
            SCD,
            "llama-8b",
            lambda obj: has_reason(obj, kind, "False", reason),
            namespace=namespace,
            seconds=30,
            what=f"{kind}=False {reason}",
        )
        message: str = conditions(found)[kind]["message"]
        return message

    assert "claim models does not exist" in tells("ModelInspected", "ModelClaimNotFound")
    assert "claim kv does not exist" in tells("StorageReady", "ClaimNotFound")
    for name in ("models", "kv"):
        kubectl.apply(_claim(name), namespace)
    # The weights are not here either: with their shape declared nobody has to read them.
    declared = {"model": {"kvGeometry": GEOMETRY}, "speculative": {"draftModel": {"kvGeometry": DRAFT_GEOMETRY}}}
    kubectl.patch(SCD, "llama-8b", namespace, {"spec": declared})
    message = tells("Ready", "Unschedulable")
    stage.note(f"GPU sample without a GPU: {message}")
    assert "nvidia.com/gpu" in message
    kubectl.delete(SCD, "llama-8b", namespace)


def _claim(name: str) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "64Mi"}}},
    }
