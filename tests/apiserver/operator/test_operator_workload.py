"""The workload: what others make of it on its way, its replicas apart from its template, and how it replaces pods."""

import base64
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from speccache_api import names


@pytest.fixture
def serve(client: Any, namespace: str) -> Any:
    """Plays the Deployment's controller: all pods that it is told to have are there, new and ready."""

    def run(name: str) -> None:
        live = client.get("Deployment", namespace, name)
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        status = {"observedGeneration": live["metadata"]["generation"]}
        status |= dict.fromkeys(counts, live["spec"]["replicas"])
        client.patch("Deployment", namespace, name, {"status": status}, subresource="status")

    return run


class _Webhook(BaseHTTPRequestHandler):
    """Writes another image into every Deployment, as mirrors of registries do."""

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        template = review["request"]["object"]["spec"]["template"]
        image = "mirror.test/" + template["spec"]["containers"][0]["image"].removeprefix("mirror.test/")
        patch = [{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": image}]
        answer = {
            "uid": review["request"]["uid"],
            "allowed": True,
            "patchType": "JSONPatch",
            "patch": base64.b64encode(json.dumps(patch).encode()).decode(),
        }
        body = json.dumps({"apiVersion": review["apiVersion"], "kind": review["kind"], "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def webhook(client: Any, namespace: str, tmp_path: Path) -> Iterator[None]:
    """A real mutating admission webhook for the Deployments of the namespace."""
    certificate, key = tmp_path / "crt", tmp_path / "key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=webhook"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Webhook)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hook = {
        "name": "mirror.test.example",
        "clientConfig": {
            "url": f"https://127.0.0.1:{server.server_address[1]}/",
            "caBundle": base64.b64encode(certificate.read_bytes()).decode(),
        },
        "rules": [
            {
                "apiGroups": ["apps"],
                "apiVersions": ["v1"],
                "operations": ["CREATE", "UPDATE"],
                "resources": ["deployments"],
            }
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "failurePolicy": "Fail",
    }
    path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    body = {"metadata": {"name": namespace}, "webhooks": [hook]}
    client.http.post(path, json=body).raise_for_status()
    yield
    client.http.delete(f"{path}/{namespace}").raise_for_status()
    server.shutdown()
    thread.join()
    server.server_close()


def _image(deployment: dict[str, Any]) -> str:
    image: str = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    return image


def test_what_a_webhook_makes_of_the_workload_is_no_drift(
    webhook: None,
    manifest: Any,
    operator: Any,
    look_again: Any,
    serve: Any,
    client: Any,
    namespace: str,
    wait: Any,
    condition: Any,
) -> None:
    resource = manifest()
    name = resource["metadata"]["name"]

    def made_by_the_webhook() -> Any:
        # The API server hears of a new webhook a moment later; until then the objects are as they were sent.
        client.delete("Deployment", namespace, name)
        live = wait(lambda: client.get("Deployment", namespace, name))
        return live if _image(live).startswith("mirror.test/") else None

    client.create(resource)
    wait(made_by_the_webhook)
    serve(name)
    wait(lambda: condition(name, "Ready").get("status") == "True")
    assert condition(name, "Progressing")["reason"] == "Complete"
    before = client.get("Deployment", namespace, name)
    look_again(operator, name, 7)
    after = client.get("Deployment", namespace, name)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert condition(name, "Ready")["status"] == "True"
    events = [event for event in client.list("Event", namespace) if event["involvedObject"]["name"] == name]
    assert not [event for event in events if event["reason"] == "Repaired"]
    # A change of the resource is a rollout all the same.
    client.patch(names.KIND, namespace, name, {"spec": {"kvCache": {"host": {"tokens": 640}}}})
    wait(lambda: condition(name, "Progressing").get("reason") == "RollingOut")


def test_an_amount_that_the_server_rounds_is_no_drift(
    manifest: Any, operator: Any, serve: Any, client: Any, namespace: str, wait: Any, condition: Any
) -> None:
    name = client.create(manifest(resources={"requests": {"cpu": "0.1005"}}))["metadata"]["name"]
    live = wait(lambda: client.get("Deployment", namespace, name))
    assert live["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "101m"
    serve(name)
    wait(lambda: condition(name, "Ready").get("status") == "True")
    assert condition(name, "Progressing")["reason"] == "Complete"


def _claim(client: Any, namespace: str, name: str, **spec: Any) -> None:
    body = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, **spec}
    meta = {"name": name, "namespace": namespace}
    client.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": body})


def test_pods_can_be_scaled_away_while_their_claim_waits_to_be_deleted(
    manifest: Any, operator: Any, serve: Any, api: Any, client: Any, namespace: str, wait: Any, condition: Any
) -> None:
    """The claim is held until no pod uses it: were the replicas held by the claim, neither would ever move."""
    resource = manifest(replicas=1)
    name = resource["metadata"]["name"]
    _claim(client, namespace, f"{name}-mine")
    resource["spec"]["kvCache"]["storage"] = {"persistentVolumeClaim": {"claimName": f"{name}-mine"}}
    client.create(resource)
    wait(lambda: client.get("Deployment", namespace, name))
    serve(name)
    client.patch(
        "PersistentVolumeClaim", namespace, f"{name}-mine", {"metadata": {"finalizers": ["test.example/used"]}}
    )
    client.delete("PersistentVolumeClaim", namespace, f"{name}-mine")
    wait(lambda: condition(name, "StorageReady").get("reason") == "ClaimDeleting")
    template = client.get("Deployment", namespace, name)["spec"]["template"]
    done = api("-n", namespace, "scale", names.PLURAL, name, "--replicas=0")
    assert done.returncode == 0, done.stderr
    wait(lambda: client.get("Deployment", namespace, name)["spec"]["replicas"] == 0)
    assert client.get("Deployment", namespace, name)["spec"]["template"] == template
    # Up again only once the claim is one to use.
    assert api("-n", namespace, "scale", names.PLURAL, name, "--replicas=1").returncode == 0
    wait(lambda: condition(name, "Ready").get("observedGeneration") == 3)
    assert client.get("Deployment", namespace, name)["spec"]["replicas"] == 0
    client.patch("PersistentVolumeClaim", namespace, f"{name}-mine", {"metadata": {"finalizers": None}})
    wait(lambda: condition(name, "StorageReady").get("reason") == "ClaimNotFound")
    _claim(client, namespace, f"{name}-mine")
    wait(lambda: client.get("Deployment", namespace, name)["spec"]["replicas"] == 1)


def test_replicas_are_a_write_of_their_own(
    manifest: Any, operator: Any, client: Any, namespace: str, wait: Any
) -> None:
    name = client.create(manifest(replicas=2))["metadata"]["name"]
    before = wait(lambda: client.get("Deployment", namespace, name))
    client.patch(names.KIND, namespace, name, {"spec": {"replicas": 5}})
    wait(lambda: client.get("Deployment", namespace, name)["spec"]["replicas"] == 5)
    client.patch(names.KIND, namespace, name, {"spec": {"replicas": 1, "kvCache": {"host": {"tokens": 640}}}})
    wait(lambda: client.get("Deployment", namespace, name)["spec"]["template"] != before["spec"]["template"])
    assert client.get("Deployment", namespace, name)["spec"]["replicas"] == 1
    client.patch(names.KIND, namespace, name, {"spec": {"replicas": None}})
    client.patch("Deployment", namespace, name, {"spec": {"replicas": 7}})
    wait(lambda: client.get("Deployment", namespace, name)["spec"]["replicas"] == 1)


@pytest.mark.parametrize(
    ("key", "strategy"), [("kubernetes.io/hostname", "RollingUpdate"), ("topology.kubernetes.io/zone", "Recreate")]
)
def test_a_volume_of_one_node_lets_a_new_pod_serve_before_the_old_one_ends(
    key: str, strategy: str, manifest: Any, operator: Any, look_again: Any, client: Any, namespace: str, wait: Any
) -> None:
    resource = manifest()
    name = resource["metadata"]["name"]
    here = {"matchExpressions": [{"key": key, "operator": "In", "values": ["somewhere"]}]}
    volume = {
        "accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": "1Gi"},
        "local": {"path": "/nowhere"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [here]}},
    }
    client.create({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume})
    _claim(client, namespace, f"{name}-mine")
    resource["spec"]["kvCache"]["storage"] = {"persistentVolumeClaim": {"claimName": f"{name}-mine"}}
    client.create(resource)
    # Not known to be of one node: the old pod has to end first.
    wait(lambda: client.get("Deployment", namespace, name))
    assert client.get("Deployment", namespace, name)["spec"]["strategy"] == {"type": "Recreate"}
    client.patch("PersistentVolumeClaim", namespace, f"{name}-mine", {"spec": {"volumeName": name}})
    look_again(operator, name, 3)
    wait(lambda: client.get("Deployment", namespace, name)["spec"]["strategy"]["type"] == strategy)
    if strategy == "RollingUpdate":
        rolling = client.get("Deployment", namespace, name)["spec"]["strategy"]["rollingUpdate"]
        assert rolling == {"maxSurge": 1, "maxUnavailable": 0}


def test_models_are_read_only_at_the_volume(
    manifest: Any, operator: Any, client: Any, namespace: str, wait: Any
) -> None:
    geometry = {"layers": 2, "kvHeads": 2, "headDim": 64, "parameters": 1000}
    model = {"uri": f"pvc://{namespace}-weights/a", "kvGeometry": geometry}
    resource = manifest(model=model, speculative={"algorithm": "None"})
    name = client.create(resource)["metadata"]["name"]
    wait(lambda: (client.get(names.KIND, namespace, name) or {}).get("status"))
    assert client.get("Deployment", namespace, name) is None, "the model's claim does not exist"
    _claim(client, namespace, f"{namespace}-weights", accessModes=["ReadOnlyMany"])
    live = wait(lambda: client.get("Deployment", namespace, name))
    (volume,) = [v for v in live["spec"]["template"]["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert volume["persistentVolumeClaim"] == {"claimName": f"{namespace}-weights", "readOnly": True}
