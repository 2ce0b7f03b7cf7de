"""The headless Service: one DNS name with the address of each pod, ready or not, for scraping."""

from speccache_api import names
from speccache_operator.children.answer import Built
from speccache_operator.children.context import BuildContext
from speccache_operator.children.meta import metadata
from speccache_operator.children.service import http_port
from speccache_operator.kinds import SERVICE


def build(ctx: BuildContext) -> Built:
    """Always wanted."""
    name = ctx.resource.name
    return {
        "apiVersion": SERVICE.api_version,
        "kind": SERVICE.name,
        "metadata": metadata(ctx, names.headless_service_name(name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector_labels(name),
            "ports": [http_port()],
        },
    }
