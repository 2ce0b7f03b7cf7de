"""Everything is taken off, in an order that nobody recommends; what is left is what was asked to be kept."""

import time

from speccache_tools.stage import release
from speccache_tools.stage.inventory import inventory
from speccache_tools.stage.kube import SCD
from speccache_tools.stage.manifests import resource
from speccache_tools.stage.objects import holds

AUTOMATIC = ("ConfigMap.v1 {}/kube-root-ca.crt", "ServiceAccount.v1 {}/default", "Namespace.v1 {}")
"""What Kubernetes puts into every namespace."""


def test_nothing_is_left_behind(stage, tiny):
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    storage = {"persistentVolumeClaim": {"size": "64Mi"}}  # its retention is the default: Retain
    kubectl.apply(resource("kept", kvCache={"storage": storage}, replicas=0), namespace)
    stage.until("kept", lambda obj: holds(obj, "StorageReady"), "provided with a claim")
    claim = kubectl.must_get("pvc", "kept-kv", namespace)

    stage.venue.helm("uninstall", release.OPERATOR, f"--namespace={release.NAMESPACE}", "--wait")
    kubectl.delete(SCD, "tiny", namespace)  # with a pod that serves, and no operator
    stage.venue.helm("uninstall", release.CRDS, f"--namespace={release.NAMESPACE}", "--wait")  # and with it "kept"

    kept = {f"PersistentVolumeClaim.v1 {namespace}/kept-kv", f"PersistentVolume.v1 {claim['spec']['volumeName']}"}
    automatic = {name.format(ours) for ours in (namespace, release.NAMESPACE) for name in AUTOMATIC}
    assert _left(stage, kept | automatic) == kept | automatic
    assert kubectl.must_get("pvc", "kept-kv", namespace)["metadata"]["uid"] == claim["metadata"]["uid"]

    for ours in (namespace, release.NAMESPACE):
        kubectl.delete("namespace", ours)
    assert _left(stage, set()) == set()


def _left(stage, expected: set[str], seconds: float = 90) -> set[str]:
    """What is there now and was not before; waits for garbage collection until it is `expected`."""
    deadline = time.monotonic() + seconds
    while (left := set(inventory(stage.venue.kubectl) - stage.before)) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    return left
