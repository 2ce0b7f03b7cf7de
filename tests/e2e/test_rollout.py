"""A change replaces the only pod, and clients do not notice: the new one serves before the old one ends."""

import threading

import pytest

from speccache_runtime.bench.client import complete
from speccache_tools.stage import reach, serving
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
