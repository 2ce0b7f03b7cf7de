"""The Service that clients call: ready pods only."""

from typing import Any

from speccache_api import names
from speccache_operator.children.answer import Built
from speccache_operator.children.context import BuildContext
from speccache_operator.children.meta import metadata
from speccache_operator.kinds import SERVICE


def build(ctx: BuildContext) -> Built:
    """Always wanted."""
    name = ctx.resource.name
    return {
        "apiVersion": SERVICE.api_version,
        "kind": SERVICE.name,
        "metadata": metadata(ctx, names.service_name(name)),
        "spec": {"type": "ClusterIP", "selector": names.selector_labels(name), "ports": [http_port()]},
    }


def http_port() -> dict[str, Any]:
    """The one port of a replica, by the name that the container gives it."""
    return {
        "name": names.HTTP_PORT_NAME,
        "port": names.HTTP_PORT,
        "targetPort": names.HTTP_PORT_NAME,
        "protocol": "TCP",
        "appProtocol": "http",
    }
