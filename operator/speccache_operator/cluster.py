"""The only module that sees the Kubernetes client: all requests the operator makes, with timeouts and mapped errors.

kopf has no server-side apply, and the generated client's methods know neither our kinds nor apply, so requests are
plain paths over the client's transport. Watching is kopf's part (handlers.py); reading and writing are here.
"""

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from speccache_api import names
from speccache_operator.errors import ApiError, Conflict, NotFound, Refused, SettingsError, Unavailable
from speccache_operator.kinds import Kind, Object, Ref, kind_of
from speccache_operator.logs import fields

SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PAGE = 500
logger = logging.getLogger(__name__)
_RETRIABLE = (401, 408, 429, 500, 502, 503, 504)
_REFUSED = (400, 403, 405, 413, 422)
_NETWORK = (aiohttp.ClientError, TimeoutError, OSError)


class Cluster(Protocol):
    """What the rest of the operator may ask of the API server.

    Every method raises Unavailable when nothing is known about the outcome, Refused when the server says no, and what
    its own docstring adds. Objects that come back are fresh and belong to the caller.
    """

    async def get(self, ref: Ref) -> Object | None:
        """The object as it is now, read from the server and not from a cache; None when there is none."""

    async def list(self, kind: Kind, namespace: str | None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """All objects of the kind with these labels, each with `apiVersion` and `kind` filled in."""

    async def apply(self, obj: Object, *, subresource: str = "") -> Object:
        """Server-side apply with our field manager, taking over the fields that `obj` names. Answers the new object.

        With `metadata.uid` in `obj`, Conflict means that the object is gone or another one.
        """

    async def merge(self, ref: Ref, patch: Object) -> Object:
        """JSON merge patch: lists are replaced, a null removes. Answers the new object.

        With `metadata.uid` in `patch`, Conflict means that the object is another one; NotFound that it is gone.
        """

    async def create(self, obj: Object) -> Object:
        """Create; Conflict when the name is taken."""

    async def replace(self, obj: Object) -> Object:
        """Replace; Conflict when `metadata.resourceVersion` is no longer the newest, NotFound when it is gone."""

    async def delete(self, ref: Ref, uid: str) -> None:
        """Delete this very object and, in the background, what it owns. Gone is success; Conflict means another uid."""


def in_cluster() -> bool:
    """True when the service account of a pod is there and no kubeconfig was named."""
    return not os.environ.get("KUBECONFIG") and (SERVICE_ACCOUNT_FOLDER / "token").exists()


def in_cluster_server() -> str:
    """Address of the API server as the kubelet tells it to a pod; needs no DNS."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


class KubernetesCluster:
    """`Cluster` over HTTPS. Made by `connect`; use as an async context manager."""

    def __init__(self, client: ApiClient, *, field_manager: str = names.FIELD_MANAGER, timeout: float = 10.0) -> None:
        self._client = client
        self._field_manager = field_manager
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=timeout / 2)

    @classmethod
    async def connect(cls, *, timeout: float = 10.0) -> "KubernetesCluster":
        """A cluster from the pod's service account, or from KUBECONFIG. `timeout` is in seconds for each request.

        Raises SettingsError when neither is usable.
        """
        configuration = Configuration()
        try:
            if in_cluster():
                config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            else:
                await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except (config.ConfigException, OSError, TypeError, ValueError) as error:
            raise SettingsError(f"no API server to talk to: KUBECONFIG is unusable: {error}") from error
        # Proxies of the environment are for the internet; kopf's session ignores them too.
        configuration.client_session_kwargs = {"trust_env": False}
        return cls(ApiClient(configuration), timeout=timeout)

    async def __aenter__(self) -> "KubernetesCluster":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, ref: Ref) -> Object | None:
        """See Cluster."""
        try:
            return await self._request("GET", ref.kind.path(ref.namespace, ref.name))
        except NotFound:
            return None

    async def list(self, kind: Kind, namespace: str | None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """See Cluster."""
        query = {"limit": str(_PAGE)}
        if labels:
            query["labelSelector"] = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        found: list[Object] = []
        while True:
            page = await self._request("GET", kind.path(namespace), query=query)
            found += [{**item, "apiVersion": kind.api_version, "kind": kind.name} for item in page["items"]]
            token = page["metadata"].get("continue")
            if not token:
                return found
            query["continue"] = token

    async def apply(self, obj: Object, *, subresource: str = "") -> Object:
        """See Cluster."""
        ref = Ref.of(obj)
        path = ref.kind.path(ref.namespace, ref.name) + (f"/{subresource}" if subresource else "")
        query = {"fieldManager": self._field_manager, "force": "true", "fieldValidation": "Strict"}
        return await self._request("PATCH", path, query=query, body=obj, content_type="application/apply-patch+yaml")

    async def merge(self, ref: Ref, patch: Object) -> Object:
        """See Cluster."""
        path, query = ref.kind.path(ref.namespace, ref.name), {"fieldManager": self._field_manager}
        return await self._request("PATCH", path, query=query, body=patch, content_type="application/merge-patch+json")

    async def create(self, obj: Object) -> Object:
        """See Cluster."""
        query = {"fieldManager": self._field_manager}
        return await self._request("POST", kind_of(obj).path(obj["metadata"]["namespace"]), query=query, body=obj)

    async def replace(self, obj: Object) -> Object:
        """See Cluster."""
        ref = Ref.of(obj)
        query = {"fieldManager": self._field_manager}
        return await self._request("PUT", ref.kind.path(ref.namespace, ref.name), query=query, body=obj)

    async def delete(self, ref: Ref, uid: str) -> None:
        """See Cluster."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._request("DELETE", ref.kind.path(ref.namespace, ref.name), body=body)
        except NotFound:
            return

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        label = f"{method} {path}"
        request = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = await self._client.call_api(*request, _request_timeout=self._timeout)
            data = await response.read()  # type: ignore[no-untyped-call]
        except _NETWORK as error:
            raise Unavailable(f"{label}: {type(error).__name__} {error}") from error
        return _answer(label, response.status, data)


def _answer(label: str, status: int, data: bytes) -> dict[str, Any]:
    """The body of a good answer; the mapped error of a bad one."""
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    if 200 <= status < 300 and isinstance(body, dict):
        return body
    message = body.get("message", "") if isinstance(body, dict) else data[:200].decode(errors="replace")
    if status == 404:
        raise NotFound(status, message, label)
    if status == 409:
        raise Conflict(status, message, label)
    if status in _REFUSED:
        raise Refused(status, message, label)
    if status in _RETRIABLE or status < 400:
        raise Unavailable(f"{label}: {status} {message}")
    raise ApiError(status, message, label)


async def wait_until_served(cluster: Cluster, kind: Kind, namespace: str | None, *, pause: float = 2.0) -> None:
    """Return once the API server serves `kind`: the operator may start before its CRD is installed."""
    while True:
        try:
            await cluster.list(kind, namespace)
        except (NotFound, Unavailable) as error:
            logger.warning("waiting for the API server to serve our kind", extra=fields(error=str(error)))
            await asyncio.sleep(pause)
        else:
            return
