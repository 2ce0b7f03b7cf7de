"""The ConfigMap with the wire document: everything a pod is told."""

from typing import Any

from speccache_api import names
from speccache_operator.children.context import BuildContext
from speccache_operator.children.meta import metadata
from speccache_operator.kinds import CONFIG_MAP


def build(ctx: BuildContext) -> dict[str, Any] | None:
    """Wanted once the memory is sized."""
    if ctx.sized is None:
        return None
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.name,
        "metadata": metadata(ctx, names.config_map_name(ctx.resource.name)),
        "data": {names.WIRE_KEY: ctx.sized.wire.to_json()},
    }
