"""The chart's RBAC is exactly what the operator does: nothing is refused, and no right is unused."""

import re
from datetime import UTC, datetime
from typing import Any

from speccache_api import names
from speccache_api.geometry import Inspection, KVGeometry, ModelFacts

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_PATH = re.compile(
    r"/apis?(?:/(?P<group>[^/]+\.[^/]+|apps|batch|policy))?/v[^/]+(?:/namespaces/[^/]+)?/(?P<plural>[a-z]+)(?P<rest>/.*)?$"
)
_FACTS = ModelFacts(KVGeometry.heads(2, 2, 64), 1000, 128, 256, 1024, "ab" * 32, "llama")


def _used(requests: set[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """(group, resource with subresource, verb) of each request that needs a right."""
    used = set()
    for method, path, query in requests:
        match = _PATH.fullmatch(path)
        if match is None:
            assert path in ("/version", "/api", "/apis") or re.fullmatch(r"/apis?/.*", path), path
            continue
        rest = (match["rest"] or "").split("/")[1:]
        resource = "/".join([match["plural"], *rest[1:]])
        reading = "get" if rest else "watch" if "watch=true" in query else "list"
        used.add((match["group"] or "", resource, _VERBS.get(method, reading)))
    return used


def _granted(objects: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for role in objects
        if role["kind"] in ("Role", "ClusterRole")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_rights_are_exactly_those_used(
    start: Any, proxy: Any, rendered: Any, manifest: Any, client: Any, namespace: str, wait: Any
) -> None:
    operator = start("rights", namespace, server=proxy.url)
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "volumeName": namespace}
    meta = {"name": "models", "namespace": namespace}
    client.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec})
    optional = {"podDisruptionBudget": {"maxUnavailable": 1}, "networkPolicy": {}}
    resource = manifest(model={"uri": "pvc://models/a"}, speculative={"algorithm": "None"}, **optional)
    resource["spec"]["kvCache"]["storage"] = {"persistentVolumeClaim": {"size": "1Gi"}}
    name = client.create(resource)["metadata"]["name"]
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_INSPECTION}"
    _inspect(client, namespace, wait(lambda: client.list("Job", namespace, selector))[0])
    _serve(client, namespace, name, wait(lambda: client.get("Deployment", namespace, name)))
    wait(lambda: client.get("StatefulSet", namespace, name) is None)
    # What is switched off is deleted.
    client.patch(names.KIND, namespace, name, {"spec": dict.fromkeys(optional)})
    wait(lambda: not any(client.get(kind, namespace, name) for kind in ("PodDisruptionBudget", "NetworkPolicy")))
    # Another model: its inspection makes the old record go, which is the only deletion of a ConfigMap.
    client.patch(names.KIND, namespace, name, {"spec": {"model": {"uri": "pvc://models/b"}}})
    wait(lambda: not client.list("ConfigMap", namespace, selector))
    assert operator.stop() == 0
    assert not [line for line in operator.lines if " 403 " in str(line) or "orbidden" in str(line)]
    used = _used(proxy.requests)
    # Server-side apply of a new object is a PATCH, for which the server also asks for `create`.
    created = {(group, kind, "create") for group, kind, verb in used if verb == "patch" and "/" not in kind}
    objects = rendered("rights", namespace, f"watchNamespace={namespace}")
    assert used | created == _granted(objects)


def test_all_namespaces_takes_the_same_rights_as_a_cluster_role(rendered: Any) -> None:
    one, every = rendered("a", "system", "watchNamespace=models"), rendered("a", "system")
    assert _granted(one) == _granted(every)
    (role,) = _roles_over("deployments", every)
    assert role["kind"] == "ClusterRole"
    (role,) = _roles_over("deployments", one)
    assert (role["kind"], role["metadata"]["namespace"]) == ("Role", "models")


def _roles_over(resource: str, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [obj for obj in objects if any(resource in rule["resources"] for rule in obj.get("rules", []))]


def test_the_operators_pod_is_admitted_where_the_restricted_standard_is_enforced(
    rendered: Any, client: Any, namespace: str
) -> None:
    """The namespaces of these tests enforce it; the served pods are made in them by other tests."""
    (deployment,) = [obj for obj in rendered("rights", namespace) if obj["kind"] == "Deployment"]
    pod = {"metadata": {"name": "operator"}, "spec": deployment["spec"]["template"]["spec"]}
    path = f"{client.path('Pod', namespace)}?dryRun=All"
    answer = client.http.post(path, json=pod)
    assert answer.status_code == 201, answer.text
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    assert "PodSecurity" in client.http.post(path, json=pod).text


def _serve(client: Any, namespace: str, name: str, live: dict[str, Any]) -> None:
    """Plays the Deployment's controller, beside a StatefulSet that an earlier operator made."""
    meta = {"name": name, "namespace": namespace, "ownerReferences": live["metadata"]["ownerReferences"]}
    spec = {"serviceName": name, **{key: live["spec"][key] for key in ("selector", "template")}}
    client.create({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": spec})
    counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), 1)
    status = {"observedGeneration": live["metadata"]["generation"], **counts}
    client.patch("Deployment", namespace, name, {"status": status}, subresource="status")


def _inspect(client: Any, namespace: str, job: dict[str, Any]) -> None:
    name, template = job["metadata"]["name"], job["spec"]["template"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"], "controller": True}
    meta = {"name": f"{name}-x", "namespace": namespace, "labels": template["metadata"]["labels"]}
    meta["ownerReferences"] = [owner]
    client.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]})
    ended = {"exitCode": 0, "reason": "Completed", "message": Inspection(target=_FACTS).to_json()}
    entry = {"name": "runtime", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    pod = {"phase": "Succeeded", "containerStatuses": [entry | {"state": {"terminated": ended}}]}
    client.patch("Pod", namespace, f"{name}-x", {"status": pod}, subresource="status")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    kinds = ("SuccessCriteriaMet", "Complete")
    status = {
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds],
        "startTime": now,
        "completionTime": now,
        "succeeded": 1,
        "uncountedTerminatedPods": {},
    }
    client.patch("Job", namespace, name, {"status": status}, subresource="status")
