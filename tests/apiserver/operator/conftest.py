"""The real operator, as a process, against a real API server, with the very ServiceAccount, RBAC and environment that
the chart gives it.

In: what the operator does to objects. Out: what becomes of them. No kubelet and no controllers run here, so tests write
the status of Deployments, Jobs, pods and claims themselves, and nothing is deleted by its owner reference.
"""

import base64
import http.client
import itertools
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from speccache_api import names

_ROOT = Path(__file__).parents[3]
_PATHS = {
    "Deployment": ("apps/v1", "deployments"),
    "StatefulSet": ("apps/v1", "statefulsets"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "PersistentVolume": ("v1", "persistentvolumes"),
    "StorageClass": ("storage.k8s.io/v1", "storageclasses"),
    "Secret": ("v1", "secrets"),
    "Job": ("batch/v1", "jobs"),
    "ConfigMap": ("v1", "configmaps"),
    "Service": ("v1", "services"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"),
    "Pod": ("v1", "pods"),
    "Event": ("v1", "events"),
    "Node": ("v1", "nodes"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    names.KIND: (names.API_VERSION, names.PLURAL),
}


class Api:
    """A small client for tests, as the cluster's administrator."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.server: str = cluster["server"]
        self.authority = cluster["certificate-authority-data"]
        self.context = ssl.create_default_context(cadata=base64.b64decode(self.authority).decode())
        headers = {"Authorization": f"Bearer {user['token']}"}
        self.http = httpx.Client(
            base_url=self.server, headers=headers, verify=self.context, timeout=30, trust_env=False
        )

    def path(self, kind: str, namespace: str | None, name: str = "") -> str:
        version, plural = _PATHS[kind]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{scope}/{plural}" + (f"/{name}" if name else "")

    def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        answer = self.http.get(self.path(kind, namespace, name))
        return None if answer.status_code == 404 else self._good(answer)

    def list(self, kind: str, namespace: str | None, selector: str = "") -> list[dict[str, Any]]:
        found = self._good(self.http.get(self.path(kind, namespace), params={"labelSelector": selector}))
        items: list[dict[str, Any]] = found["items"]
        return items

    def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        path = self.path(obj["kind"], obj["metadata"].get("namespace"))
        return self._good(self.http.post(path, json=obj, params={"fieldManager": "test"}))

    def patch(self, kind: str, namespace: str | None, name: str, patch: Any, subresource: str = "") -> dict[str, Any]:
        path = self.path(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        headers = {"Content-Type": "application/merge-patch+json"}
        return self._good(self.http.patch(path, content=json.dumps(patch), headers=headers))

    def delete(self, kind: str, namespace: str | None, name: str) -> None:
        # Jobs are orphaned by default, which needs a garbage collector.
        answer = self.http.request("DELETE", self.path(kind, namespace, name), json={"propagationPolicy": "Background"})
        assert answer.status_code in (200, 202, 404), answer.text

    def _good(self, answer: httpx.Response) -> dict[str, Any]:
        assert answer.is_success, f"{answer.request.method} {answer.request.url}: {answer.text}"
        body: dict[str, Any] = answer.json()
        return body


def eventually(check: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The first true answer of `check`; AssertionError with its last answer when there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        answer = check()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not in {seconds} s; last answer {answer!r}"
        time.sleep(0.05)


@dataclass
class OperatorProcess:
    """One running operator. `lines` are its log, one object each."""

    process: subprocess.Popen[str]
    namespace: str
    release: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0

    def logged(self, message: str) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line["message"] == message]

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", trust_env=False).text
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def reconciles(self) -> float:
        return sum(
            value for name, value in self.metrics().items() if name.startswith("speccache_operator_reconciles_t")
        )

    def health(self) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}/healthz", trust_env=False)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=20)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=20)


class Proxy:
    """Stands between an operator and the API server: records each request, and answers instead when told to.

    `fault(method, path)` answers a status to send instead, 0 to cut the connection, or None to pass the request on.
    """

    def __init__(self, client: Api) -> None:
        self.requests: set[tuple[str, str, str]] = set()
        self.fault: Callable[[str, str], int | None] = lambda method, path: None
        self.client = client
        self.upstream: set[http.client.HTTPSConnection] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = False  # so that closing waits for them
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def connect(self) -> http.client.HTTPSConnection:
        """A connection of its own for each request: watches never end by themselves."""
        host = self.client.server.removeprefix("https://")
        connection = http.client.HTTPSConnection(host, context=self.client.context, timeout=600)
        connection.connect()
        self.upstream.add(connection)
        return connection

    def close(self) -> None:
        self._server.shutdown()
        for connection in list(self.upstream):
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.server_close()


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path, _, query = self.path.partition("?")
            proxy.requests.add((self.command, path, query))
            status = proxy.fault(self.command, path)
            if status is not None:
                if status:
                    self.send_error(status)
                return
            upstream = proxy.connect()
            with suppress(OSError, http.client.HTTPException):  # either side may go at any time
                self.forward(upstream, body)
            proxy.upstream.discard(upstream)
            upstream.close()

        def forward(self, upstream: http.client.HTTPSConnection, body: bytes) -> None:
            kept = {k: v for k, v in self.headers.items() if k.lower() in ("authorization", "content-type", "accept")}
            upstream.request(self.command, self.path, body=body, headers=kept)
            with upstream.getresponse() as answer:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
                self.end_headers()
                while part := answer.read1(65536):
                    self.wfile.write(part)
                    self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            pass

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do

    return Handler


@pytest.fixture
def proxy(client: Api) -> Iterator[Proxy]:
    """A recording, failing proxy; give its `url` as `server` to `start`."""
    proxy = Proxy(client)
    yield proxy
    proxy.close()


@pytest.fixture(scope="session")
def client(api: Any, apiserver: Path) -> Iterator[Api]:
    """A client for the API server with the CRD installed."""
    client = Api(apiserver)
    yield client
    client.http.close()


@pytest.fixture(scope="session")
def wait() -> Callable[..., Any]:
    return eventually


@pytest.fixture(scope="session")
def rendered(helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Renders charts/speccache: `rendered(release, namespace, "watchNamespace=x", ...)`."""
    home = str(tmp_path_factory.mktemp("helm"))
    environment = {**os.environ, **{f"HELM_{name}_HOME": home for name in ("CACHE", "CONFIG", "DATA")}}

    def render(release: str, namespace: str, *values: str) -> list[dict[str, Any]]:
        sets = [word for value in values for word in ("--set", value)]
        command = [str(helm), "template", release, str(_ROOT / "charts/speccache"), "--namespace", namespace, *sets]
        command += ["--kube-version", "v1.35.4"]
        text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        return [obj for obj in yaml.safe_load_all(text) if obj]

    return render


Start = Callable[..., OperatorProcess]


@pytest.fixture(scope="session")
def launch(client: Api, kubectl_run: Any, rendered: Any, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts an operator: `launch(release, namespace, *chart values, server=URL)`.

    Namespace, RBAC, ServiceAccount and the process's environment are the chart's; only where the API server is and the
    HTTP port are the test's. The Lease is left out: an operator makes it when it is missing.
    """

    def run(release: str, namespace: str, *values: str, server: str = "") -> OperatorProcess:
        objects = rendered(release, namespace, f"watchNamespace={namespace}", "resyncSeconds=5", *values)
        deployment = next(obj for obj in objects if obj["kind"] == "Deployment")
        rights = [obj for obj in objects if obj["kind"] not in ("Deployment", "Service", "Lease")]
        done = kubectl_run("apply", "-f", "-", stdin=yaml.safe_dump_all(rights))
        assert done.returncode == 0, done.stderr
        account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
        _until_in_force(kubectl_run, namespace, account, nodes="checkNodes=false" not in values)
        token = kubectl_run("-n", namespace, "create", "token", account).stdout.strip()
        assert token
        config = tmp_path_factory.mktemp(release) / "kubeconfig"
        config.write_text(yaml.safe_dump(_kubeconfig(client, token, server)))
        return _launch(deployment, namespace, release, config)

    return run


@pytest.fixture
def start(launch: Start) -> Iterator[Start]:
    """`launch` for one test: what still runs at its end is ended."""
    running: list[OperatorProcess] = []

    def run(*arguments: str, **options: str) -> OperatorProcess:
        running.append(launch(*arguments, **options))
        return running[-1]

    yield run
    for operator in running:
        operator.kill()


def _until_in_force(kubectl_run: Any, namespace: str, account: str, *, nodes: bool) -> None:
    """The API server's authorizer learns of new rights with a delay; a person's operator would only retry."""
    user = f"--as=system:serviceaccount:{namespace}:{account}"
    rights = [("-n", namespace, "list", "pods"), ("-n", namespace, "create", "leases.coordination.k8s.io")]
    for right in [*rights, ("list", "nodes")][: 3 if nodes else 2]:
        eventually(lambda words=right: kubectl_run("auth", "can-i", user, *words).returncode == 0)


def _kubeconfig(client: Api, token: str, server: str) -> dict[str, Any]:
    cluster = (
        {"server": server} if server else {"server": client.server, "certificate-authority-data": client.authority}
    )
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "operator",
        "clusters": [{"name": "operator", "cluster": cluster}],
        "users": [{"name": "operator", "user": {"token": token}}],
        "contexts": [{"name": "operator", "context": {"cluster": "operator", "user": "operator"}}],
    }


def _launch(deployment: dict[str, Any], namespace: str, release: str, kubeconfig: Path) -> OperatorProcess:
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    fields = {"metadata.name": f"{release}-pod", "metadata.namespace": namespace}
    environment = {
        entry["name"]: entry.get("value", "") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container["env"]
        if "value" not in entry or entry["value"]
    }
    environment |= {"KUBECONFIG": str(kubeconfig), "HTTP_PORT": "0", "PATH": os.environ["PATH"]}
    assert container["command"] == ["speccache-operator", "run"]
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "speccache_operator", "run", "--http-host", "127.0.0.1"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    operator = OperatorProcess(process, namespace, release)
    threading.Thread(target=_read, args=(operator, kubeconfig.with_name("log")), daemon=True).start()
    eventually(lambda: operator.logged("listening") or process.poll() is not None)
    assert process.poll() is None, operator.lines
    operator.port = operator.logged("listening")[0]["port"]
    return operator


def _read(operator: OperatorProcess, log: Path) -> None:
    """Keeps the log in memory for tests and in a file for people."""
    assert operator.process.stderr is not None
    with operator.process.stderr as stream, log.open("w") as file:
        for line in stream:
            operator.lines.append(json.loads(line) if line.startswith("{") else {"message": line})
            file.write(line)
            file.flush()


@pytest.fixture(scope="session")
def new_namespace(client: Api) -> Callable[[], str]:
    """Makes namespaces. They are never deleted: nothing here would delete what is in them."""
    numbers = itertools.count()
    return lambda: _make_namespace(client, f"operator-{next(numbers)}")


@pytest.fixture(scope="module")
def namespace(new_namespace: Callable[[], str]) -> str:
    """A namespace for the module."""
    return new_namespace()


def _make_namespace(client: Api, name: str) -> str:
    """Pods that do not meet the restricted standard are refused in it."""
    meta = {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    client.http.post("/api/v1/namespaces", json={"metadata": meta}).raise_for_status()
    client.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}})
    return name


@pytest.fixture(scope="module")
def operator(launch: Start, namespace: str) -> Iterator[OperatorProcess]:
    """An operator that watches the module's namespace, and that has said nothing alarming at the end."""
    process = launch("module", namespace)
    eventually(lambda: process.metrics().get("speccache_operator_leading") == 1)
    yield process
    assert process.stop() == 0, process.lines[-3:]
    assert not [line for line in process.lines if _alarming(line)]
    assert not [line for line in process.lines if " 403 " in line.get("error", "")]


@pytest.fixture
def manifest(namespace: str, request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """A resource named after the test: `manifest(**spec)` merges into a small built-in one."""
    name = "r" + format(abs(hash(request.node.name)) % 16**8, "08x")

    def make(**spec: Any) -> dict[str, Any]:
        base = {
            "model": {"uri": "builtin://tiny"},
            "speculative": {"algorithm": "EAGLE3", "draftModel": {"uri": "builtin://tiny"}},
            "kvCache": {"device": {"tokens": 4096}, "host": {"tokens": 8192}},
        }
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": name, "namespace": namespace},
            "spec": base | spec,
        }

    return make


@pytest.fixture
def condition(client: Api, namespace: str) -> Callable[[str, str], dict[str, Any]]:
    """The condition of a resource as it is now, {} while there is none."""

    def read(name: str, kind: str) -> dict[str, Any]:
        resource = client.get(names.KIND, namespace, name) or {}
        found = resource.get("status", {}).get("conditions", [])
        return next((entry for entry in found if entry["type"] == kind), {})

    return read


@pytest.fixture
def look_again(client: Api, namespace: str) -> Callable[[OperatorProcess, str, int], None]:
    """Has the operator look at a resource so many times more, now and not by its clock."""

    def look(operator: OperatorProcess, name: str, times: int) -> None:
        for _ in range(times):
            passes = operator.reconciles()
            client.patch(names.KIND, namespace, name, {"metadata": {"annotations": {"wake": str(time.monotonic())}}})
            eventually(lambda before=passes: operator.reconciles() > before)

    return look


@pytest.fixture
def finish(client: Any, namespace: str) -> Any:
    """Plays Job controller and kubelet: the Job's pod ends with this message and the Job with this condition."""

    def end(job: dict[str, Any], message: str, *, complete: bool) -> None:
        name = job["metadata"]["name"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        template = job["spec"]["template"]
        meta = {
            "name": f"{name}-x",
            "namespace": namespace,
            "labels": template["metadata"]["labels"],
            "ownerReferences": [owner | {"controller": True}],
        }
        client.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]})
        ended = {"exitCode": 0 if complete else 1, "reason": "Completed" if complete else "Error", "message": message}
        entry = {"name": "runtime", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
        status = {
            "phase": "Succeeded" if complete else "Failed",
            "containerStatuses": [entry | {"state": {"terminated": ended}}],
        }
        client.patch("Pod", namespace, f"{name}-x", {"status": status}, subresource="status")
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        first = "SuccessCriteriaMet" if complete else "FailureTarget"
        kinds = (first, "Complete" if complete else "Failed")
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds]
        status = {"conditions": conditions, "startTime": now, "uncountedTerminatedPods": {}}
        status |= {"succeeded": 1, "completionTime": now} if complete else {"failed": 4}
        client.patch("Job", namespace, name, {"status": status}, subresource="status")

    return end


def _alarming(line: dict[str, Any]) -> bool:
    """What an operator must not say. When a test replaces the CRD, the API server asks for a moment's patience, which
    kopf repeats as an error and then gives it."""
    if "is (re)initializing" in line.get("message", ""):
        return False
    return line.get("level") in ("error", "critical") or "level" not in line
