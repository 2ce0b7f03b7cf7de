"""The operator is killed where it hurts, and gone when it is missed."""

import json

import pytest

from speccache_api import names
from speccache_tools.stage import release, serving
from speccache_tools.stage.kube import SCD
from speccache_tools.stage.manifests import resource
from speccache_tools.stage.objects import holds


@pytest.fixture
def idle(stage):
    """A resource without pods: everything but what takes time."""
    storage = {"persistentVolumeClaim": {"size": "64Mi"}, "retention": "Delete"}
    with stage.applied(resource("idle", kvCache={"storage": storage}, replicas=0)):
        stage.until("idle", lambda obj: holds(obj, "StorageReady"), "provided with a claim")
        yield "idle"


def test_a_rollout_ends_well_when_its_operator_is_killed_in_the_middle(stage, tiny):
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    (operator,) = release.operator_pods(stage.venue)
    before = kubectl.must_get("deployment", "tiny", namespace)["metadata"]["generation"]
    kubectl.patch(SCD, "tiny", namespace, {"spec": {"speculative": {"numSteps": 5, "numDraftTokens": 6}}})
    kubectl.until(
        "deployment",
        "tiny",
        lambda found: found["metadata"]["generation"] > before,
        namespace=namespace,
        seconds=30,
        what="given the new template",
    )
    name = operator["metadata"]["name"]
    kubectl("delete", "pod", name, "--grace-period=0", "--force", namespace=release.NAMESPACE)
    stage.settled("tiny")
    (successor,) = release.operator_pods(stage.venue)
    assert successor["metadata"]["uid"] != operator["metadata"]["uid"]
    wire = json.loads(kubectl.must_get("configmap", "tiny-wire", namespace)["data"][names.WIRE_KEY])
    assert wire["speculative"]["numSteps"] == 5
    template = kubectl.must_get("deployment", "tiny", namespace)["spec"]["template"]
    pod = serving.pod_of(stage.venue, namespace, "tiny")
    assert pod["metadata"]["annotations"] == template["metadata"]["annotations"]


def test_a_resource_can_be_deleted_while_no_operator_runs(stage, idle):
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    deployment = f"deployment/{release.DEPLOYMENT}"
    kubectl("scale", deployment, "--replicas=0", namespace=release.NAMESPACE)
    kubectl("wait", "--for=delete", "pod", f"--selector={release.OPERATOR_PODS}", namespace=release.NAMESPACE)
    try:
        kubectl.delete(SCD, idle, namespace)
        for kind, name in (
            ("deployment", idle),
            ("service", idle),
            ("service", f"{idle}-pods"),
            ("configmap", f"{idle}-wire"),
            ("serviceaccount", f"{idle}-runtime"),
            ("pvc", f"{idle}-kv"),
        ):
            kubectl.until_gone(kind, name, namespace, seconds=30)
    finally:
        kubectl("scale", deployment, "--replicas=1", namespace=release.NAMESPACE)
        kubectl("rollout", "status", deployment, namespace=release.NAMESPACE)
