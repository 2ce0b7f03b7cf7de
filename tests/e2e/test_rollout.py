"""A change replaces the only pod, and clients do not notice: the new one serves before the old one ends."""

import threading

import pytest

from speccache_api import names
from speccache_runtime.bench.client import complete
from speccache_tools.stage import reach, release, serving
from speccache_tools.stage.kube import SCD
from speccache_tools.stage.manifests import resource


@pytest.fixture
def steady(stage):
    """One replica, with a volume that only one node can reach."""
    storage = {"persistentVolumeClaim": {"size": "64Mi"}, "retention": "Delete"}
    with stage.applied(resource("steady", kvCache={"storage": storage})):
        stage.settled("steady")
        yield "steady"


class _Client(threading.Thread):
    """Asks again and again, each time by a new connection, until it is told to stop."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__()
        self.url, self.model = url, model
        self.stopping = threading.Event()
        self.answers = 0
        self.errors: list[str] = []

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                complete(self.url, self.model, "def main():", 4)
                self.answers += 1
            except Exception as error:  # noqa: BLE001 - whatever a client can see counts
                self.errors.append(repr(error))

    def stop(self) -> None:
        self.stopping.set()
        self.join()


def test_a_change_with_one_replica_interrupts_nobody(stage, steady):
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    strategy = kubectl.must_get("deployment", steady, namespace)["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    old = serving.pod_of(stage.venue, namespace, steady)
    with reach.service(stage.venue, namespace, steady) as url:
        client = _Client(url, steady)
        client.start()
        try:
            kubectl.patch(SCD, steady, namespace, {"spec": {"kvCache": {"host": {"tokens": 4096}}}})
            stage.settled(steady)
            kubectl.until_gone("pod", old["metadata"]["name"], namespace, seconds=120)
        finally:
            client.stop()
    new = serving.pod_of(stage.venue, namespace, steady)
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    stage.note(f"a change with one replica: {client.answers} answers meanwhile, {len(client.errors)} errors")
    assert client.errors == []
    assert client.answers > 10


def test_scaled_to_zero_and_back(stage, steady):
    """By the subresource, as `kubectl scale` and autoscalers do; the resource gives no number of replicas."""
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    assert "replicas" not in kubectl.must_get(SCD, steady, namespace)["spec"]
    old = serving.pod_of(stage.venue, namespace, steady)
    kubectl("scale", SCD, steady, "--replicas=0", namespace=namespace)
    kubectl.until_gone("pod", old["metadata"]["name"], namespace, seconds=120)
    assert serving.pods_of(stage.venue, namespace, steady) == []
    kubectl("scale", SCD, steady, "--replicas=1", namespace=namespace)
    stage.settled(steady)


def test_the_stateful_set_of_an_earlier_operator_is_replaced_without_a_gap(stage, steady):
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    live = kubectl.must_get("deployment", steady, namespace)
    operator = f"deployment/{release.DEPLOYMENT}"
    kubectl("scale", operator, "--replicas=0", namespace=release.NAMESPACE)
    kubectl("wait", "--for=delete", "pod", f"--selector={release.OPERATOR_PODS}", namespace=release.NAMESPACE)
    try:
        kubectl("delete", "deployment", steady, "--cascade=foreground", namespace=namespace)
        kubectl.apply(_stateful_set(live), namespace)
        first = serving.wait_pod(stage.venue, namespace, steady)
        assert first["metadata"]["name"] == f"{steady}-0"
        with reach.service(stage.venue, namespace, steady) as url:
            client = _Client(url, steady)
            client.start()
            try:
                kubectl("scale", operator, "--replicas=1", namespace=release.NAMESPACE)
                kubectl.until_gone("statefulset", steady, namespace, seconds=120)
                kubectl.until_gone("pod", f"{steady}-0", namespace, seconds=120)
            finally:
                client.stop()
        stage.settled(steady)
        stage.note(f"a StatefulSet replaced: {client.answers} answers meanwhile, {len(client.errors)} errors")
        assert client.errors == []
    finally:
        kubectl("scale", operator, "--replicas=1", namespace=release.NAMESPACE)
        kubectl("rollout", "status", operator, namespace=release.NAMESPACE)


def _stateful_set(deployment):
    """What an earlier operator made of the same resource."""
    meta = {key: deployment["metadata"][key] for key in ("name", "labels", "ownerReferences")}
    template = deployment["spec"]["template"]
    labels = {key: value for key, value in template["metadata"]["labels"].items() if key != names.LABEL_RESOURCE_UID}
    template = {**template, "metadata": {**template["metadata"], "labels": labels}}
    spec = {"serviceName": f"{meta['name']}-pods", "selector": deployment["spec"]["selector"], "template": template}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": spec}
