"""The border to the API server, against a real HTTP server that behaves badly on purpose."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from speccache_operator.cluster import KubernetesCluster, in_cluster_server, wait_until_served
from speccache_operator.errors import ApiError, ClusterError, Conflict, NotFound, Refused, SettingsError, Unavailable
from speccache_operator.kinds import CONFIG_MAP, DEPLOYMENT, NODE, RESOURCE, Kind, Ref, kind_of

MAP = Ref(CONFIG_MAP, "demo", "a")


@dataclass
class Server:
    """Answers with what is put into `answers`, the last one again and again; remembers requests."""

    answers: list[tuple[int, Any]] = field(default_factory=lambda: [(200, {})])
    requests: list[dict[str, Any]] = field(default_factory=list)
    hang: bool = False
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.requests.append(
            {
                "method": request.method,
                "path": request.path,
                "query": dict(request.query),
                "type": request.headers["Content-Type"],
                "body": json.loads(text) if text else None,
            }
        )
        if self.hang:
            await asyncio.sleep(60)
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if status == 0:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    state = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", state.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield state
    await runner.cleanup()


@pytest_asyncio.fixture
async def cluster(server: Server) -> AsyncIterator[KubernetesCluster]:
    configuration = Configuration(host=server.url)
    async with KubernetesCluster(ApiClient(configuration), timeout=2.0) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("kind", "namespace", "name", "path"),
    [
        (CONFIG_MAP, "demo", "a", "/api/v1/namespaces/demo/configmaps/a"),
        (CONFIG_MAP, None, None, "/api/v1/configmaps"),
        (DEPLOYMENT, "demo", None, "/apis/apps/v1/namespaces/demo/deployments"),
        (RESOURCE, None, None, "/apis/speccache.io/v1alpha1/speccachedeployments"),
        (NODE, None, "n", "/api/v1/nodes/n"),
    ],
)
def test_paths(kind: Kind, namespace: str | None, name: str | None, path: str) -> None:
    assert kind.path(namespace, name) == path
    assert kind_of({"apiVersion": kind.api_version, "kind": kind.name}) is kind


async def test_get_answers_none_when_there_is_none(cluster: KubernetesCluster, server: Server) -> None:
    server.answers = [(404, {"message": "no"}), (200, {"metadata": {"name": "a"}})]
    assert await cluster.get(MAP) is None
    assert await cluster.get(MAP) == {"metadata": {"name": "a"}}


async def test_list_follows_pages_and_names_the_kind(cluster: KubernetesCluster, server: Server) -> None:
    pages = [
        {"metadata": {"continue": "next"}, "items": [{"metadata": {"name": "a"}}]},
        {"metadata": {}, "items": [{"metadata": {"name": "b"}}]},
    ]
    server.answers = [(200, page) for page in pages]
    found = await cluster.list(CONFIG_MAP, "demo", {"x": "1", "a": "2"})
    assert [(obj["kind"], obj["metadata"]["name"]) for obj in found] == [("ConfigMap", "a"), ("ConfigMap", "b")]
    assert server.requests[0]["query"]["labelSelector"] == "a=2,x=1"
    assert server.requests[1]["query"]["continue"] == "next"


async def test_apply_is_server_side_with_our_field_manager(cluster: KubernetesCluster, server: Server) -> None:
    obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "demo"}, "data": {}}
    await cluster.apply(obj)
    await cluster.apply({**obj, "apiVersion": RESOURCE.api_version, "kind": RESOURCE.name}, subresource="status")
    first, second = server.requests
    assert (first["method"], first["type"]) == ("PATCH", "application/apply-patch+yaml")
    assert first["query"] == {"fieldManager": "speccache-operator", "force": "true", "fieldValidation": "Strict"}
    assert first["body"] == obj
    assert second["path"].endswith("/speccachedeployments/a/status")


async def test_delete_names_the_very_object_and_bears_its_absence(cluster: KubernetesCluster, server: Server) -> None:
    server.answers = [(200, {}), (404, {"message": "gone"})]
    await cluster.delete(MAP, "u-1")
    await cluster.delete(MAP, "u-1")
    assert server.requests[0]["body"] == {"propagationPolicy": "Background", "preconditions": {"uid": "u-1"}}


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, Refused),
        (401, Unavailable),
        (403, Refused),
        (404, NotFound),
        (409, Conflict),
        (410, ApiError),
        (422, Refused),
        (429, Unavailable),
        (500, Unavailable),
        (503, Unavailable),
        (504, Unavailable),
        (0, Unavailable),
    ],
)
async def test_every_failure_is_one_of_ours(
    status: int, error: type[ClusterError], cluster: KubernetesCluster, server: Server
) -> None:
    server.answers = [(status, {"message": "because of this"})]
    with pytest.raises(error) as caught:
        await cluster.list(CONFIG_MAP, "demo")
    assert "GET /api/v1/namespaces/demo/configmaps" in str(caught.value)
    if status:
        assert "because of this" in str(caught.value)


@pytest.mark.parametrize("body", ["<html>busy</html>", "", "[]", "null"])
async def test_an_answer_that_is_no_object_is_no_answer(body: str, cluster: KubernetesCluster, server: Server) -> None:
    server.answers = [(200, body)]
    with pytest.raises(Unavailable):
        await cluster.get(MAP)


async def test_a_proxys_error_page_is_mapped_by_its_status(cluster: KubernetesCluster, server: Server) -> None:
    server.answers = [(503, "<html>no upstream</html>")]
    with pytest.raises(Unavailable, match="no upstream"):
        await cluster.get(MAP)


async def test_no_request_takes_longer_than_its_timeout(cluster: KubernetesCluster, server: Server) -> None:
    server.hang = True
    started = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable, match="TimeoutError"):
        await cluster.get(MAP)
    assert asyncio.get_running_loop().time() - started < 5


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with KubernetesCluster(ApiClient(Configuration(host="http://127.0.0.1:1")), timeout=1) as cluster:
        with pytest.raises(Unavailable):
            await cluster.get(MAP)


async def test_a_start_before_the_crd_waits_for_it(cluster: KubernetesCluster, server: Server) -> None:
    server.answers = [(404, {"message": "no kind"}), (503, {}), (200, {"metadata": {}, "items": []})]
    await wait_until_served(cluster, RESOURCE, None, pause=0.01)
    assert len(server.requests) == 3


async def test_missing_rights_are_not_waited_for(cluster: KubernetesCluster, server: Server) -> None:
    server.answers = [(403, {"message": "forbidden"})]
    with pytest.raises(Refused):
        await wait_until_served(cluster, RESOURCE, None, pause=0.01)


@pytest.mark.parametrize("text", ["", "{", "[]", "clusters: 7", "current-context: none"])
async def test_a_broken_kubeconfig_is_a_wrong_setting(
    text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(SettingsError, match="KUBECONFIG"):
        await KubernetesCluster.connect()


@pytest.mark.parametrize(("host", "url"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")])
def test_the_server_of_a_pod_needs_no_dns(host: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert in_cluster_server() == url
