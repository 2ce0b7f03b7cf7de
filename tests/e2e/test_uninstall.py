"""Everything is taken off, in an order that nobody recommends; what is left is what was asked to be kept."""

import time

from stage import release
from stage.inventory import inventory
from stage.kube import SCD
from stage.objects import holds

from speccache_api import names

AUTOMATIC = ("ConfigMap.v1 {}/kube-root-ca.crt", "ServiceAccount.v1 {}/default", "Namespace.v1 {}")
"""What Kubernetes puts into every namespace."""


def test_nothing_is_left_behind(stage, tiny):
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    _apply_kept(stage)
    claim = kubectl.must_get("pvc", "kept-kv", namespace)
    for other in (item["metadata"]["name"] for item in kubectl.list("pvc", namespace)):
        if other not in ("kept-kv", "tiny-kv"):
            kubectl.delete("pvc", other, namespace)  # of other tests, which named it themselves

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


def _apply_kept(stage) -> None:
    """A resource whose claim is to be kept (the default); it has no pods."""
    storage = {"persistentVolumeClaim": {"size": "64Mi"}}
    spec = {
        "model": {"uri": "builtin://tiny"},
        "kvCache": {"device": {"tokens": 1024}, "host": {"tokens": 1024}, "storage": storage},
        "replicas": 0,
    }
    obj = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": "kept"}, "spec": spec}
    stage.venue.kubectl.apply(obj, stage.namespace)
    stage.venue.kubectl.until(
        SCD,
        "kept",
        lambda found: holds(found, "StorageReady"),
        namespace=stage.namespace,
        seconds=30,
        what="provided with a claim",
    )


def _left(stage, expected: set[str], seconds: float = 90) -> set[str]:
    """What is there now and was not before; waits for garbage collection until it is `expected`."""
    deadline = time.monotonic() + seconds
    while (left := set(inventory(stage.venue.kubectl) - stage.before)) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    missing = stage.before - inventory(stage.venue.kubectl)
    assert not missing
    return left
